// A row's sums where a subgroup, or a part of one, has all of the row.

// What a NormSpec and a Schedule decide.
!acc = f32
#inv_n = 2.44140625e-4 : !acc
!forward_exchange = memref<2x1x8x!acc, #gpu.address_space<workgroup>>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
!forward_thread = vector<8xindex>
// End of what is replaced.

// Before the first sums: nothing.
func.func private @ready_for_sums(%mbarriers: !mbarriers, %thread: !forward_thread) {
  return
}

func.func private @others_are_ready() {
  return
}

// The sum over a row's threads, for all of them.
func.func private @total(%share: !acc, %exchange: !forward_exchange, %buffer: index, %thread: !forward_thread) -> !acc {
  %warp_sum = gpu.subgroup_reduce add %share cluster(size = 32) : (!acc) -> !acc
  return %warp_sum : !acc
}

// What a row is centred by: its mean.
func.func private @centre(%share: !acc, %exchange: !forward_exchange, %thread: !forward_thread) -> !acc {
  %c0 = arith.constant 0 : index
  %inv_n = arith.constant #inv_n
  %sum = func.call @total(%share, %exchange, %c0, %thread) : (!acc, !forward_exchange, index, !forward_thread) -> !acc
  %mean = arith.mulf %sum, %inv_n : !acc
  return %mean : !acc
}

// The variance is about that mean: nothing is merged.
func.func private @merges() -> i1 {
  %no = arith.constant false
  return %no : i1
}

// A row's mean, and the sum of its squares without it.
func.func private @statistics(%centre: !acc, %share_centred: !acc, %share_squares: !acc, %exchange: !forward_exchange, %mbarriers: !mbarriers, %thread: !forward_thread) -> (!acc, !acc) {
  %c1 = arith.constant 1 : index
  %squares = func.call @total(%share_squares, %exchange, %c1, %thread) : (!acc, !forward_exchange, index, !forward_thread) -> !acc
  return %centre, %squares : !acc, !acc
}
