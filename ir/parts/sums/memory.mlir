// A row's sums over workgroups that share it, through global memory (math/posts.mlir): a cluster on any GPU, whose
// workgroups need not be neighbours. Each posts its part of a row's sums, and all read the posts of all.
//
// A workgroup that waits for a post must know that its poster runs, and no GPU promises that all workgroups of a launch run at
// once, or begin in any order. So a cluster gathers first: each workgroup counts itself, and waits until all have. From
// then on all of them run, and a running workgroup is never taken off a GPU for good: waits for posts end. If not all
// come for some time, one of those that wait cancels the cluster, by an atomic exchange of the count, so that it either
// is complete or cancelled for everyone. It does all of its work alone, and the others end. So
// whatever else runs on a GPU (other such kernels with some workgroups each, say), no wait lasts forever.
//
// Alone, a workgroup walks over the rows in turns, once in each other's place, and posts sums; then once more in
// each place, and stores dx. It waits for nothing. Sums have the same bits: each is that of the same columns, added up in the
// same order. The counts and posts are those of a call (ir/unsent.mlir); nothing is left behind.

// What a NormSpec and a Schedule decide.
!acc = f32
#cluster = 4 : index
#own_columns = 4096 : index
#subgroup = 32 : index
#warps = 16 : index
#centres = true
#wants_dx = true
!exchange = memref<2x1x16x2x!acc, #gpu.address_space<workgroup>>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
!posted = memref<?x5xi64, #hal.descriptor_type<storage_buffer>>
!pointer = !llvm.ptr<1>
!pair = vector<2x!acc>
!thread = vector<9xindex>

func.func private @my_warp(!thread) -> index
func.func private @my_lane(!thread) -> index
func.func private @my_rank(!thread) -> index
func.func private @unsent_word() -> i64
func.func private @post_address(!posted, index, index) -> !pointer
func.func private @load_post(!pointer) -> i64
func.func private @store_post(!pointer, i64)
func.func private @load_count(!pointer) -> i32
func.func private @add_count(!pointer, i32) -> i32
func.func private @swap_count(!pointer, i32, i32) -> i32
func.func private @rest()
// End of what is replaced.

// Which cluster this is, of how many, and this workgroup's rank. Workgroups of a cluster have numbers that follow each
// other, so that they are likely to begin together.
func.func private @place() -> (index, index, index) {
  %cluster_id = hal.interface.workgroup.id[1] : index
  %clusters = hal.interface.workgroup.count[1] : index
  %rank = hal.interface.workgroup.id[0] : index
  return %cluster_id, %clusters, %rank : index, index, index
}

