// A row's sums over the workgroups of a cluster, through each other's shared memory (NVIDIA since sm_90;
// math/clusters.mlir). That takes long, so they exchange sums once.

// What a NormSpec and a Schedule decide.
!acc = f32
#inv_n = 2.44140625e-4 : !acc
#subgroup = 32 : index
#centres = true
#columns = 4096 : index
#forward_columns = 4096 : index
#forward_cluster = 1 : index
#forward_sent_bytes = 128 : i32
#forward_vector = 8 : index
#forward_threads = 256 : index
#forward_warps = 8 : index
!forward_exchange = memref<1x8x4x!acc, #gpu.address_space<workgroup>>
!forward_sent = vector<4x!acc>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
!forward_thread = vector<8xindex>
#forward_senders = 8 : index
#forward_received = 1 : index
#forward_walks = 0 : index
#forward_bytes_of_sender = 16 : index

func.func private @my_id(!forward_thread) -> index
func.func private @my_round(!forward_thread) -> index
func.func private @mbarrier(!mbarriers, index) -> i32
func.func private @init_mbarrier(i32, i32)
func.func private @expect(i32, i32)
func.func private @my_rank(!forward_thread) -> index
func.func private @my_t(!forward_thread) -> index
func.func private @await(i32, i32)
func.func private @of_rank(i32, i32) -> i32
func.func private @send(i32, !acc, i32)
func.func private @send_four(i32, !acc, !acc, !acc, !acc, i32)
func.func private @chunk_count(index) -> index
func.func private @lacking_columns(index) -> index
// End of what is replaced.

// Nobody sends to a workgroup that has not begun. None ends before all that is sent to it has come.
func.func private @ready_for_sums(%mbarriers: !mbarriers, %thread: !forward_thread) {
  %c0 = arith.constant 0 : index
  %id = func.call @my_id(%thread) : (!forward_thread) -> index
  %is_zero = arith.cmpi eq, %id, %c0 : index
  scf.if %is_zero {
    %sent_bytes = arith.constant #forward_sent_bytes
    %one_i32 = arith.constant 1 : i32
    %mbarrier = func.call @mbarrier(%mbarriers, %c0) : (!mbarriers, index) -> i32
    func.call @init_mbarrier(%mbarrier, %one_i32) : (i32, i32) -> ()
    // Workgroups that walk take two in turns, and say later how much is to come.
    %c1 = arith.constant 1 : index
    %walk = arith.constant #forward_walks
    %walks = arith.cmpi ne, %walk, %c0 : index
    scf.if %walks {
      %other = func.call @mbarrier(%mbarriers, %c1) : (!mbarriers, index) -> i32
      func.call @init_mbarrier(%other, %one_i32) : (i32, i32) -> ()
    } else {
      func.call @expect(%mbarrier, %sent_bytes) : (i32, i32) -> ()
    }
  }
  nvvm.cluster.arrive.relaxed
  return
}

func.func private @others_are_ready() {
  nvvm.cluster.wait
  return
}

// What a subgroup's columns are centred by: some number near their mean.
func.func private @centre(%share: !acc, %exchange: !forward_exchange, %thread: !forward_thread) -> !acc {
  %one = arith.constant 1.0 : !acc
  %sum = gpu.subgroup_reduce add %share cluster(size = 32) : (!acc) -> !acc
  %count = func.call @columns_of(%thread) : (!forward_thread) -> !acc
  %some = arith.maximumf %count, %one : !acc
  %mean_of_warp = arith.divf %sum, %some : !acc
  return %mean_of_warp : !acc
}

// Whether subgroups are centred by numbers of their own: what is left of their sums is exchanged, too.
func.func private @merges() -> i1 {
  %yes = arith.constant true
  return %yes : i1
}

