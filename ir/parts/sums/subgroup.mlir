// A row's sums where a subgroup, or a part of one, has all of the row.

// What a NormSpec and a Schedule decide.
!acc = f32
!exchange = memref<2x1x16x2x!acc, #gpu.address_space<workgroup>>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
!thread = vector<9xindex>
!posted = memref<?x2xi64, #hal.descriptor_type<storage_buffer>>
// End of what is replaced.

// Which workgroup this is, of how many, and its rank: it has whole rows.
func.func private @place() -> (index, index, index) {
  %c0 = arith.constant 0 : index
  %workgroup = hal.interface.workgroup.id[0] : index
  %workgroups = hal.interface.workgroup.count[0] : index
  return %workgroup, %workgroups, %c0 : index, index, index
}

// A workgroup takes one turn, in its own place.
func.func private @gather(%posted: !posted, %mbarriers: !mbarriers, %workgroup: index, %id: index) -> index {
  %c1 = arith.constant 1 : index
  return %c1 : index
}

// Whether it may take several turns.
func.func private @takes_turns() -> i1 {
  %several = arith.constant false
  return %several : i1
}

func.func private @turn_of(%turn: index, %turns: index, %rank: index, %part: index) -> (index, index, i1) {
  %yes = arith.constant true
  return %rank, %part, %yes : index, index, i1
}

func.func private @end_turn() {
  return
}

// Before the first sums: nothing.
func.func private @ready_for_sums(%mbarriers: !mbarriers, %thread: !thread) {
  return
}

// A subgroup has all of the row: nobody else wants its sums.
func.func private @send_sums(%exchange: !exchange, %mbarriers: !mbarriers, %posted: !posted, %buffer: index, %row: i32, %thread: !thread, %leads: i1, %h: !acc, %hx: !acc) {
  return
}

// A row's sums.
func.func private @receive_sums(%exchange: !exchange, %mbarriers: !mbarriers, %posted: !posted, %buffer: index, %parity: i32, %row: i32, %thread: !thread, %group_i32: i32, %waits: i1, %h: !acc, %hx: !acc) -> (!acc, !acc) {
  return %h, %hx : !acc, !acc
}

// The buffer of the exchange for the row after this one: two are used alternately.
func.func private @buffer_after(%buffer: index, %parity: i32) -> (index, i32) {
  %c1 = arith.constant 1 : index
  %other = arith.xori %buffer, %c1 : index
  return %other, %parity : index, i32
}
