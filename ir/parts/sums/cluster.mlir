// A row's sums over the workgroups of a cluster, through each other's shared memory (NVIDIA since sm_90;
// math/clusters.mlir).

// What a NormSpec and a Schedule decide.
!acc = f32
#cluster = 1 : index
#subgroup = 32 : index
#warps = 16 : index
#defers = false
#buffers = 2 : index
#centres = true
!exchange = memref<2x1x16x2x!acc, #gpu.address_space<workgroup>>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
!pair = vector<2x!acc>
!thread = vector<9xindex>
!posted = memref<?x2xi64, #hal.descriptor_type<storage_buffer>>

func.func private @my_id(!thread) -> index
func.func private @mbarrier(!mbarriers, index) -> i32
func.func private @init_mbarrier(i32, i32)
func.func private @sent_bytes() -> i32
func.func private @expect(i32, i32)
func.func private @my_rank(!thread) -> index
func.func private @my_warp(!thread) -> index
func.func private @my_lane(!thread) -> index
func.func private @of_rank(i32, i32) -> i32
func.func private @send_two(i32, !acc, !acc, i32)
func.func private @await(i32, i32)
func.func private @senders() -> index
func.func private @received() -> index
// End of what is replaced.

// Which cluster this is, of how many, and this workgroup's rank.
func.func private @place() -> (index, index, index) {
  %cluster_id = hal.interface.workgroup.id[0] : index
  %clusters = hal.interface.workgroup.count[0] : index
  %rank = hal.interface.workgroup.id[1] : index
  return %cluster_id, %clusters, %rank : index, index, index
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

// Nobody sends to a workgroup that has not begun. None ends before all that is sent to it has come. And
// nobody is two rows ahead of another, which has to send its sums of the row between first. Where sums are
// received later, nobody is three rows ahead: the exchange has room for four.
func.func private @ready_for_sums(%mbarriers: !mbarriers, %thread: !thread) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %one_i32 = arith.constant 1 : i32
  %buffers_count = arith.constant #buffers
  %id = func.call @my_id(%thread) : (!thread) -> index
  %is_zero = arith.cmpi eq, %id, %c0 : index
  scf.if %is_zero {
    scf.for %buffer = %c0 to %buffers_count step %c1 {
      %mbarrier = func.call @mbarrier(%mbarriers, %buffer) : (!mbarriers, index) -> i32
      func.call @init_mbarrier(%mbarrier, %one_i32) : (i32, i32) -> ()
    }
  }
  nvvm.cluster.arrive.relaxed
  nvvm.cluster.wait
  return
}

// A subgroup's sums of a row for all workgroups of its cluster: lane r sends them to that of rank r. One thread of
// each workgroup says what is to come.
func.func private @send_sums(%exchange: !exchange, %mbarriers: !mbarriers, %posted: !posted, %buffer: index, %row: i32, %thread: !thread, %leads: i1, %h: !acc, %hx: !acc) {
  %c0 = arith.constant 0 : index
  %id = func.call @my_id(%thread) : (!thread) -> index
  %is_zero = arith.cmpi eq, %id, %c0 : index
  %mbarrier = func.call @mbarrier(%mbarriers, %buffer) : (!mbarriers, index) -> i32
  scf.if %is_zero {
    %sent_bytes = func.call @sent_bytes() : () -> i32
    func.call @expect(%mbarrier, %sent_bytes) : (i32, i32) -> ()
  }
  %rank = func.call @my_rank(%thread) : (!thread) -> index
  %warp = func.call @my_warp(%thread) : (!thread) -> index
  %lane = func.call @my_lane(%thread) : (!thread) -> index
  %cluster = arith.constant #cluster
  %warps = arith.constant #warps
  %two = arith.constant 2 : index
  %bytes = arith.constant 4 : index
  %there = arith.cmpi ult, %lane, %cluster : index
  scf.if %there {
    %all_warps = arith.muli %cluster, %warps : index
    %buffers_before = arith.muli %buffer, %all_warps : index
    %ranks_before = arith.muli %rank, %warps : index
    %before = arith.addi %buffers_before, %ranks_before : index
    %number_before = arith.addi %before, %warp : index
    %number = arith.muli %number_before, %two : index
    %offset = arith.muli %number, %bytes : index
    %base = memref.extract_aligned_pointer_as_index %exchange : !exchange -> index
    %mine = arith.addi %base, %offset : index
    %mine_i32 = arith.index_castui %mine : index to i32
    %lane_i32 = arith.index_castui %lane : index to i32
    %theirs = func.call @of_rank(%mine_i32, %lane_i32) : (i32, i32) -> i32
    %their_mbarrier = func.call @of_rank(%mbarrier, %lane_i32) : (i32, i32) -> i32
    func.call @send_two(%theirs, %h, %hx, %their_mbarrier) : (i32, !acc, !acc, i32) -> ()
  }
  return
}

