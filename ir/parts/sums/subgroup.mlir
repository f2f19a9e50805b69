// A row's sums where a subgroup, or a part of one, has all of the row.

// What a NormSpec and a Schedule decide.
!acc = f32
!exchange = memref<2x1x16x2x!acc, #gpu.address_space<workgroup>>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
// End of what is replaced.

// Before the first sums: nothing.
func.func private @ready_for_sums(%mbarriers: !mbarriers, %thread: index) {
  return
}

// A subgroup has all of the row: nobody else wants its sums.
func.func private @send_sums(%exchange: !exchange, %mbarriers: !mbarriers, %half: index, %group: index, %rank: index, %warp: index, %lane: index, %leads: i1, %thread: index, %h: !acc, %hx: !acc) {
  return
}

// A row's sums.
func.func private @receive_sums(%exchange: !exchange, %mbarriers: !mbarriers, %half: index, %parity: i32, %group: index, %group_i32: i32, %lane: index, %h: !acc, %hx: !acc) -> (!acc, !acc) {
  return %h, %hx : !acc, !acc
}

// The buffer of the exchange for the row after this one: two are used in turn.
func.func private @buffer_after(%half: index, %parity: i32) -> (index, i32) {
  %c1 = arith.constant 1 : index
  %other = arith.xori %half, %c1 : index
  return %other, %parity : index, i32
}
