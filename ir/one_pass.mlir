// Layer normalization, backward, in one pass over memory: how the algorithm runs on a GPU.
//
// x and dy have M rows of N columns. A fixed number of workgroups walk over the rows. A row is read once:
// its two sums are reduced over the threads that hold it, dx is written, and dgamma and dbeta accumulate
// in registers over all rows that a thread sees. Each workgroup stores them as one partial row, and
// finalize.mlir adds up the partial rows. There are no atomics, so the bits are the same every time.
//
// A row is divided into chunks of V neighbouring columns; a chunk has 16 bytes where N allows it. A
// workgroup has several groups of T threads. A group works on one row at a time, and its thread t owns
// the chunks t, t + T, t + 2T, ... Loops over a thread's chunks are unrolled, so that the values held of
// each chunk stay in registers. A narrow row has a part of a subgroup (@shares_subgroup). The groups of a
// subgroup stay together: they walk on as long as the first of them has a row. One without a row takes the
// last row once more, adds nothing to any sum, and stores nothing.
//
// Where N is no multiple of V, rows begin anywhere in an access (@shifted). A row's chunks are then those of
// memory that it touches. The first begins up to V - 1 elements before the row, and the last ends after it:
// what is not of the row counts as zeros and is not stored. The rows of a group are so far apart that all
// begin at the same place of an access, so that a thread has the same columns of each.
//
// From the forward's output (#from_output), x is that output, and xhat is (x - beta) / g. Shared memory
// keeps the bias and 1 / g where there is room: in registers, each would be one more for each element.
// Without room for it, 1 / g is computed again for each row.
//
// A row that is too wide for a workgroup is shared by a cluster of them (NVIDIA since sm_90): each has a
// part of the columns. Clusters count along x, and a cluster's workgroups along y. Every subgroup sends its
// sums into the exchange of each workgroup of the cluster (math/clusters.mlir). These take a while to come. So
// a schedule may tell the sums of the next row before it awaits those of this one (#defers).
//
// A row is fetched a few steps ahead of its use, so that memory is busy while threads wait for each
// other: by cp.async into shared memory (NVIDIA since sm_80), or by loads into registers (any GPU). A
// Schedule says which, by constants; the compiler folds the branches that are not taken.
//
// Or each subgroup copies its columns of a row together (#bulk, NVIDIA since sm_90; math/bulk.mlir). One thread starts
// such a copy, and the subgroup awaits it at an mbarrier of its own. Its columns are neighbours then: a thread owns the
// chunks l, l + L, l + 2L, ... of its subgroup's, for lane l of L. A copy may begin anywhere, so V need not be more than
// what divides N, and shared memory is read at any place. If V does not divide N, what a copy brings of other rows
// is overwritten by zeros in shared memory. A slot may be refilled in parts (#refills), each once its dx is stored.
// Where shared memory has no room for two rows, it may have room for one and a half: x is copied a step later than dy
// then (#x_later), into the slot of the row before. Copies of dy are the last to begin, so that x does not wait for them.

// What a NormSpec and a Schedule decide. These lines are replaced; the rest changes only by the rules
// of README.md.
!dy = bf16
!x = bf16
!gamma = bf16
!beta = bf16
!residual = bf16
!acc = f32
!dy_sum = bf16               // of sums of gradients of the output
#columns = 4096 : index      // N
#own_columns = 4096 : index  // of a workgroup
#cluster = 1 : index         // workgroups that share a row
#vector = 8 : index          // V
#least_last = 0 : index      // of a thread's chunks, the first that may be a row's last
#dy_bits = 16 : index        // of an element
#x_bits = 16 : index
#chunks = 1 : index          // of a row that a thread owns
#copied = 8 : index          // V, where chunks are copied
#threads = 512 : index       // T
#subgroup = 32 : index
#warps = 16 : index          // subgroups of a group
#groups = 1 : index
#workgroups_i32 = 132 : i32
#resident = 1 : i32          // workgroups that a multiprocessor must hold at once
#ahead_i32 = 2 : i32         // steps between a row's fetch and its use
#slots = 3 : index           // rows of a group that shared memory holds
#bulk = false                // a subgroup's columns of a row are copied together, by cp.async.bulk
#dy_pitch = 4160 : index     // elements of dy that a subgroup's part of a slot has room for
#x_pitch = 4160 : index
#lines_behind = 3 : index    // times that lanes store zeros behind a subgroup's columns
#may_have_none = false       // there are subgroups that have no columns
#dy_chunk_bytes = 16 : i64   // of V elements
#x_chunk_bytes = 16 : i64
#chunks_a_load = 1 : index   // that are read from shared memory together
#refills = 1 : index         // parts in which a slot is refilled in bulk, each once its dx is stored
#x_later = false             // x is copied a step later than dy
#pending_i32 = 2 : i32       // copies that may be under way while a row is used
#rereads = false             // rows are read from shared memory again for dx
#defers = false              // a row's sums are awaited once the next row's are told
#pending_first_i32 = 1 : i32 // likewise, while the first row's sums are told
#buffers = 2 : index         // of the exchange, used in turn
#copies_weight = true        // cp.async copies the weight into shared memory, which keeps it
#widens_weight = false       // shared memory keeps the weight as !acc
#gamma_copied = 8 : index    // V, where the weight is copied
#centres = true              // false for RMS normalization: the mean is not subtracted
#sums_dbeta = true           // there is a dbeta
#adds_residual = false       // a gradient that came back past the norm is added to dx
#has_dy2 = false             // the output has a second gradient, which is added to dy
#has_dy3 = false
#has_dy4 = false
#from_output = false         // x is the forward's output
#adds_bias = false           // it has a beta in it
#stages_bias = false         // shared memory keeps beta
#stages_inverse = false      // shared memory keeps 1 / g
#least_weight = 1.0e-5 : !acc
#wants_dx = true             // the caller asks for dx
#rows_kernel = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline workgroup_size = [512, 1, 1] subgroup_size = 32>
!dy_lines = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>  // rows, or chunks where rows are shifted
!x_lines = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!residual_lines = memref<?x4096x!residual, #hal.descriptor_type<storage_buffer>>
!acc_rows = memref<?x4096x!acc, #hal.descriptor_type<storage_buffer>>
!acc_column = memref<?x!acc, #hal.descriptor_type<storage_buffer>>
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!dy_bytes = memref<24576xi8, #gpu.address_space<workgroup>>
!x_bytes = memref<24576xi8, #gpu.address_space<workgroup>>
!dy_staged = memref<3x1x4096x!dy, #gpu.address_space<workgroup>>
!x_staged = memref<3x1x4096x!x, #gpu.address_space<workgroup>>
!gamma_staged = memref<1x4096x!gamma, #gpu.address_space<workgroup>>
!wide_staged = memref<1x4096x!acc, #gpu.address_space<workgroup>>
!beta_staged = memref<1x4096x!beta, #gpu.address_space<workgroup>>
!inverse_staged = memref<1x4096x!acc, #gpu.address_space<workgroup>>
!exchange = memref<2x1x16x2x!acc, #gpu.address_space<workgroup>>
!warp_sums = vector<16x2x!acc>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
!group_sums = memref<1x4096x!acc, #gpu.address_space<workgroup>>
!dy_chunk = vector<8x!dy>
!dy_sum_chunk = vector<8x!dy_sum>
!x_chunk = vector<8x!x>
!gamma_chunk = vector<8x!gamma>
!beta_chunk = vector<8x!beta>
!residual_chunk = vector<8x!residual>
!chunk = vector<8x!acc>
!dy_held = memref<1x!dy_chunk, #gpu.address_space<private>>  // a thread's chunks of a row, in registers
!more_dy_held = memref<3x1x!dy_chunk, #gpu.address_space<private>>  // likewise: of the other gradients
!x_held = memref<1x!x_chunk, #gpu.address_space<private>>
!gamma_held = memref<1x!gamma_chunk, #gpu.address_space<private>>
!beta_held = memref<1x!beta_chunk, #gpu.address_space<private>>
!residual_held = memref<1x!residual_chunk, #gpu.address_space<private>>
!held = memref<1x!chunk, #gpu.address_space<private>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
#rolled = #llvm.loop_annotation<unroll = <disable = true>>
// The launch, as iree_lnbwd/vmfb/launches.py states it: the bindings, and the workgroups for M rows, the least
// number of a list.
#rows_layout = #hal.pipeline.layout<constants = 1, bindings = [
  #hal.pipeline.binding<storage_buffer>,            // dy [M, N]
  #hal.pipeline.binding<storage_buffer>,            // x [M, N]
  #hal.pipeline.binding<storage_buffer>,            // mean [M]
  #hal.pipeline.binding<storage_buffer>,            // rstd [M]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // gamma [N]
  #hal.pipeline.binding<storage_buffer>,            // dresidual [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // beta [N]
  #hal.pipeline.binding<storage_buffer>,            // dy2 [M, N]
  #hal.pipeline.binding<storage_buffer>,            // dy3 [M, N]
  #hal.pipeline.binding<storage_buffer>,            // dy4 [M, N]
  #hal.pipeline.binding<storage_buffer>,            // dx [M, N]
  #hal.pipeline.binding<storage_buffer>,            // partial dgamma [workgroups, N]
  #hal.pipeline.binding<storage_buffer>             // partial dbeta [workgroups, N]
]>
#rows_x = affine_map<()[m] -> (m ceildiv 1, 132)>
#rows_y = affine_map<()[m] -> (1)>
// End of what is replaced.