// A row's mean m, and the sum of its squares without m, for all threads of a cluster. Subgroup w has n_w columns, and some
// number p_w near their mean. Without p_w, they sum up to r_w, and their squares to q_w. For any p_w and m, what is asked
// for is the sum of q_w + (p_w - m) * (2 r_w + n_w (p_w - m)). So an error of p_w or m enters squared, and one exchange is
// enough. p_w is rounded once, so that m is as near as by sums. Source: Chan, Golub, LeVeque, "Algorithms for Computing
// the Sample Variance", The American Statistician 37(3), 1983. Where the mean is not subtracted, p_w and m are zero.
func.func private @statistics(%p_own: !acc, %share_r: !acc, %share_q: !acc, %exchange: !forward_exchange, %mbarriers: !mbarriers, %thread: !forward_thread) -> (!acc, !acc) {
  %t = func.call @my_t(%thread) : (!forward_thread) -> index
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  // In a walk, one row's sums and the next one's have places of their own. Who sends the next but one's has all of the
  // next one's, and nobody sends these before it has read what came before.
  %walk = arith.constant #forward_walks
  %walks = arith.cmpi ne, %walk, %c0 : index
  %round = func.call @my_round(%thread) : (!forward_thread) -> index
  %turn = arith.remui %round, %c2 : index
  %turns_before = arith.divui %round, %c2 : index
  %phase = arith.remui %turns_before, %c2 : index
  %parity = arith.index_castui %phase : index to i32
  %received = arith.constant #forward_received
  %centres = arith.constant #centres
  %zero = arith.constant 0.0 : !acc
  %two = arith.constant 2.0 : !acc
  %inv_n = arith.constant #inv_n
  %mbarrier = func.call @mbarrier(%mbarriers, %turn) : (!mbarriers, index) -> i32
  %id = func.call @my_id(%thread) : (!forward_thread) -> index
  %is_zero = arith.cmpi eq, %id, %c0 : index
  %expects = arith.andi %walks, %is_zero : i1
  scf.if %expects {
    %sent_bytes = arith.constant #forward_sent_bytes
    func.call @expect(%mbarrier, %sent_bytes) : (i32, i32) -> ()
  }
  %warp_q = gpu.subgroup_reduce add %share_q cluster(size = 32) : (!acc) -> !acc
  %warp_r = scf.if %centres -> !acc {
    %sum_r = gpu.subgroup_reduce add %share_r cluster(size = 32) : (!acc) -> !acc
    scf.yield %sum_r : !acc
  } else {
    scf.yield %zero : !acc
  }
  func.call @send_sums(%exchange, %mbarrier, %turn, %warp_q, %warp_r, %p_own, %thread)
      : (!forward_exchange, i32, index, !acc, !acc, !acc, !forward_thread) -> ()
  func.call @await(%mbarrier, %parity) : (i32, i32) -> ()
  %mean = scf.if %centres -> !acc {
    %lane_sum = scf.for %number = %c0 to %received step %c1 iter_args(%before = %zero) -> (!acc) {
      %q, %r, %p, %n, %there = func.call @received_sums(%exchange, %turn, %number, %t) : (!forward_exchange, index, index, index) -> (!acc, !acc, !acc, !acc, i1)
      %more = math.fma %n, %p, %before : !acc
      %after = arith.select %there, %more, %before : !acc
      scf.yield %after : !acc
    } {llvm.loop_annotation = #unrolled}
    %row_sum = gpu.subgroup_reduce add %lane_sum cluster(size = 32) : (!acc) -> !acc
    %mean_of_row = arith.mulf %row_sum, %inv_n : !acc
    scf.yield %mean_of_row : !acc
  } else {
    scf.yield %zero : !acc
  }
  %lane_squares = scf.for %number = %c0 to %received step %c1 iter_args(%before = %zero) -> (!acc) {
    %q, %r, %p, %n, %there = func.call @received_sums(%exchange, %turn, %number, %t) : (!forward_exchange, index, index, index) -> (!acc, !acc, !acc, !acc, i1)
    %squares = scf.if %centres -> !acc {
      %off = arith.subf %p, %mean : !acc
      %twice_r = arith.mulf %two, %r : !acc
      %slope = math.fma %n, %off, %twice_r : !acc
      %without_mean = math.fma %off, %slope, %q : !acc
      scf.yield %without_mean : !acc
    } else {
      scf.yield %q : !acc
    }
    %more = arith.addf %before, %squares : !acc
    %after = arith.select %there, %more, %before : !acc
    scf.yield %after : !acc
  } {llvm.loop_annotation = #unrolled}
  %row_squares = gpu.subgroup_reduce add %lane_squares cluster(size = 32) : (!acc) -> !acc
  return %mean, %row_squares : !acc, !acc
}

// A subgroup's sums for the workgroups of its cluster: lane r sends them to that of rank r.
func.func private @send_sums(%exchange: !forward_exchange, %mbarrier: i32, %turn: index, %q: !acc, %r: !acc, %p: !acc, %thread: !forward_thread) {
  %rank = func.call @my_rank(%thread) : (!forward_thread) -> index
  %t = func.call @my_t(%thread) : (!forward_thread) -> index
  %lanes = arith.constant #subgroup
  %lane = arith.remui %t, %lanes : index
  %warp = arith.divui %t, %lanes : index
  %cluster = arith.constant #forward_cluster
  %there = arith.cmpi ult, %lane, %cluster : index
  scf.if %there {
    %warps = arith.constant #forward_warps
    %senders = arith.constant #forward_senders
    %bytes = arith.constant #forward_bytes_of_sender
    %turns_before = arith.muli %turn, %senders : index
    %ranks_before = arith.muli %rank, %warps : index
    %before = arith.addi %turns_before, %ranks_before : index
    %which = arith.addi %before, %warp : index
    %offset = arith.muli %which, %bytes : index
    %base = memref.extract_aligned_pointer_as_index %exchange : !forward_exchange -> index
    %mine = arith.addi %base, %offset : index
    %mine_i32 = arith.index_castui %mine : index to i32
    %lane_i32 = arith.index_castui %lane : index to i32
    %theirs = func.call @of_rank(%mine_i32, %lane_i32) : (i32, i32) -> i32
    %their_mbarrier = func.call @of_rank(%mbarrier, %lane_i32) : (i32, i32) -> i32
    %centres = arith.constant #centres
    scf.if %centres {
      %n = func.call @columns_of(%thread) : (!forward_thread) -> !acc
      func.call @send_four(%theirs, %q, %r, %p, %n, %their_mbarrier) : (i32, !acc, !acc, !acc, !acc, i32) -> ()
    } else {
      func.call @send(%theirs, %q, %their_mbarrier) : (i32, !acc, i32) -> ()
    }
  }
  return
}

// What came from the subgroup whose sums a lane reads as those of a number, and whether there is one. Without a mean, that is
// the sum of squares alone.
func.func private @received_sums(%exchange: !forward_exchange, %turn: index, %number: index, %t: index) -> (!acc, !acc, !acc, !acc, i1) {
  %c0 = arith.constant 0 : index
  %lanes = arith.constant #subgroup
  %senders = arith.constant #forward_senders
  %centres = arith.constant #centres
  %zero = arith.constant 0.0 : !acc
  %lane = arith.remui %t, %lanes : index
  %before = arith.muli %number, %lanes : index
  %which = arith.addi %before, %lane : index
  %there = arith.cmpi ult, %which, %senders : index
  %which_in = arith.select %there, %which, %c0 : index
  %q, %r, %p, %n = scf.if %centres -> (!acc, !acc, !acc, !acc) {
    %sent = vector.load %exchange[%turn, %which_in, %c0] : !forward_exchange, !forward_sent
    %q_sent, %r_sent, %p_sent, %n_sent = vector.to_elements %sent : !forward_sent
    scf.yield %q_sent, %r_sent, %p_sent, %n_sent : !acc, !acc, !acc, !acc
  } else {
    %q_sent = memref.load %exchange[%turn, %which_in, %c0] : !forward_exchange
    scf.yield %q_sent, %zero, %zero, %zero : !acc, !acc, !acc, !acc
  }
  return %q, %r, %p, %n, %there : !acc, !acc, !acc, !acc, i1
}

// How many columns a thread's subgroup has.
func.func private @columns_of(%thread: !forward_thread) -> !acc {
  %rank = func.call @my_rank(%thread) : (!forward_thread) -> index
  %t = func.call @my_t(%thread) : (!forward_thread) -> index
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %all = arith.constant #columns
  %most = arith.constant #forward_columns
  %ranks_before = arith.muli %rank, %most : index
  %rest = arith.subi %all, %ranks_before : index
  %n = arith.minsi %most, %rest : index
  %v = arith.constant #forward_vector
  %t_count = arith.constant #forward_threads
  %lanes = arith.constant #subgroup
  %warp = arith.divui %t, %lanes : index
  %chunks = func.call @chunk_count(%n) : (index) -> index
  %of_all = arith.divui %chunks, %t_count : index
  %left = arith.remui %chunks, %t_count : index
  %before = arith.muli %warp, %lanes : index
  %after = arith.subi %left, %before : index
  %some = arith.maxsi %after, %c0 : index
  %more = arith.minsi %some, %lanes : index
  %of_lanes = arith.muli %of_all, %lanes : index
  %mine = arith.addi %of_lanes, %more : index
  %most_columns = arith.muli %mine, %v : index
  %last_chunk = arith.subi %chunks, %c1 : index
  %of_last = arith.remui %last_chunk, %t_count : index
  %warp_of_last = arith.divui %of_last, %lanes : index
  %is_its = arith.cmpi eq, %warp_of_last, %warp : index
  %lacking = func.call @lacking_columns(%n) : (index) -> index
  %lacks = arith.select %is_its, %lacking, %c0 : index
  %count = arith.subi %most_columns, %lacks : index
  %count_i32 = arith.index_castui %count : index to i32
  %count_acc = arith.uitofp %count_i32 : i32 to !acc
  return %count_acc : !acc
}
