// A row's sums where a subgroup, or a part of one, has all of the row.

// What a NormSpec and a Schedule decide.
!acc = f32
!exchange = memref<2x1x16x2x!acc, #gpu.address_space<workgroup>>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
!thread = vector<9xindex>
// End of what is replaced.

// Before the first sums: nothing.
func.func private @ready_for_sums(%mbarriers: !mbarriers, %thread: !thread) {
  return
}

// A subgroup has all of the row: nobody else wants its sums.
func.func private @send_sums(%exchange: !exchange, %mbarriers: !mbarriers, %buffer: index, %thread: !thread, %leads: i1, %h: !acc, %hx: !acc) {
  return
}

// A row's sums.
func.func private @receive_sums(%exchange: !exchange, %mbarriers: !mbarriers, %buffer: index, %parity: i32, %thread: !thread, %group_i32: i32, %h: !acc, %hx: !acc) -> (!acc, !acc) {
  return %h, %hx : !acc, !acc
}

// The buffer of the exchange for the row after this one: two are used alternately.
func.func private @buffer_after(%buffer: index, %parity: i32) -> (index, i32) {
  %c1 = arith.constant 1 : index
  %other = arith.xori %buffer, %c1 : index
  return %other, %parity : index, i32
}