// How many turns this workgroup takes: one in a complete cluster, two in each place alone, none if another does its
// work. The count begins at -1; a cancelled one is so high that no further workgroup makes it a complete one.
func.func private @gather(%posted: !posted, %mbarriers: !mbarriers, %cluster_id: index, %id: index) -> index {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  %one_i32 = arith.constant 1 : i32
  %zero_i32 = arith.constant 0 : i32
  %patience = arith.constant 4096 : i32  // looks at the count: some milliseconds
  %cancelled = arith.constant 1073741824 : i32
  %alone = arith.constant 2147483647 : i32
  %cluster = arith.constant #cluster
  %others = arith.subi %cluster, %c1 : index
  %complete = arith.index_castui %others : index to i32
  %wants_dx = arith.constant #wants_dx
  %turns = scf.if %wants_dx -> index {
    %is_zero = arith.cmpi eq, %id, %c0 : index
    scf.if %is_zero {
      %count = func.call @post_address(%posted, %cluster_id, %cluster) : (!posted, index, index) -> !pointer
      %before = func.call @add_count(%count, %one_i32) : (!pointer, i32) -> i32
      %first_seen = arith.addi %before, %one_i32 : i32
      %verdict, %looked = scf.while (%seen = %first_seen, %looks = %zero_i32) : (i32, i32) -> (i32, i32) {
        %gathers = arith.cmpi slt, %seen, %complete : i32
        scf.condition(%gathers) %seen, %looks : i32, i32
      } do {
      ^bb0(%seen: i32, %looks: i32):
        func.call @rest() : () -> ()
        %now = func.call @load_count(%count) : (!pointer) -> i32
        %looks_more = arith.addi %looks, %one_i32 : i32
        %gathers_on = arith.cmpi slt, %now, %complete : i32
        %is_late = arith.cmpi sge, %looks_more, %patience : i32
        %cancels = arith.andi %gathers_on, %is_late : i1
        %then = scf.if %cancels -> i32 {
          %found = func.call @swap_count(%count, %now, %cancelled) : (!pointer, i32, i32) -> i32
          %is_mine = arith.cmpi eq, %found, %now : i32
          %decided = arith.select %is_mine, %alone, %found : i32
          scf.yield %decided : i32
        } else {
          scf.yield %now : i32
        }
        scf.yield %then, %looks_more : i32, i32
      }
      %verdict_i64 = arith.extui %verdict : i32 to i64
      memref.store %verdict_i64, %mbarriers[%c0] : !mbarriers
    }
    gpu.barrier
    %told_i64 = memref.load %mbarriers[%c0] : !mbarriers
    %told = arith.trunci %told_i64 : i64 to i32
    %is_complete = arith.cmpi eq, %told, %complete : i32
    %is_alone = arith.cmpi eq, %told, %alone : i32
    %twice = arith.muli %cluster, %c2 : index
    %of_others = arith.select %is_alone, %twice, %c0 : index
    %all = arith.select %is_complete, %c1, %of_others : index
    scf.yield %all : index
  } else {
    scf.yield %c1 : index
  }
  return %turns : index
}

// Whether it may take several turns.
func.func private @takes_turns() -> i1 {
  %several = arith.constant true
  return %several : i1
}

// In whose place a turn is, and whether it is the last one there, which waits for posts and stores dx.
func.func private @turn_of(%turn: index, %turns: index, %rank: index, %part: index) -> (index, index, i1) {
  %c1 = arith.constant 1 : index
  %yes = arith.constant true
  %cluster = arith.constant #cluster
  %together = arith.cmpi eq, %turns, %c1 : index
  %place = arith.remui %turn, %cluster : index
  %again = arith.cmpi uge, %turn, %cluster : index
  %whose = arith.select %together, %rank, %place : index
  %own_columns = arith.constant #own_columns
  %its_part = arith.muli %whose, %own_columns : index
  %is_last = arith.ori %together, %again : i1
  return %whose, %its_part, %is_last : index, index, i1
}

// The exchange in shared memory is used again.
func.func private @end_turn() {
  gpu.barrier
  return
}

// Before the first sums: nothing, the cluster has gathered.
func.func private @ready_for_sums(%mbarriers: !mbarriers, %thread: !thread) {
  return
}