!pair = vector<2x!acc>

hal.executable.source private @rows {
  hal.executable.export public @rows ordinal(0) layout(#rows_layout)
      count(%device: !hal.device, %m: index) -> (index, index, index) {
    %x = affine.min #rows_x()[%m]
    %y = affine.min #rows_y()[%m]
    %one = arith.constant 1 : index
    hal.return %x, %y, %one : index, index, index
  }
  builtin.module {
    // From ir/parts/.
    func.func private @meets_before(index) -> i1
    func.func private @row_shares(index, index, index, index, index, index, index, !acc, !acc, i1, !acc, !dy_staged, !x_staged, !dy_held, !x_held, !more_dy_held, !dy_held, !x_held, !gamma_held, !gamma_staged, !wide_staged, !beta_held, !beta_staged, !inverse_staged, !held, !held, !held) -> (!chunk, !chunk)
    func.func private @subgroup_sums(!chunk, !chunk) -> (!acc, !acc)
    func.func private @row_zero(i32) -> !acc
    func.func private @ready_for_sums(!mbarriers, index)
    func.func private @send_sums(!exchange, !mbarriers, index, index, index, index, index, i1, index, !acc, !acc)
    func.func private @receive_sums(!exchange, !mbarriers, index, i32, index, i32, index, !acc, !acc) -> (!acc, !acc)
    func.func private @buffer_after(index, i32) -> (index, i32)
    func.func private @column(index, index, index, index) -> (index, i1)
    func.func private @is_within(index, index, index) -> i1
    func.func private @slot_after(index) -> index
    func.func private @cell_address(index, index, index) -> (index, index)
    func.func private @may_be_edge(index) -> i1
    func.func private @shift(i32) -> index
    func.func private @span(index, index, index) -> (index, index)
    func.func private @copied_elements(i1, index, index, index) -> index
    func.func private @masked(!dy_chunk, !x_chunk, index, index, index) -> (!dy_chunk, !x_chunk)
    func.func private @is_whole(index, index, index) -> i1
    func.func private @store_edge(!x_lines, index, index, index, index, index, i1, !x_chunk)
    func.func private @load_cells_of_residual(!residual_lines, index, index, index, index, i1, index) -> !residual_chunk
    func.func private @load_cells_of_dy(!dy_lines, index, index, index, index, i1, index) -> !dy_chunk
    func.func private @load_dy(!dy_lines, index, index, index, index, i1, index) -> !dy_chunk
    func.func private @load_more(!dy_lines, !dy_lines, !dy_lines, i32, i32, index, index, index, !more_dy_held)
    func.func private @plus_dy(!chunk, !dy_chunk, i1) -> !chunk
    func.func private @summed_dy(!dy_chunk, !more_dy_held, index) -> !chunk
    func.func private @store_sums(!acc_rows, index, index, index, index, !chunk)
    func.func private @keep_bias(!beta_row, index, index, index, i1, index, index, !beta_held, !beta_staged)
    func.func private @keep_inverse(!chunk, index, index, !inverse_staged)
    func.func private @keep_columns(index, index, index, index, index, !gamma_row, !beta_row, !gamma_held, !gamma_staged, !wide_staged, !beta_held, !beta_staged, !inverse_staged)
    func.func private @begin_columns(index, index, index, index, !gamma_row, !beta_row, !gamma_held, !gamma_staged, !wide_staged, !beta_held, !beta_staged, !inverse_staged, !held, !held)
    func.func private @chunk_weight(!gamma_held, !gamma_staged, !wide_staged, index, index, index) -> !chunk
    func.func private @chunk_inverse(!inverse_staged, index, index, !chunk, !acc) -> !chunk
    func.func private @chunk_bias(!beta_held, !beta_staged, index, index, index) -> !chunk
    func.func private @slot_offset(i32, index, index, index, index, index) -> index
    func.func private @x_slot(index) -> index
    func.func private @copied_mbarrier(!mbarriers, index, index, index) -> i32
    func.func private @subgroup_columns(index, index, index) -> index
    func.func private @extent(index, index, index, index) -> (index, index, index)
    func.func private @subgroup_begin(index, index, index, index) -> (index, index, index)
    func.func private @begins_within(index, index, index) -> i1
    func.func private @refill_extent(index, index, index) -> (index, index)
    func.func private @copy_extent(index, index, index, index, index, index, index, index) -> (index, index, index)
    func.func private @fetch_in_bulk(i1, i1, !dy_lines, !x_lines, index, index, index, index, index, index, index, index, !dy_staged, !x_staged, !mbarriers)
    func.func private @await_row(!dy_lines, !x_lines, i32, i32, index, i32, index, index, index, index, index, index, index, !dy_staged, !x_staged, !mbarriers)
    func.func private @stored_before_copies(index, index, index, !dy_staged)
    func.func private @refill_in_bulk(!dy_lines, !x_lines, index, i1, index, i1, index, index, index, index, index, index, index, index, !dy_staged, !x_staged, !mbarriers)
    func.func private @ready_for_bulk(!mbarriers, index, index, index)
    func.func private @zero_room(index, index, index, index, !dy_staged, !x_staged)
    func.func private @columns_at_of_gamma(!gamma_row, index, index, index, i1, index) -> !gamma_chunk
    func.func private @columns_at_of_beta(!beta_row, index, index, index, i1, index) -> !beta_chunk
    func.func private @vector_i32() -> i32
    func.func private @threads_i32() -> i32
    func.func private @subgroup_i32() -> i32
    func.func private @groups_i32() -> i32
    func.func private @shifted() -> i1
    func.func private @beyond_i32() -> i32
    func.func private @in_clusters() -> i1
    func.func private @told() -> index
    func.func private @turns() -> index
    func.func private @sent_bytes() -> i32
    func.func private @one_group() -> i1
    func.func private @shares_subgroup() -> i1
    func.func private @parts_alike() -> i1
    func.func private @fills() -> i1
    func.func private @at_once() -> i1
    func.func private @stages() -> i1
    func.func private @in_place() -> i1
    func.func private @apart() -> i1
    func.func private @x_slots() -> index
    func.func private @in_refills() -> i1
    func.func private @refill_chunks() -> index
    func.func private @refill_columns() -> index
    func.func private @arrivals_i32() -> i32
    func.func private @copies_first() -> index
    func.func private @of_subgroup() -> index
    func.func private @dy_in_16() -> index
    func.func private @dy_in_line() -> index
    func.func private @x_in_16() -> index
    func.func private @x_in_line() -> index
    func.func private @whole_16() -> i1
    func.func private @divides_again() -> i1
    // From ir/math/.
    func.func private @widen_of_dy(!dy_chunk) -> !chunk
    func.func private @round_apart_of_dy_sum(!chunk) -> !dy_sum_chunk
    func.func private @widen_of_dy_sum(!dy_sum_chunk) -> !chunk
    func.func private @widen_of_x(!x_chunk) -> !chunk
    func.func private @widen_of_gamma(!gamma_chunk) -> !chunk
    func.func private @widen_of_beta(!beta_chunk) -> !chunk
    func.func private @gathered_of_gamma(!gamma_row, index, index, index, index, i1, index) -> !gamma_chunk
    func.func private @gathered_of_beta(!beta_row, index, index, index, index, i1, index) -> !beta_chunk
    func.func private @weight(!chunk) -> !chunk
    func.func private @away_from_zero(!chunk) -> !chunk
    func.func private @reciprocal(!chunk) -> !chunk
    func.func private @xhat(!chunk, !acc, !acc) -> !chunk
    func.func private @xhat_from_output(!chunk, !chunk, !chunk) -> !chunk
    func.func private @plus_hx_from_output(!chunk, !chunk, !chunk, !chunk, !chunk) -> !chunk
    func.func private @dx(!chunk, !chunk, !acc, !acc, !acc) -> !chunk
    func.func private @widen_of_residual(!residual_chunk) -> !chunk
    func.func private @plus_residual(!chunk, !chunk) -> !chunk
    func.func private @round_of_x(!chunk) -> !x_chunk
    func.func private @settled_of_x(!x_chunk) -> !x_chunk
    func.func private @settled_of_sums(!chunk) -> !chunk
    func.func private @zero_first_of_dy(!dy_chunk, index) -> !dy_chunk
    func.func private @zero_first_of_x(!x_chunk, index) -> !x_chunk
    func.func private @mbarrier(!mbarriers, index) -> i32
    func.func private @init_mbarrier(i32, i32)
    func.func private @expect(i32, i32)
    func.func private @of_rank(i32, i32) -> i32
    func.func private @send_two(i32, !acc, !acc, i32)
    func.func private @await(i32, i32)
    func.func private @await_copies(i32)
    func.func private @copy_in_bulk_of_dy(!dy_lines, !dy_staged, index, index, index, index, index, index, i32)
    func.func private @copy_in_bulk_of_x(!x_lines, !x_staged, index, index, index, index, index, index, i32)
    func.func private @copy_one_of_dy(!dy_lines, !dy_staged, index, index, index, index, index, index)
    func.func private @copy_one_of_x(!x_lines, !x_staged, index, index, index, index, index, index)
    func.func private @zero_of_dy(!dy_staged, index, index, index, index)
    func.func private @zero_of_x(!x_staged, index, index, index, index)
    func.func private @before_copies(!dy_staged)

    func.func @rows() attributes {translation_info = #rows_kernel, nvvm.minctasm = #resident} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %c3 = arith.constant 3 : index
      %n = arith.constant #columns
      %v = arith.constant #vector
      %chunks = arith.constant #chunks
      %t_count = arith.constant #threads
      %lanes = arith.constant #subgroup
      %groups = arith.constant #groups
      %groups_i32 = func.call @groups_i32() : () -> i32
      %p_i32 = arith.constant #workgroups_i32
      %ahead_i32 = arith.constant #ahead_i32
      %stages = func.call @stages() : () -> i1
      %bulk = arith.constant #bulk
      %in_refills = func.call @in_refills() : () -> i1
      %refills = arith.constant #refills
      %last_refill = arith.subi %refills, %c1 : index
      %x_slots = func.call @x_slots() : () -> index
      %x_later = arith.constant #x_later
      %no = arith.constant false
      %refill_chunks = func.call @refill_chunks() : () -> index
      %dy_of_line = func.call @dy_in_line() : () -> index
      %x_of_line = func.call @x_in_line() : () -> index
      %dy_pitch = arith.constant #dy_pitch
      %x_pitch = arith.constant #x_pitch
      %in_place = func.call @in_place() : () -> i1
      %apart = func.call @apart() : () -> i1
      %rereads = arith.constant #rereads
      %defers = arith.constant #defers
      %copies_weight = arith.constant #copies_weight
      %widens_weight = arith.constant #widens_weight
      %wants_dx = arith.constant #wants_dx
      %fills = func.call @fills() : () -> i1
      %centres = arith.constant #centres
      %sums_dbeta = arith.constant #sums_dbeta
      %adds_residual = arith.constant #adds_residual
      %has_dy2 = arith.constant #has_dy2
      %has_dy3 = arith.constant #has_dy3
      %has_dy4 = arith.constant #has_dy4
      %adds_dy = arith.constant #has_dy2
      %from_output = arith.constant #from_output
      %stages_inverse = arith.constant #stages_inverse
      %adds_bias = arith.constant #adds_bias
      %shifted = func.call @shifted() : () -> i1
      %one_group = func.call @one_group() : () -> i1
      %shares_subgroup = func.call @shares_subgroup() : () -> i1
      %yes = arith.constant true
      %together = arith.xori %x_later, %yes : i1
      %in_clusters = func.call @in_clusters() : () -> i1
      %zero_i32 = arith.constant 0 : i32
      %lanes_i32 = func.call @subgroup_i32() : () -> i32
      %one_i32 = arith.constant 1 : i32
      %all_lanes = arith.constant -1 : i32
      %zero = arith.constant 0.0 : !acc
      %zeros = arith.constant dense<0.0> : !chunk
      %zero_dy = arith.constant dense<0.0> : !dy_chunk
      %zero_x = arith.constant dense<0.0> : !x_chunk

      %m_i32 = hal.interface.constant.load layout(#rows_layout) ordinal(0) : i32
      %m = arith.index_castui %m_i32 : i32 to index
      %cells = arith.muli %m, %n : index
      %all_chunks = arith.ceildivui %cells, %v : index
      %lines = arith.select %shifted, %all_chunks, %m : index
      %dy = hal.interface.binding.subspan layout(#rows_layout) binding(0) alignment(64) offset(%c0) : !dy_lines{%lines}
      %x = hal.interface.binding.subspan layout(#rows_layout) binding(1) alignment(64) offset(%c0) : !x_lines{%lines}
      %mean = hal.interface.binding.subspan layout(#rows_layout) binding(2) alignment(64) offset(%c0) : !acc_column{%m}
      %rstd = hal.interface.binding.subspan layout(#rows_layout) binding(3) alignment(64) offset(%c0) : !acc_column{%m}
      %gamma = hal.interface.binding.subspan layout(#rows_layout) binding(4) alignment(64) offset(%c0) flags(ReadOnly) : !gamma_row
      %dresidual = hal.interface.binding.subspan layout(#rows_layout) binding(5) alignment(64) offset(%c0) : !residual_lines{%lines}
      %beta = hal.interface.binding.subspan layout(#rows_layout) binding(6) alignment(64) offset(%c0) flags(ReadOnly) : !beta_row
      %dy2 = hal.interface.binding.subspan layout(#rows_layout) binding(7) alignment(64) offset(%c0) : !dy_lines{%lines}
      %dy3 = hal.interface.binding.subspan layout(#rows_layout) binding(8) alignment(64) offset(%c0) : !dy_lines{%lines}
      %dy4 = hal.interface.binding.subspan layout(#rows_layout) binding(9) alignment(64) offset(%c0) : !dy_lines{%lines}
      %dx = hal.interface.binding.subspan layout(#rows_layout) binding(10) alignment(64) offset(%c0) : !x_lines{%lines}
      %p = hal.interface.workgroup.count[0] : index
      %dgamma_partials = hal.interface.binding.subspan layout(#rows_layout) binding(11) alignment(64) offset(%c0) : !acc_rows{%p}
      %dbeta_partials = hal.interface.binding.subspan layout(#rows_layout) binding(12) alignment(64) offset(%c0) : !acc_rows{%p}

      // Rows are counted in 32 bits, which saves registers; their offsets have 64.
      %workgroup = hal.interface.workgroup.id[0] : index
      %id_y = hal.interface.workgroup.id[1] : index
      %rank = arith.select %in_clusters, %id_y, %c0 : index  // of the cluster's workgroups
      %own_columns = arith.constant #own_columns
      %part = arith.muli %rank, %own_columns : index         // the first column of this workgroup
      %thread = gpu.thread_id x
      %t = arith.remui %thread, %t_count : index
      %group = arith.divui %thread, %t_count : index
      %lane = arith.remui %t, %lanes : index
      %warp = arith.divui %t, %lanes : index
      %leads = arith.cmpi eq, %lane, %c0 : index
      %workgroup_i32 = arith.index_castui %workgroup : index to i32
      // The first group of the subgroup. The shuffle tells ptxas that all lanes have the same; from this
      // ptxas knows that the lanes stay together.
      %group_mine = arith.index_castui %group : index to i32
      %group_i32 = scf.if %one_group -> i32 {
        scf.yield %zero_i32 : i32
      } else {
        %group_first, %there = gpu.shuffle idx %group_mine, %zero_i32, %lanes_i32 : i32
        scf.yield %group_first : i32
      }
      // Likewise the number of the subgroup, where its lanes wait for its copies.
      %copier = scf.if %bulk -> index {
        %warp_mine = arith.index_castui %warp : index to i32
        %warp_first, %warp_there = gpu.shuffle idx %warp_mine, %zero_i32, %lanes_i32 : i32
        %warp_same = arith.index_castui %warp_first : i32 to index
        scf.yield %warp_same : index
      } else {
        scf.yield %warp : index
      }
      %place = scf.if %shares_subgroup -> i32 {  // of this group, in the subgroup
        %groups_on = arith.subi %group_mine, %group_i32 : i32
        scf.yield %groups_on : i32
      } else {
        scf.yield %zero_i32 : i32
      }
      %workgroup_first = arith.muli %workgroup_i32, %groups_i32 : i32
      %subgroup_first = arith.addi %workgroup_first, %group_i32 : i32
      %stride = arith.muli %p_i32, %groups_i32 : i32
      %last = arith.subi %m_i32, %one_i32 : i32

      %first = arith.addi %subgroup_first, %place : i32
      %shift = func.call @shift(%first) : (i32) -> index  // all rows of this group begin there

      // Shared memory. Every thread reads back only the values that it has stored or copied itself, or its subgroup
      // in bulk, so no barrier is needed. The exchange is the exception.
      %dy_bytes = memref.alloc() : !dy_bytes
      %x_bytes = memref.alloc() : !x_bytes
      %dy_staged = memref.view %dy_bytes[%c0][] : !dy_bytes to !dy_staged  // [slots, groups, columns of T threads]
      %x_staged = memref.view %x_bytes[%c0][] : !x_bytes to !x_staged      // likewise
      %gamma_staged = memref.alloc() : !gamma_staged                       // [groups, columns of T threads]
      %wide_staged = memref.alloc() : !wide_staged                         // likewise
      %beta_staged = memref.alloc() : !beta_staged                         // likewise
      %inverse_staged = memref.alloc() : !inverse_staged                   // likewise
      %mbarriers = memref.alloc() : !mbarriers                             // [buffers]
      %exchange = memref.alloc() : !exchange                               // [buffers, groups, warps, (h, h * xhat)]

      // Registers, with a place for each of a thread's chunks.
      %gamma_held = memref.alloca() : !gamma_held
      %beta_held = memref.alloca() : !beta_held
      %dy_held = memref.alloca() : !dy_held  // this row, where it is not in shared memory
      %x_held = memref.alloca() : !x_held
      %dy_next = memref.alloca() : !dy_held  // the row that is fetched meanwhile
      %x_next = memref.alloca() : !x_held
      %residual_held = memref.alloca() : !residual_held
      %more_held = memref.alloca() : !more_dy_held  // of this row
      %more_next = memref.alloca() : !more_dy_held  // of the next one, which is fetched meanwhile
      %dya_kept = memref.alloca() : !held    // from the row's sums until its dx
      %xhat_kept = memref.alloca() : !held
      %h_kept = memref.alloca() : !held
      %dx_kept = memref.alloca() : !x_held
      %dgamma_sums = memref.alloca() : !held
      %dbeta_sums = memref.alloca() : !held

      // A chunk past the end of the row is all zeros and is never stored. Where rows are copied in bulk, the first ones
      // are on their way before the weight is read.
      scf.if %bulk {
      } else {
        scf.for %k = %c0 to %chunks step %c1 {
          scf.if %shifted {
            func.call @keep_columns(%k, %t, %group, %part, %shift, %gamma, %beta, %gamma_held, %gamma_staged, %wide_staged, %beta_held, %beta_staged, %inverse_staged)
                : (index, index, index, index, index, !gamma_row, !beta_row, !gamma_held, !gamma_staged, !wide_staged, !beta_held, !beta_staged, !inverse_staged) -> ()
          } else {
            %col, %inside = func.call @column(%k, %t, %part, %c0) : (index, index, index, index) -> (index, i1)
            %at = arith.addi %part, %col : index
            scf.if %copies_weight {
              %size = arith.select %inside, %v, %c0 : index
              %copy = "nvgpu.device_async_copy"(%gamma_staged, %group, %col, %gamma, %at, %size)
                  <{dstElements = #gamma_copied, operandSegmentSizes = array<i32: 1, 2, 1, 1, 1>}>
                  : (!gamma_staged, index, index, !gamma_row, index, index) -> !nvgpu.device.async.token
            } else {
              %gamma_k = func.call @columns_at_of_gamma(%gamma, %k, %part, %col, %inside, %c0)
                  : (!gamma_row, index, index, index, i1, index) -> !gamma_chunk
              memref.store %gamma_k, %gamma_held[%k] : !gamma_held
            }
          }
          memref.store %zeros, %dgamma_sums[%k] : !held
          memref.store %zeros, %dbeta_sums[%k] : !held
        } {llvm.loop_annotation = #unrolled}
      }

      // The first rows are fetched before anything else. A copy past the end of the columns or of the
      // rows reads nothing and writes zeros. Copies of less than 16 bytes pass through the L1 cache. The
      // cache has the memory that shared memory leaves, so more slots may slow such copies down.
      %first_in = arith.minsi %first, %last : i32
      %first_index = arith.index_castui %first_in : i32 to index
      func.call @ready_for_bulk(%mbarriers, %group, %copier, %lane) : (!mbarriers, index, index, index) -> ()
      scf.if %stages {
        scf.for %step = %zero_i32 to %ahead_i32 step %one_i32 : i32 {
          %slot = arith.index_castui %step : i32 to index
          %rows_on = arith.muli %step, %stride : i32
          %row = arith.addi %first, %rows_on : i32
          %live = arith.cmpi sle, %row, %last : i32
          %row_in = arith.minsi %row, %last : i32
          %row_index = arith.index_castui %row_in : i32 to index
          scf.if %bulk {
            %fetches = arith.andi %leads, %live : i1
            %has_x = arith.cmpi ult, %slot, %x_slots : index
            %has_x_apart = arith.andi %has_x, %x_later : i1
            scf.if %fetches {
              scf.for %refill = %c0 to %refills step %c1 {
                func.call @fetch_in_bulk(%yes, %together, %dy, %x, %row_index, %cells, %refill, %slot, %group, %copier, %part, %shift, %dy_staged, %x_staged, %mbarriers)
                    : (i1, i1, !dy_lines, !x_lines, index, index, index, index, index, index, index, index, !dy_staged, !x_staged, !mbarriers) -> ()
                scf.if %has_x_apart {
                  func.call @fetch_in_bulk(%no, %yes, %dy, %x, %row_index, %cells, %refill, %slot, %group, %copier, %part, %shift, %dy_staged, %x_staged, %mbarriers)
                      : (i1, i1, !dy_lines, !x_lines, index, index, index, index, index, index, index, index, !dy_staged, !x_staged, !mbarriers) -> ()
                }
              }
            }
          } else {
            scf.for %k = %c0 to %chunks step %c1 {
              %col, %inside = func.call @column(%k, %t, %part, %shift) : (index, index, index, index) -> (index, i1)
              %at = arith.addi %part, %col : index
              %exists = arith.andi %inside, %live : i1
              %size = func.call @copied_elements(%exists, %k, %at, %shift) : (i1, index, index, index) -> index
              %line, %in_line = func.call @cell_address(%row_index, %part, %col) : (index, index, index) -> (index, index)
              %dy_copy = "nvgpu.device_async_copy"(%dy_staged, %slot, %group, %col, %dy, %line, %in_line, %size)
                  <{dstElements = #copied, operandSegmentSizes = array<i32: 1, 3, 1, 2, 1>}>
                  : (!dy_staged, index, index, index, !dy_lines, index, index, index) -> !nvgpu.device.async.token
              %x_copy = "nvgpu.device_async_copy"(%x_staged, %slot, %group, %col, %x, %line, %in_line, %size)
                  <{dstElements = #copied, operandSegmentSizes = array<i32: 1, 3, 1, 2, 1>}>
                  : (!x_staged, index, index, index, !x_lines, index, index, index) -> !nvgpu.device.async.token
              scf.if %apart {
                %copies = nvgpu.device_async_create_group
              }
            } {llvm.loop_annotation = #unrolled}
          }
          %by_group = arith.ori %apart, %bulk : i1
          scf.if %by_group {
          } else {
            %copies = nvgpu.device_async_create_group
          }
        }
      }
      scf.if %bulk {
        func.call @zero_room(%group, %copier, %lane, %part, %dy_staged, %x_staged)
            : (index, index, index, index, !dy_staged, !x_staged) -> ()
        func.call @begin_columns(%t, %group, %part, %shift, %gamma, %beta, %gamma_held, %gamma_staged, %wide_staged, %beta_held, %beta_staged, %inverse_staged, %dgamma_sums, %dbeta_sums)
            : (index, index, index, index, !gamma_row, !beta_row, !gamma_held, !gamma_staged, !wide_staged, !beta_held, !beta_staged, !inverse_staged, !held, !held) -> ()
      }
      %mean_first = memref.load %mean[%first_index] : !acc_column
      %rstd_first = memref.load %rstd[%first_index] : !acc_column
      %mean_behind_first, %rstd_behind_first = scf.if %defers -> (!acc, !acc) {
        %second = arith.addi %first, %stride : i32
        %second_in = arith.minsi %second, %last : i32
        %second_index = arith.index_castui %second_in : i32 to index
        %mean_of_second = memref.load %mean[%second_index] : !acc_column
        %rstd_of_second = memref.load %rstd[%second_index] : !acc_column
        scf.yield %mean_of_second, %rstd_of_second : !acc, !acc
      } else {
        scf.yield %zero, %zero : !acc, !acc
      }
      %columns_kept = arith.ori %shifted, %bulk : i1
      scf.for %k = %c0 to %chunks step %c1 {
        scf.if %columns_kept {
        } else {
          %col, %inside = func.call @column(%k, %t, %part, %c0) : (index, index, index, index) -> (index, i1)
          %col_in = arith.select %inside, %col, %c0 : index
          %at_in = arith.addi %part, %col_in : index
          scf.if %stages {
          } else {
            %dy_k = vector.load %dy[%first_index, %at_in] : !dy_lines, !dy_chunk
            %x_k = vector.load %x[%first_index, %at_in] : !x_lines, !x_chunk
            memref.store %dy_k, %dy_held[%k] : !dy_held
            memref.store %x_k, %x_held[%k] : !x_held
          }
          scf.if %widens_weight {
            %gamma_k = memref.load %gamma_held[%k] : !gamma_held
            %gamma_wide = func.call @widen_of_gamma(%gamma_k) : (!gamma_chunk) -> !chunk
            %wide = func.call @weight(%gamma_wide) : (!chunk) -> !chunk
            vector.store %wide, %wide_staged[%group, %col] : !wide_staged, !chunk
          }
          scf.if %adds_bias {
            func.call @keep_bias(%beta, %k, %part, %col, %inside, %c0, %group, %beta_held, %beta_staged)
                : (!beta_row, index, index, index, i1, index, index, !beta_held, !beta_staged) -> ()
          }
          scf.if %stages_inverse {
            %gamma_k = vector.load %gamma[%at_in] : !gamma_row, !gamma_chunk
            %gamma_wide = func.call @widen_of_gamma(%gamma_k) : (!gamma_chunk) -> !chunk
            %g = func.call @weight(%gamma_wide) : (!chunk) -> !chunk
            func.call @keep_inverse(%g, %group, %col, %inverse_staged) : (!chunk, index, index, !inverse_staged) -> ()
          }
        }
      } {llvm.loop_annotation = #unrolled}

      func.call @ready_for_sums(%mbarriers, %thread) : (!mbarriers, index) -> ()

      scf.if %adds_dy {
        func.call @load_more(%dy2, %dy3, %dy4, %first, %last, %t, %part, %shift, %more_held)
            : (!dy_lines, !dy_lines, !dy_lines, i32, i32, index, index, index, !more_dy_held) -> ()
      }

      // Each step uses one row and fetches a later one, #ahead_i32 steps ahead. Groups do not wait for
      // other groups: each has a barrier of its own.
      %stride_ahead = arith.muli %ahead_i32, %stride : i32
      %ahead = arith.index_castui %ahead_i32 : i32 to index
      %fill_first = arith.select %in_place, %c0, %ahead : index
      // Where sums are awaited later, those of the first row are told before the walk.
      scf.if %defers {
        %walks = arith.cmpi slt, %subgroup_first, %m_i32 : i32
        scf.if %walks {
          scf.if %bulk {
          } else {
            "nvvm.cp.async.wait.group"() <{n = #pending_first_i32}> : () -> ()
          }
          %fill_next = func.call @slot_after(%fill_first) : (index) -> index
          %slot = arith.select %in_place, %fill_first, %fill_next : index
          %row_zero = func.call @row_zero(%subgroup_first) : (i32) -> !acc
          %dy_from = func.call @slot_offset(%subgroup_first, %part, %copier, %shift, %dy_of_line, %dy_pitch) : (i32, index, index, index, index, index) -> index
          %x_from = func.call @slot_offset(%subgroup_first, %part, %copier, %shift, %x_of_line, %x_pitch) : (i32, index, index, index, index, index) -> index
          func.call @await_row(%dy, %x, %subgroup_first, %last, %slot, %zero_i32, %group, %copier, %lane, %part, %shift, %dy_from, %x_from, %dy_staged, %x_staged, %mbarriers)
              : (!dy_lines, !x_lines, i32, i32, index, i32, index, index, index, index, index, index, index, !dy_staged, !x_staged, !mbarriers) -> ()
          %first_h, %first_hx = func.call @row_shares(%slot, %dy_from, %x_from, %t, %group, %part, %shift, %mean_first, %rstd_first, %yes, %row_zero,
              %dy_staged, %x_staged, %dy_held, %x_held, %more_held, %dy_next, %x_next, %gamma_held, %gamma_staged, %wide_staged,
              %beta_held, %beta_staged, %inverse_staged, %dya_kept, %xhat_kept, %h_kept)
              : (index, index, index, index, index, index, index, !acc, !acc, i1, !acc, !dy_staged, !x_staged, !dy_held, !x_held, !more_dy_held, !dy_held, !x_held,
              !gamma_held, !gamma_staged, !wide_staged, !beta_held, !beta_staged, !inverse_staged, !held, !held, !held)
              -> (!chunk, !chunk)
          %warp_h, %warp_hx = func.call @subgroup_sums(%first_h, %first_hx) : (!chunk, !chunk) -> (!acc, !acc)
          func.call @send_sums(%exchange, %mbarriers, %c0, %group, %rank, %warp, %lane, %leads, %thread, %warp_h, %warp_hx)
              : (!exchange, !mbarriers, index, index, index, index, index, i1, index, !acc, !acc) -> ()
        }
      }
      %walked:8 = scf.for %subgroup_row = %subgroup_first to %m_i32 step %stride
          iter_args(%mean_row = %mean_first, %rstd_row = %rstd_first, %mean_then = %mean_behind_first, %rstd_then = %rstd_behind_first,
          %fill = %fill_first, %half = %c0, %parity = %zero_i32, %phase_of_copies = %zero_i32)
          -> (!acc, !acc, !acc, !acc, index, index, i32, i32) : i32 {
        %fill_next = func.call @slot_after(%fill) : (index) -> index
        %slot = arith.select %in_place, %fill, %fill_next : index
        // Of bulk copies to the next slot: a slot's are in phases of parity 0 and 1 in turn.
        %wraps = arith.cmpi eq, %fill_next, %c0 : index
        %wraps_i32 = arith.extui %wraps : i1 to i32
        %copies_flipped = arith.xori %phase_of_copies, %wraps_i32 : i32
        %copies_next = arith.select %bulk, %copies_flipped, %phase_of_copies : i32

        %own_row = arith.addi %subgroup_row, %place : i32
        %row, %has_row = scf.if %shares_subgroup -> (i32, i1) {
          %own_row_in = arith.minsi %own_row, %last : i32
          %is_in = arith.cmpi sle, %own_row, %last : i32
          scf.yield %own_row_in, %is_in : i32, i1
        } else {
          scf.yield %own_row, %yes : i32, i1
        }

        // Copies in place are made later: each overwrites a row whose dx is stored first.
        %row_ahead = arith.addi %own_row, %stride_ahead : i32
        %row_ahead_live = arith.cmpi sle, %row_ahead, %last : i32
        %row_ahead_in = arith.minsi %row_ahead, %last : i32
        %row_ahead_index = arith.index_castui %row_ahead_in : i32 to index
        scf.for %k = %c0 to %chunks step %c1 {
          %col, %inside = func.call @column(%k, %t, %part, %shift) : (index, index, index, index) -> (index, i1)
          %at = arith.addi %part, %col : index
          scf.if %stages {
            scf.if %in_place {
            } else {
              %exists = arith.andi %inside, %row_ahead_live : i1
              %size = func.call @copied_elements(%exists, %k, %at, %shift) : (i1, index, index, index) -> index
              %line, %in_line = func.call @cell_address(%row_ahead_index, %part, %col) : (index, index, index) -> (index, index)
              %dy_copy = "nvgpu.device_async_copy"(%dy_staged, %fill, %group, %col, %dy, %line, %in_line, %size)
                  <{dstElements = #copied, operandSegmentSizes = array<i32: 1, 3, 1, 2, 1>}>
                  : (!dy_staged, index, index, index, !dy_lines, index, index, index) -> !nvgpu.device.async.token
              %x_copy = "nvgpu.device_async_copy"(%x_staged, %fill, %group, %col, %x, %line, %in_line, %size)
                  <{dstElements = #copied, operandSegmentSizes = array<i32: 1, 3, 1, 2, 1>}>
                  : (!x_staged, index, index, index, !x_lines, index, index, index) -> !nvgpu.device.async.token
            }
          } else {
            %col_in = arith.select %inside, %col, %c0 : index
            %at_in = arith.addi %part, %col_in : index
            %dy_k = vector.load %dy[%row_ahead_index, %at_in] : !dy_lines, !dy_chunk
            %x_k = vector.load %x[%row_ahead_index, %at_in] : !x_lines, !x_chunk
            memref.store %dy_k, %dy_next[%k] : !dy_held
            memref.store %x_k, %x_next[%k] : !x_held
          }
        } {llvm.loop_annotation = #unrolled}
        scf.if %stages {
          scf.if %in_place {
          } else {
            %copies = nvgpu.device_async_create_group
          }
          %waits_later = arith.ori %apart, %bulk : i1
          scf.if %waits_later {
          } else {
            "nvvm.cp.async.wait.group"() <{n = #pending_i32}> : () -> ()
          }
        }
        %dy_from = func.call @slot_offset(%row, %part, %copier, %shift, %dy_of_line, %dy_pitch) : (i32, index, index, index, index, index) -> index
        %x_from = func.call @slot_offset(%row, %part, %copier, %shift, %x_of_line, %x_pitch) : (i32, index, index, index, index, index) -> index

        // Statistics are loaded a whole step ahead of their use.
        %row_next = arith.addi %own_row, %stride : i32
        %row_next_live = arith.cmpi sle, %row_next, %last : i32
        %row_next_in = arith.minsi %row_next, %last : i32
        %row_next_index = arith.index_castui %row_next_in : i32 to index
        %row_loaded = scf.if %defers -> i32 {
          %row_then = arith.addi %row_next, %stride : i32
          scf.yield %row_then : i32
        } else {
          scf.yield %row_next : i32
        }
        %row_loaded_in = arith.minsi %row_loaded, %last : i32
        %row_loaded_index = arith.index_castui %row_loaded_in : i32 to index
        %mean_loaded = memref.load %mean[%row_loaded_index] : !acc_column
        %rstd_loaded = memref.load %rstd[%row_loaded_index] : !acc_column

        scf.if %adds_dy {
          func.call @load_more(%dy2, %dy3, %dy4, %row_next, %last, %t, %part, %shift, %more_next)
              : (!dy_lines, !dy_lines, !dy_lines, i32, i32, index, index, index, !more_dy_held) -> ()
        }

        %row_zero = func.call @row_zero(%row) : (i32) -> !acc
        %row_index = arith.index_castui %row : i32 to index
        scf.if %adds_residual {
          scf.for %k = %c0 to %chunks step %c1 {
            %col, %inside = func.call @column(%k, %t, %part, %shift) : (index, index, index, index) -> (index, i1)
            %exists = arith.andi %inside, %has_row : i1
            %reads = arith.select %shifted, %exists, %inside : i1
            %dresidual_k = func.call @load_cells_of_residual(%dresidual, %row_index, %k, %part, %col, %reads, %shift)
                : (!residual_lines, index, index, index, index, i1, index) -> !residual_chunk
            memref.store %dresidual_k, %residual_held[%k] : !residual_held
          } {llvm.loop_annotation = #unrolled}
        }
        %sum_h, %sum_hx = scf.if %defers -> (!acc, !acc) {
          %step_after = arith.addi %subgroup_row, %stride : i32
          %walks_on = arith.cmpi slt, %step_after, %m_i32 : i32
          scf.if %walks_on {
            %half_then, %parity_then = func.call @buffer_after(%half, %parity) : (index, i32) -> (index, i32)
            %slot_then = func.call @slot_after(%slot) : (index) -> index
            %row_zero_then = func.call @row_zero(%row_next) : (i32) -> !acc
            %dy_from_then = func.call @slot_offset(%row_next, %part, %copier, %shift, %dy_of_line, %dy_pitch) : (i32, index, index, index, index, index) -> index
            %x_from_then = func.call @slot_offset(%row_next, %part, %copier, %shift, %x_of_line, %x_pitch) : (i32, index, index, index, index, index) -> index
            func.call @await_row(%dy, %x, %row_next, %last, %slot_then, %copies_next, %group, %copier, %lane, %part, %shift, %dy_from_then, %x_from_then, %dy_staged, %x_staged, %mbarriers)
                : (!dy_lines, !x_lines, i32, i32, index, i32, index, index, index, index, index, index, index, !dy_staged, !x_staged, !mbarriers) -> ()
            %then_h, %then_hx = func.call @row_shares(%slot_then, %dy_from_then, %x_from_then, %t, %group, %part, %shift, %mean_then, %rstd_then, %yes, %row_zero_then,
                %dy_staged, %x_staged, %dy_held, %x_held, %more_held, %dy_next, %x_next, %gamma_held, %gamma_staged, %wide_staged,
                %beta_held, %beta_staged, %inverse_staged, %dya_kept, %xhat_kept, %h_kept)
                : (index, index, index, index, index, index, index, !acc, !acc, i1, !acc, !dy_staged, !x_staged, !dy_held, !x_held, !more_dy_held, !dy_held, !x_held,
                !gamma_held, !gamma_staged, !wide_staged, !beta_held, !beta_staged, !inverse_staged, !held, !held, !held)
                -> (!chunk, !chunk)
            %warp_h, %warp_hx = func.call @subgroup_sums(%then_h, %then_hx) : (!chunk, !chunk) -> (!acc, !acc)
            func.call @send_sums(%exchange, %mbarriers, %half_then, %group, %rank, %warp, %lane, %leads, %thread, %warp_h, %warp_hx)
                : (!exchange, !mbarriers, index, index, index, index, index, i1, index, !acc, !acc) -> ()
          }
          %told_h, %told_hx = func.call @receive_sums(%exchange, %mbarriers, %half, %parity, %group, %group_i32, %lane, %zero, %zero)
              : (!exchange, !mbarriers, index, i32, index, i32, index, !acc, !acc) -> (!acc, !acc)
          scf.yield %told_h, %told_hx : !acc, !acc
        } else {
          func.call @await_row(%dy, %x, %row, %last, %slot, %phase_of_copies, %group, %copier, %lane, %part, %shift, %dy_from, %x_from, %dy_staged, %x_staged, %mbarriers)
              : (!dy_lines, !x_lines, i32, i32, index, i32, index, index, index, index, index, index, index, !dy_staged, !x_staged, !mbarriers) -> ()
          %share_h, %share_hx = func.call @row_shares(%slot, %dy_from, %x_from, %t, %group, %part, %shift, %mean_row, %rstd_row, %has_row, %row_zero,
              %dy_staged, %x_staged, %dy_held, %x_held, %more_held, %dy_next, %x_next, %gamma_held, %gamma_staged, %wide_staged,
              %beta_held, %beta_staged, %inverse_staged, %dya_kept, %xhat_kept, %h_kept)
              : (index, index, index, index, index, index, index, !acc, !acc, i1, !acc, !dy_staged, !x_staged, !dy_held, !x_held, !more_dy_held, !dy_held, !x_held,
              !gamma_held, !gamma_staged, !wide_staged, !beta_held, !beta_staged, !inverse_staged, !held, !held, !held)
              -> (!chunk, !chunk)
          %row_h, %row_hx = scf.if %wants_dx -> (!acc, !acc) {
            %warp_h, %warp_hx = func.call @subgroup_sums(%share_h, %share_hx) : (!chunk, !chunk) -> (!acc, !acc)

            func.call @send_sums(%exchange, %mbarriers, %half, %group, %rank, %warp, %lane, %leads, %thread, %warp_h, %warp_hx)
                : (!exchange, !mbarriers, index, index, index, index, index, i1, index, !acc, !acc) -> ()
            %group_h, %group_hx = func.call @receive_sums(%exchange, %mbarriers, %half, %parity, %group, %group_i32, %lane, %warp_h, %warp_hx)
                : (!exchange, !mbarriers, index, i32, index, i32, index, !acc, !acc) -> (!acc, !acc)
            scf.yield %group_h, %group_hx : !acc, !acc
          } else {
            scf.yield %zero, %zero : !acc, !acc
          }
          scf.yield %row_h, %row_hx : !acc, !acc
        }

        // dx, and the row's part of dgamma and dbeta.
        scf.for %k = %c0 to %chunks step %c1 {
          %col, %inside = func.call @column(%k, %t, %part, %shift) : (index, index, index, index) -> (index, i1)
          %at = arith.addi %part, %col : index
          %dya, %xhat, %h = scf.if %rereads -> (!chunk, !chunk, !chunk) {
            %meets = func.call @meets_before(%k) : (index) -> i1
            scf.if %meets {
              nvvm.bar.warp.sync %all_lanes : i32
            }
            %dy_at = arith.addi %dy_from, %col : index
            %x_at = arith.addi %x_from, %col : index
            %dy_copied = "vector.load"(%dy_staged, %slot, %group, %dy_at) <{alignment = #dy_chunk_bytes}> : (!dy_staged, index, index, index) -> !dy_chunk
            %slot_of_x = func.call @x_slot(%slot) : (index) -> index
            %x_copied = "vector.load"(%x_staged, %slot_of_x, %group, %x_at) <{alignment = #x_chunk_bytes}> : (!x_staged, index, index, index) -> !x_chunk
            %dy_k, %x_k = func.call @masked(%dy_copied, %x_copied, %k, %at, %shift)
                : (!dy_chunk, !x_chunk, index, index, index) -> (!dy_chunk, !x_chunk)
            %dya_again = func.call @summed_dy(%dy_k, %more_held, %k) : (!dy_chunk, !more_dy_held, index) -> !chunk
            %xa = func.call @widen_of_x(%x_k) : (!x_chunk) -> !chunk
            %ga = func.call @chunk_weight(%gamma_held, %gamma_staged, %wide_staged, %group, %k, %col)
                : (!gamma_held, !gamma_staged, !wide_staged, index, index, index) -> !chunk
            %bias = func.call @chunk_bias(%beta_held, %beta_staged, %group, %k, %col)
                : (!beta_held, !beta_staged, index, index, index) -> !chunk
            %inverse = func.call @chunk_inverse(%inverse_staged, %group, %col, %ga, %row_zero)
                : (!inverse_staged, index, index, !chunk, !acc) -> !chunk
            %of_y = func.call @xhat_from_output(%xa, %bias, %inverse) : (!chunk, !chunk, !chunk) -> !chunk
            %of_x = func.call @xhat(%xa, %mean_row, %rstd_row) : (!chunk, !acc, !acc) -> !chunk
            %of_either = arith.select %from_output, %of_y, %of_x : !chunk
            %xhat_again = arith.select %has_row, %of_either, %zeros : !chunk
            %h_again = arith.mulf %dya_again, %ga : !chunk
            scf.yield %dya_again, %xhat_again, %h_again : !chunk, !chunk, !chunk
          } else {
            %dya_mine = memref.load %dya_kept[%k] : !held
            %xhat_mine = memref.load %xhat_kept[%k] : !held
            %h_mine = memref.load %h_kept[%k] : !held
            scf.yield %dya_mine, %xhat_mine, %h_mine : !chunk, !chunk, !chunk
          }
          %dxa = func.call @dx(%h, %xhat, %rstd_row, %sum_h, %sum_hx) : (!chunk, !chunk, !acc, !acc, !acc) -> !chunk
          %dresidual_k = memref.load %residual_held[%k] : !residual_held
          %dresidual_a = func.call @widen_of_residual(%dresidual_k) : (!residual_chunk) -> !chunk
          %dx_sum = func.call @plus_residual(%dxa, %dresidual_a) : (!chunk, !chunk) -> !chunk
          %dx_k = func.call @round_of_x(%dx_sum) : (!chunk) -> !x_chunk
          scf.if %wants_dx {
            %dx_stored = scf.if %fills -> !x_chunk {
              scf.yield %dx_k : !x_chunk
            } else {
              %settled = func.call @settled_of_x(%dx_k) : (!x_chunk) -> !x_chunk
              scf.yield %settled : !x_chunk
            }
            %exists = arith.andi %inside, %has_row : i1
            %whole = func.call @is_whole(%k, %at, %shift) : (index, index, index) -> i1
            %stores = arith.andi %exists, %whole : i1
            scf.if %stores {
              %line, %in_line = func.call @cell_address(%row_index, %part, %col) : (index, index, index) -> (index, index)
              vector.store %dx_stored, %dx[%line, %in_line] : !x_lines, !x_chunk
            }
            memref.store %dx_stored, %dx_kept[%k] : !x_held
          }
          %chunk_by_chunk = arith.xori %bulk, %yes : i1
          %refills_chunk = arith.andi %in_place, %chunk_by_chunk : i1
          scf.if %refills_chunk {
            %col_ahead, %inside_ahead = func.call @column(%k, %t, %part, %shift) : (index, index, index, index) -> (index, i1)
            %exists = arith.andi %inside_ahead, %row_ahead_live : i1
            %size = func.call @copied_elements(%exists, %k, %at, %shift) : (i1, index, index, index) -> index
            %line, %in_line = func.call @cell_address(%row_ahead_index, %part, %col) : (index, index, index) -> (index, index)
            %dy_copy = "nvgpu.device_async_copy"(%dy_staged, %fill, %group, %col, %dy, %line, %in_line, %size)
                <{dstElements = #copied, operandSegmentSizes = array<i32: 1, 3, 1, 2, 1>}>
                : (!dy_staged, index, index, index, !dy_lines, index, index, index) -> !nvgpu.device.async.token
            %x_copy = "nvgpu.device_async_copy"(%x_staged, %fill, %group, %col, %x, %line, %in_line, %size)
                <{dstElements = #copied, operandSegmentSizes = array<i32: 1, 3, 1, 2, 1>}>
                : (!x_staged, index, index, index, !x_lines, index, index, index) -> !nvgpu.device.async.token
            scf.if %apart {
              %refill = nvgpu.device_async_create_group
            }
          }
          %dgamma_before = memref.load %dgamma_sums[%k] : !held
          %dbeta_before = memref.load %dbeta_sums[%k] : !held
          %dgamma_after = math.fma %dya, %xhat, %dgamma_before : !chunk
          %dbeta_more = arith.addf %dbeta_before, %dya : !chunk
          %dbeta_after = arith.select %sums_dbeta, %dbeta_more, %dbeta_before : !chunk
          // Before the branches of a row's edges, and of copies: LLVM would move both sums behind them, and keep what
          // they add.
          %branches = arith.ori %shifted, %bulk : i1
          %dgamma_here, %dbeta_here = scf.if %branches -> (!chunk, !chunk) {
            %dgamma_settled = func.call @settled_of_sums(%dgamma_after) : (!chunk) -> !chunk
            %dbeta_settled = func.call @settled_of_sums(%dbeta_after) : (!chunk) -> !chunk
            scf.yield %dgamma_settled, %dbeta_settled : !chunk, !chunk
          } else {
            scf.yield %dgamma_after, %dbeta_after : !chunk, !chunk
          }
          memref.store %dgamma_here, %dgamma_sums[%k] : !held
          memref.store %dbeta_here, %dbeta_sums[%k] : !held

          scf.if %in_refills {
            %done = arith.addi %k, %c1 : index
            %refill = arith.divui %k, %refill_chunks : index
            %beyond = arith.remui %done, %refill_chunks : index
            %is_read = arith.cmpi eq, %beyond, %c0 : index
            %has_another = arith.cmpi ult, %refill, %last_refill : index
            %refills_now = arith.andi %is_read, %has_another : i1
            scf.if %refills_now {
              func.call @refill_in_bulk(%dy, %x, %row_ahead_index, %row_ahead_live, %row_next_index, %row_next_live, %cells, %refill, %fill, %group, %copier, %lane, %part, %shift, %dy_staged, %x_staged, %mbarriers)
                  : (!dy_lines, !x_lines, index, i1, index, i1, index, index, index, index, index, index, index, index, !dy_staged, !x_staged, !mbarriers) -> ()
            }
          }

          %dy_fetched = memref.load %dy_next[%k] : !dy_held
          %x_fetched = memref.load %x_next[%k] : !x_held
          memref.store %dy_fetched, %dy_held[%k] : !dy_held
          memref.store %x_fetched, %x_held[%k] : !x_held
          scf.for %more = %c0 to %c3 step %c1 {
            %more_fetched = memref.load %more_next[%more, %k] : !more_dy_held
            memref.store %more_fetched, %more_held[%more, %k] : !more_dy_held
          } {llvm.loop_annotation = #unrolled}
        } {llvm.loop_annotation = #unrolled}

        scf.if %bulk {
          func.call @refill_in_bulk(%dy, %x, %row_ahead_index, %row_ahead_live, %row_next_index, %row_next_live, %cells, %last_refill, %fill, %group, %copier, %lane, %part, %shift, %dy_staged, %x_staged, %mbarriers)
              : (!dy_lines, !x_lines, index, i1, index, i1, index, index, index, index, index, index, index, index, !dy_staged, !x_staged, !mbarriers) -> ()
        } else {
          scf.if %in_place {
            scf.if %apart {
            } else {
              %refilled = nvgpu.device_async_create_group
            }
          }
        }
        // A row's first and last chunk, apart from the others: these need no branch.
        scf.if %wants_dx {
          scf.for %k = %c0 to %chunks step %c1 {
            %edge = func.call @may_be_edge(%k) : (index) -> i1
            scf.if %edge {
              %col, %inside = func.call @column(%k, %t, %part, %shift) : (index, index, index, index) -> (index, i1)
              %at = arith.addi %part, %col : index
              %exists = arith.andi %inside, %has_row : i1
              %dx_k = memref.load %dx_kept[%k] : !x_held
              func.call @store_edge(%dx, %row_index, %k, %part, %col, %shift, %exists, %dx_k)
                  : (!x_lines, index, index, index, index, index, i1, !x_chunk) -> ()
            }
          } {llvm.loop_annotation = #unrolled}
        }
        %half_next, %parity_next = func.call @buffer_after(%half, %parity) : (index, i32) -> (index, i32)
        %mean_after = arith.select %defers, %mean_then, %mean_loaded : !acc
        %rstd_after = arith.select %defers, %rstd_then, %rstd_loaded : !acc
        %mean_behind = arith.select %defers, %mean_loaded, %mean_then : !acc
        %rstd_behind = arith.select %defers, %rstd_loaded, %rstd_then : !acc
        scf.yield %mean_after, %rstd_after, %mean_behind, %rstd_behind, %fill_next, %half_next, %parity_next, %copies_next
            : !acc, !acc, !acc, !acc, index, index, i32, i32
      }
      scf.if %bulk {
      } else {
        scf.if %stages {
          nvvm.cp.async.wait.group 0
        }
      }
      scf.if %one_group {
        scf.for %k = %c0 to %chunks step %c1 {
          %col, %inside = func.call @column(%k, %t, %part, %shift) : (index, index, index, index) -> (index, i1)
          %at = arith.addi %part, %col : index
          %dgamma_k = memref.load %dgamma_sums[%k] : !held
          %dbeta_k = memref.load %dbeta_sums[%k] : !held
          scf.if %inside {
            func.call @store_sums(%dgamma_partials, %workgroup, %k, %at, %shift, %dgamma_k)
                : (!acc_rows, index, index, index, index, !chunk) -> ()
            scf.if %sums_dbeta {
              func.call @store_sums(%dbeta_partials, %workgroup, %k, %at, %shift, %dbeta_k)
                  : (!acc_rows, index, index, index, index, !chunk) -> ()
            }
          }
        } {llvm.loop_annotation = #unrolled}
      } else {
        // The sums of all groups are added up to one partial row, for dgamma and then for dbeta, in the
        // shared memory that held rows of dy.
        %group_sums = memref.view %dy_bytes[%c0][] : !dy_bytes to !group_sums  // [groups, columns of T threads]
        %workgroup_threads = arith.muli %t_count, %groups : index
        %column_first = arith.muli %thread, %v : index
        %column_step = arith.muli %workgroup_threads, %v : index
        %c2 = arith.constant 2 : index
        %column_sums = arith.select %sums_dbeta, %c2, %c1 : index
        scf.for %which = %c0 to %column_sums step %c1 {
          %is_dgamma = arith.cmpi eq, %which, %c0 : index
          gpu.barrier
          scf.for %k = %c0 to %chunks step %c1 {
            %col, %inside = func.call @column(%k, %t, %part, %shift) : (index, index, index, index) -> (index, i1)
            %dgamma_k = memref.load %dgamma_sums[%k] : !held
            %dbeta_k = memref.load %dbeta_sums[%k] : !held
            %sum_k = arith.select %is_dgamma, %dgamma_k, %dbeta_k : !chunk
            scf.if %shifted {
              %from, %below = func.call @span(%k, %col, %shift) : (index, index, index) -> (index, index)
              scf.if %inside {
                scf.for %e = %c0 to %v step %c1 {
                  %in_row = func.call @is_within(%e, %from, %below) : (index, index, index) -> i1
                  scf.if %in_row {
                    %shifted_at = arith.addi %col, %e : index
                    %own_column = arith.subi %shifted_at, %shift : index
                    %one = vector.extract %sum_k[%e] : !acc from !chunk
                    memref.store %one, %group_sums[%group, %own_column] : !group_sums
                  }
                } {llvm.loop_annotation = #unrolled}
              }
            } else {
              vector.store %sum_k, %group_sums[%group, %col] : !group_sums, !chunk
            }
          } {llvm.loop_annotation = #unrolled}
          gpu.barrier
          // Where rows are shifted, a partial row has no whole chunks: a thread adds up one column at a time.
          %one_first = arith.select %shifted, %thread, %n : index
          scf.for %column = %one_first to %n step %workgroup_threads {
            %total = scf.for %g = %c0 to %groups step %c1 iter_args(%sum = %zero) -> (!acc) {
              %group_sum = memref.load %group_sums[%g, %column] : !group_sums
              %more = arith.addf %sum, %group_sum : !acc
              scf.yield %more : !acc
            }
            scf.if %is_dgamma {
              memref.store %total, %dgamma_partials[%workgroup, %column] : !acc_rows
            } else {
              scf.if %sums_dbeta {
                memref.store %total, %dbeta_partials[%workgroup, %column] : !acc_rows
              }
            }
          }
          %chunks_first = arith.select %shifted, %n, %column_first : index
          scf.for %column = %chunks_first to %n step %column_step {
            %total = scf.for %g = %c0 to %groups step %c1 iter_args(%sum = %zeros) -> (!chunk) {
              %group_sum = vector.load %group_sums[%g, %column] : !group_sums, !chunk
              %more = arith.addf %sum, %group_sum : !chunk
              scf.yield %more : !chunk
            }
            scf.if %is_dgamma {
              vector.store %total, %dgamma_partials[%workgroup, %column] : !acc_rows, !chunk
            } else {
              scf.if %sums_dbeta {
                vector.store %total, %dbeta_partials[%workgroup, %column] : !acc_rows, !chunk
              }
            }
          }
        }
      }

      // This branch is never taken. Without a store, LLVM finds that these bindings are read-only. ptxas
      // then moves the loads, which are meant to overlap with the barrier, to behind it.
      %never = arith.cmpi slt, %m_i32, %one_i32 : i32
      scf.if %never {
        vector.store %zero_dy, %dy[%c0, %c0] : !dy_lines, !dy_chunk
        vector.store %zero_x, %x[%c0, %c0] : !x_lines, !x_chunk
        scf.if %centres {
          memref.store %zero, %mean[%c0] : !acc_column
        }
        memref.store %zero, %rstd[%c0] : !acc_column
        scf.if %has_dy2 {
          vector.store %zero_dy, %dy2[%c0, %c0] : !dy_lines, !dy_chunk
        }
        scf.if %has_dy3 {
          vector.store %zero_dy, %dy3[%c0, %c0] : !dy_lines, !dy_chunk
        }
        scf.if %has_dy4 {
          vector.store %zero_dy, %dy4[%c0, %c0] : !dy_lines, !dy_chunk
        }
        scf.if %adds_residual {
          %zero_residual = arith.constant dense<0.0> : !residual_chunk
          vector.store %zero_residual, %dresidual[%c0, %c0] : !residual_lines, !residual_chunk
        }
      }
      return
    }
  }
}