// A row's sums, once all of the cluster's subgroups have sent theirs: there are many, so each lane reads a few.
func.func private @receive_sums(%exchange: !exchange, %mbarriers: !mbarriers, %posted: !posted, %buffer: index, %parity: i32, %row: i32, %thread: !thread, %group_i32: i32, %waits: i1, %h: !acc, %hx: !acc) -> (!acc, !acc) {
  %mbarrier = func.call @mbarrier(%mbarriers, %buffer) : (!mbarriers, index) -> i32
  func.call @await(%mbarrier, %parity) : (i32, i32) -> ()
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %lane = func.call @my_lane(%thread) : (!thread) -> index
  %lanes = arith.constant #subgroup
  %senders = func.call @senders() : () -> index
  %each = func.call @received() : () -> index
  %centres = arith.constant #centres
  %zero = arith.constant 0.0 : !acc
  %lane_h, %lane_hx = scf.for %one = %c0 to %each step %c1 iter_args(%h_sum = %zero, %hx_sum = %zero) -> (!acc, !acc) {
    %before = arith.muli %one, %lanes : index
    %which = arith.addi %before, %lane : index
    %there = arith.cmpi ult, %which, %senders : index
    %which_in = arith.select %there, %which, %c0 : index
    %pair = vector.load %exchange[%buffer, %c0, %which_in, %c0] : !exchange, !pair
    %h_sent = vector.extract %pair[0] : !acc from !pair
    %hx_sent = vector.extract %pair[1] : !acc from !pair
    %h_more = arith.addf %h_sum, %h_sent : !acc
    %hx_more = arith.addf %hx_sum, %hx_sent : !acc
    %h_after = arith.select %there, %h_more, %h_sum : !acc
    %hx_after = arith.select %there, %hx_more, %hx_sum : !acc
    scf.yield %h_after, %hx_after : !acc, !acc
  } {llvm.loop_annotation = #unrolled}
  %sum_h = scf.if %centres -> !acc {
    %all_h = gpu.subgroup_reduce add %lane_h cluster(size = 32) : (!acc) -> !acc
    scf.yield %all_h : !acc
  } else {
    scf.yield %zero : !acc
  }
  %sum_hx = gpu.subgroup_reduce add %lane_hx cluster(size = 32) : (!acc) -> !acc
  return %sum_h, %sum_hx : !acc, !acc
}

// The buffer of the exchange for the row after this one: they are used one after the other. The phases of a buffer's mbarrier
// have parity 0 and 1 alternately.
func.func private @buffer_after(%buffer: index, %parity: i32) -> (index, i32) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %defers = arith.constant #defers
  %buffers = arith.constant #buffers
  %next, %flipped = scf.if %defers -> (index, i32) {
    %after = arith.addi %buffer, %c1 : index
    %wraps = arith.cmpi eq, %after, %buffers : index
    %wrapped = arith.select %wraps, %c0, %after : index
    %flips = arith.extui %wraps : i1 to i32
    %parity_wrapped = arith.xori %parity, %flips : i32
    scf.yield %wrapped, %parity_wrapped : index, i32
  } else {
    %other = arith.xori %buffer, %c1 : index
    %buffer_i32 = arith.index_castui %buffer : index to i32
    %parity_other = arith.xori %parity, %buffer_i32 : i32
    scf.yield %other, %parity_other : index, i32
  }
  return %next, %flipped : index, i32
}