// A subgroup's sums of a row, which the first subgroup adds up and posts. Two buffers, used alternately, need one barrier for
// each row.
func.func private @send_sums(%exchange: !exchange, %mbarriers: !mbarriers, %posted: !posted, %buffer: index, %row: i32, %thread: !thread, %leads: i1, %h: !acc, %hx: !acc) {
  %c0 = arith.constant 0 : index
  %centres = arith.constant #centres
  %warps = arith.constant #warps
  %zero = arith.constant 0.0 : !acc
  %warp = func.call @my_warp(%thread) : (!thread) -> index
  %lane = func.call @my_lane(%thread) : (!thread) -> index
  %warp_pair = vector.from_elements %h, %hx : !pair
  scf.if %leads {
    vector.store %warp_pair, %exchange[%buffer, %c0, %warp, %c0] : !exchange, !pair
  }
  gpu.barrier
  %posts = arith.cmpi eq, %warp, %c0 : index
  scf.if %posts {
    %there = arith.cmpi ult, %lane, %warps : index
    %lane_in = arith.select %there, %lane, %c0 : index
    %pair = vector.load %exchange[%buffer, %c0, %lane_in, %c0] : !exchange, !pair
    %pair_h = vector.extract %pair[0] : !acc from !pair
    %pair_hx = vector.extract %pair[1] : !acc from !pair
    %lane_h = arith.select %there, %pair_h, %zero : !acc
    %lane_hx = arith.select %there, %pair_hx, %zero : !acc
    %own_h = scf.if %centres -> !acc {
      %all_h = gpu.subgroup_reduce add %lane_h cluster(size = 32) : (!acc) -> !acc
      scf.yield %all_h : !acc
    } else {
      scf.yield %zero : !acc
    }
    %own_hx = gpu.subgroup_reduce add %lane_hx cluster(size = 32) : (!acc) -> !acc
    scf.if %leads {
      %own_pair = vector.from_elements %own_h, %own_hx : !pair
      %words = vector.bitcast %own_pair : !pair to vector<1xi64>
      %word = vector.extract %words[0] : i64 from vector<1xi64>
      %unsent = func.call @unsent_word() : () -> i64
      %nans = arith.constant 9223372034707292159 : i64  // two NaNs: 0x7fffffff
      %is_unsent = arith.cmpi eq, %word, %unsent : i64
      %post = arith.select %is_unsent, %nans, %word : i64
      %rank = func.call @my_rank(%thread) : (!thread) -> index
      %row_index = arith.index_castui %row : i32 to index
      %address = func.call @post_address(%posted, %row_index, %rank) : (!posted, index, index) -> !pointer
      func.call @store_post(%address, %post) : (!pointer, i64) -> ()
    }
  }
  return
}

// A row's sums, once all have posted theirs: a lane reads one post. In a turn that waits for nothing, they are junk.
func.func private @receive_sums(%exchange: !exchange, %mbarriers: !mbarriers, %posted: !posted, %buffer: index, %parity: i32, %row: i32, %thread: !thread, %group_i32: i32, %waits: i1, %h: !acc, %hx: !acc) -> (!acc, !acc) {
  %c0 = arith.constant 0 : index
  %centres = arith.constant #centres
  %cluster = arith.constant #cluster
  %zero = arith.constant 0.0 : !acc
  %lane = func.call @my_lane(%thread) : (!thread) -> index
  %there = arith.cmpi ult, %lane, %cluster : index
  %lane_in = arith.select %there, %lane, %c0 : index
  %row_index = arith.index_castui %row : i32 to index
  %address = func.call @post_address(%posted, %row_index, %lane_in) : (!posted, index, index) -> !pointer
  %unsent = func.call @unsent_word() : () -> i64
  %first_read = func.call @load_post(%address) : (!pointer) -> i64
  %post = scf.while (%read = %first_read) : (i64) -> i64 {
    %is_unsent = arith.cmpi eq, %read, %unsent : i64
    %goes_on = arith.andi %is_unsent, %waits : i1
    scf.condition(%goes_on) %read : i64
  } do {
  ^bb0(%read: i64):
    func.call @rest() : () -> ()
    %again = func.call @load_post(%address) : (!pointer) -> i64
    scf.yield %again : i64
  }
  %words = vector.from_elements %post : vector<1xi64>
  %pair = vector.bitcast %words : vector<1xi64> to !pair
  %pair_h = vector.extract %pair[0] : !acc from !pair
  %pair_hx = vector.extract %pair[1] : !acc from !pair
  %lane_h = arith.select %there, %pair_h, %zero : !acc
  %lane_hx = arith.select %there, %pair_hx, %zero : !acc
  %sum_h = scf.if %centres -> !acc {
    %all_h = gpu.subgroup_reduce add %lane_h cluster(size = 32) : (!acc) -> !acc
    scf.yield %all_h : !acc
  } else {
    scf.yield %zero : !acc
  }
  %sum_hx = gpu.subgroup_reduce add %lane_hx cluster(size = 32) : (!acc) -> !acc
  return %sum_h, %sum_hx : !acc, !acc
}

// The buffer of the exchange for the row after this one: two are used alternately.
func.func private @buffer_after(%buffer: index, %parity: i32) -> (index, i32) {
  %c1 = arith.constant 1 : index
  %other = arith.xori %buffer, %c1 : index
  return %other, %parity : index, i32
}
