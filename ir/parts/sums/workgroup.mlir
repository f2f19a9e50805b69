// A row's sums over the subgroups of a group: through shared memory.

// What a NormSpec and a Schedule decide.
!acc = f32
!exchange = memref<2x1x16x2x!acc, #gpu.address_space<workgroup>>
!warp_sums = vector<16x2x!acc>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
!pair = vector<2x!acc>
!thread = vector<9xindex>
!posted = memref<?x2xi64, #hal.descriptor_type<storage_buffer>>

func.func private @my_group(!thread) -> index
func.func private @my_warp(!thread) -> index
func.func private @one_group() -> i1
func.func private @threads_i32() -> i32
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

// A subgroup's sums of a row, for the others of its group. Two buffers, used alternately, need one barrier for each row.
func.func private @send_sums(%exchange: !exchange, %mbarriers: !mbarriers, %posted: !posted, %buffer: index, %row: i32, %thread: !thread, %leads: i1, %h: !acc, %hx: !acc) {
  %c0 = arith.constant 0 : index
  %group = func.call @my_group(%thread) : (!thread) -> index
  %warp = func.call @my_warp(%thread) : (!thread) -> index
  %warp_pair = vector.from_elements %h, %hx : !pair
  scf.if %leads {
    vector.store %warp_pair, %exchange[%buffer, %group, %warp, %c0] : !exchange, !pair
  }
  return
}

// A row's sums, once all subgroups of the group have stored theirs.
func.func private @receive_sums(%exchange: !exchange, %mbarriers: !mbarriers, %posted: !posted, %buffer: index, %parity: i32, %row: i32, %thread: !thread, %group_i32: i32, %waits: i1, %h: !acc, %hx: !acc) -> (!acc, !acc) {
  %c0 = arith.constant 0 : index
  %one_i32 = arith.constant 1 : i32
  %group = func.call @my_group(%thread) : (!thread) -> index
  %one_group = func.call @one_group() : () -> i1
  %threads_i32 = func.call @threads_i32() : () -> i32
  %zero = arith.constant 0.0 : !acc
  %zero_pair = arith.constant dense<0.0> : !pair
  scf.if %one_group {
    gpu.barrier
  } else {
    %group_barrier = arith.addi %group_i32, %one_i32 : i32  // the workgroup's is 0
    nvvm.barrier id = %group_barrier number_of_threads = %threads_i32
  }
  %pairs = vector.transfer_read %exchange[%buffer, %group, %c0, %c0], %zero {in_bounds = [true, true]} : !exchange, !warp_sums
  %pair = vector.multi_reduction <add>, %pairs, %zero_pair [0] : !warp_sums to !pair
  %pair_h = vector.extract %pair[0] : !acc from !pair
  %pair_hx = vector.extract %pair[1] : !acc from !pair
  return %pair_h, %pair_hx : !acc, !acc
}

// The buffer of the exchange for the row after this one: two are used alternately.
func.func private @buffer_after(%buffer: index, %parity: i32) -> (index, i32) {
  %c1 = arith.constant 1 : index
  %other = arith.xori %buffer, %c1 : index
  return %other, %parity : index, i32
}
