// Layer normalization, backward, in one pass over memory: how the algorithm runs on a GPU.
//
// x and dy have M rows of N columns. A fixed number of workgroups walk over the rows. A row is read once:
// its two sums are reduced over the threads that hold it, dx is written, and dgamma and dbeta accumulate
// in registers over all rows that a thread sees. Each workgroup stores them as one partial row, and
// finalize.mlir adds up the partial rows. No sum depends on which thread is first, so the bits are the same every time.
//
// A row is divided into chunks of V neighbouring columns; a chunk has 16 bytes where N allows it. A workgroup has
// several groups of T threads. A group works on one row at a time, and its thread t owns the chunks t, t + T, t + 2T, ...
// Loops over a thread's chunks are unrolled, so that the values held of each chunk stay in registers. A narrow row has a
// part of a subgroup (@shares_subgroup). The groups of a subgroup stay together: they walk on as long as the first of
// them has a row. One without a row takes the last row once more, adds nothing to any sum, and stores nothing.
//
// This is the walk: fetch, row sums, exchange, dx and sums of columns, refill, store. What it calls is in parts/,
// and iree_lnbwd/compiling/ir.py chooses between files with the same functions:
//   fetch/         how rows come: into registers, or some steps ahead into shared memory, by cp.async or in bulk
//   rows/          rows of whole chunks; or N is no multiple of V, and rows begin anywhere in an access (@shifted). A
//                  row's chunks are then those of memory that it touches. The first begins up to V - 1 elements before
//                  the row, and the last ends after it: what is not of the row counts as zeros and is not stored. All
//                  rows of a group begin at the same element of an access, so that a thread has the same columns of each.
//   begin/, weight/, bias/, inverse/
//                  what a thread keeps of its columns, when it reads it, and where it keeps it. From the
//                  forward's output (#from_output), x is that output, and xhat is (x - beta) / g.
//   sums/          how a row's sums come together. A row that is too wide for a workgroup is shared by a cluster of
//                  them: each has a part of the columns. Their sums go through each other's shared memory (NVIDIA since
//                  sm_90), or through global memory, and take a while. So a schedule may send those of the next row
//                  before it receives those of this one, and compute this row's dx then: a deferred reduction (#defers).
//   more.mlir      when other gradients of the output, or a gate, are loaded
//   partial_rows/  how a workgroup's groups store their sums of columns as one row

// What a NormSpec and a Schedule decide. These lines are replaced; the rest changes only by the rules
// of README.md.
!dy = bf16
!x = bf16
!gamma = bf16
!beta = bf16
!residual = bf16
!z = bf16
!acc = f32
#columns = 4096 : index  // N
#own_columns = 4096 : index  // of a workgroup
#vector = 8 : index  // V
#chunks = 1 : index  // of a row that a thread owns
#threads = 512 : index  // T
#subgroup = 32 : index
#workgroups_i32 = 132 : i32
#resident = 1 : i32  // workgroups that a multiprocessor must hold at once
#ahead_i32 = 2 : i32  // steps between a row's fetch and its use
#rereads = false  // rows are read from shared memory again for dx
#defers = false  // a row's sums are received once the next row's are sent
#centres = true  // false for RMS normalization: the mean is not subtracted
#sums_dbeta = true  // there is a dbeta
#adds_residual = false  // a gradient that came back past the norm is added to dx
#has_more = false  // the output has a second gradient, which is added to dy; or there is a gate
#has_dy3 = false
#has_dy4 = false
#wants_dx = true  // the caller asks for dx
#wants_dz = true  // the caller asks for dz
#rows_kernel = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline workgroup_size = [512, 1, 1] subgroup_size = 32>
!dy_lines = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>  // rows, or chunks where rows are shifted
!x_lines = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!residual_lines = memref<?x4096x!residual, #hal.descriptor_type<storage_buffer>>
!z_lines = memref<?x4096x!z, #hal.descriptor_type<storage_buffer>>
!acc_rows = memref<?x4096x!acc, #hal.descriptor_type<storage_buffer>>
!acc_column = memref<?x!acc, #hal.descriptor_type<storage_buffer>>
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!dy_bytes = memref<24576xi8, #gpu.address_space<workgroup>>
!x_bytes = memref<24576xi8, #gpu.address_space<workgroup>>
!exchange = memref<2x1x16x2x!acc, #gpu.address_space<workgroup>>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
!posted = memref<?x2xi64, #hal.descriptor_type<storage_buffer>>
!dy_chunk = vector<8x!dy>
!x_chunk = vector<8x!x>
!gamma_chunk = vector<8x!gamma>
!beta_chunk = vector<8x!beta>
!residual_chunk = vector<8x!residual>
!z_chunk = vector<8x!z>
!chunk = vector<8x!acc>
!more_lines = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>  // of dy2; of z, if there is a gate
!more_chunk = vector<8x!dy>
!more_dy_held = memref<3x1x!more_chunk, #gpu.address_space<private>>  // likewise: of the other gradients
!x_held = memref<1x!x_chunk, #gpu.address_space<private>>
!gamma_held = memref<1x!gamma_chunk, #gpu.address_space<private>>
!residual_held = memref<1x!residual_chunk, #gpu.address_space<private>>
!z_held = memref<1x!z_chunk, #gpu.address_space<private>>
!held = memref<1x!chunk, #gpu.address_space<private>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
!thread = vector<9xindex>  // its numbers: parts/thread.mlir
!begin = vector<4xindex>  // of a row: its slot, where in it dy and x begin, and its number
!rows_ahead = vector<2xindex>  // the row that is fetched, and the next one
!are_live = vector<2xi1>  // whether they are there
!statistics = vector<3x!acc>  // of a row: mean, rstd, and -0.0 (@row_zero)
!weight_room = memref<1x4096x!gamma, #gpu.address_space<workgroup>>  // likewise, of the weight
!bias_room = memref<1x!beta_chunk, #gpu.address_space<private>>  // likewise, of the bias of an output
!inverse_room = memref<1x4096x!acc, #gpu.address_space<workgroup>>  // likewise, of 1 / g
!dy_room = memref<3x1x4096x!dy, #gpu.address_space<workgroup>>  // of rows; in registers, if they are fetched there
!x_room = memref<3x1x4096x!x, #gpu.address_space<workgroup>>
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
  #hal.pipeline.binding<storage_buffer>,            // z [M, N]
  #hal.pipeline.binding<storage_buffer>,            // dx [M, N]
  #hal.pipeline.binding<storage_buffer>,            // partial dgamma [workgroups, N]
  #hal.pipeline.binding<storage_buffer>,            // partial dbeta [workgroups, N]
  #hal.pipeline.binding<storage_buffer>,            // dz [M, N]
  #hal.pipeline.binding<storage_buffer>,            // copy of dx [M, N]
  #hal.pipeline.binding<storage_buffer>,            // partial sum of dx over rows [workgroups, N]
  #hal.pipeline.binding<storage_buffer>             // posted sums [M, cluster + 1]
]>
#rows_x = affine_map<()[m] -> (m ceildiv 1, 132)>
#rows_y = affine_map<()[m] -> (1)>
// End of what is replaced.

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
    func.func private @groups_i32() -> i32
    func.func private @in_bulk() -> i1
    func.func private @loads_twice() -> i1
    func.func private @in_place() -> i1
    func.func private @fills() -> i1
    func.func private @shifted() -> i1
    func.func private @one_group() -> i1
    func.func private @shares_subgroup() -> i1
    func.func private @place() -> (index, index, index)
    func.func private @gather(!posted, !mbarriers, index, index) -> index
    func.func private @turn_of(index, index, index, index) -> (index, index, i1)
    func.func private @end_turn()
    func.func private @subgroup_i32() -> i32
    func.func private @row_shift(i32) -> index
    func.func private @room_for_weight(!gamma_held, !gamma_row) -> !weight_room
    func.func private @room_for_bias(!beta_row) -> !bias_room
    func.func private @room_for_inverse() -> !inverse_room
    func.func private @room_for_rows(!dy_bytes, !x_bytes, !dy_lines, !x_lines) -> (!dy_room, !x_room)
    func.func private @begin_columns(!thread, !gamma_row, !beta_row, !gamma_held, !weight_room, !bias_room, !inverse_room, !held, !held)
    func.func private @fetch_first_rows(!thread, i1, i32, i32, i32, index, !dy_lines, !x_lines, !dy_room, !x_room, !mbarriers)
    func.func private @fetch_first_chunk(index, !thread, index, !dy_lines, !x_lines, !dy_room, !x_room)
    func.func private @complete_chunk(index, !thread, !gamma_row, !beta_row, !gamma_held, !weight_room, !bias_room, !inverse_room)
    func.func private @ready_for_sums(!mbarriers, !thread)
    func.func private @load_more_late(!more_lines, !dy_lines, !dy_lines, index, i1, index, !thread, !more_dy_held)
    func.func private @load_more(!more_lines, !dy_lines, !dy_lines, i32, i32, !thread, !more_dy_held)
    func.func private @await_first_copies()
    func.func private @slot_in_use(index) -> index
    func.func private @row_zero(i32) -> !acc
    func.func private @row_begin(i32, index, !thread) -> !begin
    func.func private @await_row(!thread, i32, i32, !begin, i32, !dy_lines, !x_lines, !dy_room, !x_room, !mbarriers)
    func.func private @row_shares(!thread, !begin, !statistics, !more_lines, !dy_lines, !dy_lines, !dy_room, !x_room, !more_dy_held, !weight_room, !bias_room, !inverse_room) -> (!chunk, !chunk)
    func.func private @subgroup_sums(!chunk, !chunk) -> (!acc, !acc)
    func.func private @send_sums(!exchange, !mbarriers, !posted, index, i32, !thread, i1, !acc, !acc)
    func.func private @slot_after(index) -> index
    func.func private @parity_after(index, i32) -> i32
    func.func private @fetch_ahead(!thread, index, i1, index, !dy_lines, !x_lines, !dy_room, !x_room)
    func.func private @column(index, !thread) -> (index, i1)
    func.func private @load_residual(index, !thread, index, i1, !residual_lines, !residual_held)
    func.func private @buffer_after(index, i32) -> (index, i32)
    func.func private @receive_sums(!exchange, !mbarriers, !posted, index, i32, i32, !thread, i32, i1, !acc, !acc) -> (!acc, !acc)
    func.func private @row_chunk(index, !thread, !begin, !statistics, i1, i1, !dy_room, !x_room, !more_dy_held, !weight_room, !bias_room, !inverse_room) -> (!chunk, !chunk, !chunk, !chunk, !chunk, !chunk)
    func.func private @plus_chunk(!chunk, !chunk, !chunk, !chunk, !chunk, !chunk, !chunk, !chunk) -> (!chunk, !chunk)
    func.func private @thread_anew(!thread) -> !thread
    func.func private @begin_anew(!begin) -> !begin
    func.func private @shares_after(!chunk, !chunk) -> (!chunk, !chunk)
    func.func private @sums_after(!chunk, !chunk) -> (!chunk, !chunk)
    func.func private @is_whole(index, index, index) -> i1
    func.func private @cell_address(index, index, index) -> (index, index)
    func.func private @refill_chunk(index, !thread, index, i1, index, !dy_lines, !x_lines, !dy_room, !x_room)
    func.func private @take_next_chunk(index, !dy_room, !x_room)
    func.func private @refill_row(!thread, !rows_ahead, !are_live, index, index, !dy_lines, !x_lines, !dy_room, !x_room, !mbarriers)
    func.func private @may_be_edge(index) -> i1
    func.func private @store_edge_of_x(!x_lines, index, index, index, index, index, i1, !x_chunk)
    func.func private @await_last_copies()
    func.func private @store_partial_row(!thread, index, !held, !held, !dy_bytes, !acc_rows, !acc_rows)  // without totals
    // with totals: func.func private @store_partial_row(!thread, index, !held, !held, !held, !dy_bytes, !acc_rows, !acc_rows, !acc_rows)
    // with sets: func.func private @team_set(index, i32, i32) -> (index, index, index, index, i32, i32)
    // with sets: func.func private @team_walk(index, index, i32, i32, i32, i32) -> (i32, i32, i32)
    // with sets: func.func private @kth_row(!thread, i32) -> i32
    // with sets: func.func private @set_step(!thread, i32) -> !set_step
    // with sets: func.func private @begin_walk(!thread, i32, i32, !walk)
    // with sets: func.func private @walk_on(!thread, !set_step, i32, i32, !walk)
    // with totals: func.func private @begin_total(!held)
    // with totals: func.func private @add_to_total(index, i1, !chunk, !held)
    // From ir/math/.
    func.func private @dx(!chunk, !chunk, !acc, !acc, !acc) -> !chunk
    func.func private @widen_of_residual(!residual_chunk) -> !chunk
    func.func private @plus_residual(!chunk, !chunk) -> !chunk
    func.func private @round_of_x(!chunk) -> !x_chunk
    func.func private @settled_of_x(!x_chunk) -> !x_chunk
    func.func private @store_of_x(!x_lines, index, index, index, i1, !x_chunk)
    // with copies: func.func private @store_copy(!copy_lines, index, index, index, i1, !x_chunk)
    // with copies: func.func private @store_copy_edge(!copy_lines, index, index, index, index, index, i1, !x_chunk)
    // With a gate:
    func.func private @gate_gradients(index, !thread, !begin, i1, !chunk, !chunk, !dy_room, !x_room, !more_dy_held, !weight_room, !bias_room) -> (!chunk, !chunk)
    func.func private @round_of_z(!chunk) -> !z_chunk
    func.func private @settled_of_z(!z_chunk) -> !z_chunk
    func.func private @store_of_z(!z_lines, index, index, index, i1, !z_chunk)
    func.func private @store_edge_of_z(!z_lines, index, index, index, index, index, i1, !z_chunk)
    // End of the gate.

    func.func @rows() attributes {translation_info = #rows_kernel, nvvm.minctasm = #resident} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %c3 = arith.constant 3 : index
      %n = arith.constant #columns
      %v = arith.constant #vector
      %chunks = arith.constant #chunks
      %t_count = arith.constant #threads
      %lanes = arith.constant #subgroup
      %groups_i32 = func.call @groups_i32() : () -> i32  // without sets
      %p_i32 = arith.constant #workgroups_i32  // without sets
      %ahead_i32 = arith.constant #ahead_i32
      %in_bulk = func.call @in_bulk() : () -> i1
      %in_place = func.call @in_place() : () -> i1
      %rereads = arith.constant #rereads
      %defers = arith.constant #defers
      %wants_dx = arith.constant #wants_dx
      %fills = func.call @fills() : () -> i1
      %centres = arith.constant #centres
      %sums_dbeta = arith.constant #sums_dbeta
      %adds_residual = arith.constant #adds_residual
      %loads_twice = func.call @loads_twice() : () -> i1
      %residual_late = arith.andi %adds_residual, %loads_twice : i1
      %residual_early = arith.xori %adds_residual, %residual_late : i1
      %has_dy3 = arith.constant #has_dy3
      %has_dy4 = arith.constant #has_dy4
      %shifted = func.call @shifted() : () -> i1
      %one_group = func.call @one_group() : () -> i1
      %shares_subgroup = func.call @shares_subgroup() : () -> i1
      %yes = arith.constant true
      %has_more = arith.constant #has_more
      %first_time = arith.constant false
      %zero_i32 = arith.constant 0 : i32
      %lanes_i32 = func.call @subgroup_i32() : () -> i32
      %one_i32 = arith.constant 1 : i32
      %zero = arith.constant 0.0 : !acc
      %minus_zeros = arith.constant dense<-0.0> : !chunk  // adding -0.0 changes no number
      %zero_dy = arith.constant dense<0.0> : !dy_chunk
      %zero_x = arith.constant dense<0.0> : !x_chunk

      %m_i32 = hal.interface.constant.load layout(#rows_layout) ordinal(0) : i32
      %m = arith.index_castui %m_i32 : i32 to index
      // with sets: %sets_i32 = hal.interface.constant.load layout(#rows_layout) ordinal(1) : i32
      // with sets: %rows_per_set_i32 = hal.interface.constant.load layout(#rows_layout) ordinal(2) : i32
      // with sets: %set, %sets, %rows_per_set, %set_rows, %walker, %p_i32 = func.call @team_set(%m, %sets_i32, %rows_per_set_i32)
      // with sets:     : (index, i32, i32) -> (index, index, index, index, i32, i32)
      // with sets: %set_rows_i32 = arith.index_castui %set_rows : index to i32
      // with sets: %gamma_bytes = arith.constant #gamma_bytes
      // with sets: %gamma_at = arith.muli %set, %gamma_bytes : index
      // with sets: %beta_bytes = arith.constant #beta_bytes
      // with sets: %beta_at = arith.muli %set, %beta_bytes : index
      %cells = arith.muli %m, %n : index
      %all_chunks = arith.ceildivui %cells, %v : index
      %lines = arith.select %shifted, %all_chunks, %m : index
      %dy = hal.interface.binding.subspan layout(#rows_layout) binding(0) alignment(64) offset(%c0) : !dy_lines{%lines}
      %x = hal.interface.binding.subspan layout(#rows_layout) binding(1) alignment(64) offset(%c0) : !x_lines{%lines}
      %mean = hal.interface.binding.subspan layout(#rows_layout) binding(2) alignment(64) offset(%c0) : !acc_column{%m}
      %rstd = hal.interface.binding.subspan layout(#rows_layout) binding(3) alignment(64) offset(%c0) : !acc_column{%m}
      %gamma = hal.interface.binding.subspan layout(#rows_layout) binding(4) alignment(64) offset(%c0) flags(ReadOnly) : !gamma_row  // without sets
      // with sets: %gamma = hal.interface.binding.subspan layout(#rows_layout) binding(4) alignment(64) offset(%gamma_at) flags(ReadOnly) : !gamma_row
      %dresidual = hal.interface.binding.subspan layout(#rows_layout) binding(5) alignment(64) offset(%c0) : !residual_lines{%lines}
      %beta = hal.interface.binding.subspan layout(#rows_layout) binding(6) alignment(64) offset(%c0) flags(ReadOnly) : !beta_row  // without sets
      // with sets: %beta = hal.interface.binding.subspan layout(#rows_layout) binding(6) alignment(64) offset(%beta_at) flags(ReadOnly) : !beta_row
      %more = hal.interface.binding.subspan layout(#rows_layout) binding(7) alignment(64) offset(%c0) : !more_lines{%lines}
      %dy3 = hal.interface.binding.subspan layout(#rows_layout) binding(8) alignment(64) offset(%c0) : !dy_lines{%lines}
      %dy4 = hal.interface.binding.subspan layout(#rows_layout) binding(9) alignment(64) offset(%c0) : !dy_lines{%lines}
      // With a gate:
      %more_gated = hal.interface.binding.subspan layout(#rows_layout) binding(10) alignment(64) offset(%c0) : !more_lines{%lines}
      %dz = hal.interface.binding.subspan layout(#rows_layout) binding(14) alignment(64) offset(%c0) : !z_lines{%lines}
      %wants_dz = arith.constant #wants_dz
      // End of the gate.
      %dx = hal.interface.binding.subspan layout(#rows_layout) binding(11) alignment(64) offset(%c0) : !x_lines{%lines}
      // with copies: %dx_copy = hal.interface.binding.subspan layout(#rows_layout) binding(15) alignment(64) offset(%c0) : !copy_lines{%lines}
      %posted = hal.interface.binding.subspan layout(#rows_layout) binding(17) alignment(64) offset(%c0) : !posted{%m}
      %workgroup, %p, %own_rank = func.call @place() : () -> (index, index, index)
      %dgamma_partials = hal.interface.binding.subspan layout(#rows_layout) binding(12) alignment(64) offset(%c0) : !acc_rows{%p}
      %dbeta_partials = hal.interface.binding.subspan layout(#rows_layout) binding(13) alignment(64) offset(%c0) : !acc_rows{%p}
      // with totals: %dx_partials = hal.interface.binding.subspan layout(#rows_layout) binding(16) alignment(64) offset(%c0) : !acc_rows{%p}

      // Rows are counted in 32 bits, which saves registers; their offsets have 64.
      %own_columns = arith.constant #own_columns
      %own_part = arith.muli %own_rank, %own_columns : index
      %id = gpu.thread_id x
      %t = arith.remui %id, %t_count : index
      %group = arith.divui %id, %t_count : index
      %lane = arith.remui %t, %lanes : index
      %warp = arith.divui %t, %lanes : index
      %leads = arith.cmpi eq, %lane, %c0 : index  // the subgroup
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
      %copier = scf.if %in_bulk -> index {
        %warp_mine = arith.index_castui %warp : index to i32
        %warp_first, %warp_there = gpu.shuffle idx %warp_mine, %zero_i32, %lanes_i32 : i32
        %warp_same = arith.index_castui %warp_first : i32 to index
        scf.yield %warp_same : index
      } else {
        scf.yield %warp : index
      }
      %groups_on = arith.subi %group_mine, %group_i32 : i32  // this one, in the subgroup
      %groups_before = arith.select %shares_subgroup, %groups_on, %zero_i32 : i32
      %workgroup_first = arith.muli %workgroup_i32, %groups_i32 : i32  // without sets
      %subgroup_first = arith.addi %workgroup_first, %group_i32 : i32  // without sets
      %stride = arith.muli %p_i32, %groups_i32 : i32  // without sets
      // with sets: %subgroup_k, %k_on, %stride = func.call @team_walk(%sets, %rows_per_set, %walker, %p_i32, %group_i32, %groups_before) : (index, index, i32, i32, i32, i32) -> (i32, i32, i32)
      %last = arith.subi %m_i32, %one_i32 : i32

      // Shared memory. Every thread reads back only the values that it has stored or copied itself, or its subgroup
      // in bulk, so no barrier is needed. The exchange is the exception.
      %dy_bytes = memref.alloc() : !dy_bytes
      %x_bytes = memref.alloc() : !x_bytes
      %weight_early = memref.alloca() : !gamma_held
      %weight = func.call @room_for_weight(%weight_early, %gamma) : (!gamma_held, !gamma_row) -> !weight_room
      %bias = func.call @room_for_bias(%beta) : (!beta_row) -> !bias_room
      %inverse = func.call @room_for_inverse() : () -> !inverse_room
      %mbarriers = memref.alloc() : !mbarriers  // [buffers]
      %exchange = memref.alloc() : !exchange    // [buffers, groups, warps, (h, h * xhat)]

      // Rows, in shared memory or in registers; and what is in registers alone, with room for each chunk of a thread.
      %dy_rows, %x_rows = func.call @room_for_rows(%dy_bytes, %x_bytes, %dy, %x)
          : (!dy_bytes, !x_bytes, !dy_lines, !x_lines) -> (!dy_room, !x_room)
      %residual_held = memref.alloca() : !residual_held
      %more_held = memref.alloca() : !more_dy_held  // of this row
      %more_next = memref.alloca() : !more_dy_held  // of the next one, which is fetched meanwhile
      %dya_kept = memref.alloca() : !held           // from the row's sums until its dx
      %xhat_kept = memref.alloca() : !held
      %h_kept = memref.alloca() : !held
      %dx_kept = memref.alloca() : !x_held
      // With a gate:
      %dz_kept = memref.alloca() : !z_held
      // End of the gate.
      %dgamma_sums = memref.alloca() : !held
      %dbeta_sums = memref.alloca() : !held
      // with totals: %dx_sums = memref.alloca() : !held
      // with sets: %walk = memref.alloca() : !walk

      // Most workgroups take one turn; sums/memory.mlir says which take others, and in whose place.
      %turns = func.call @gather(%posted, %mbarriers, %workgroup, %id) : (!posted, !mbarriers, index, index) -> index
      scf.for %turn = %c0 to %turns step %c1 {
        // Of the cluster's workgroups, and the first column of this one.
        %rank, %part, %is_last_turn = func.call @turn_of(%turn, %turns, %own_rank, %own_part) : (index, index, index, index) -> (index, index, i1)
        %first = arith.addi %subgroup_first, %groups_before : i32  // without sets
        // with sets: %first_k = arith.addi %subgroup_k, %k_on : i32
        %shift = func.call @row_shift(%first) : (i32) -> index  // all rows of this group begin there  // without sets
        // with sets: %shift = arith.constant 0 : index
        %thread = vector.from_elements %id, %t, %group, %lane, %warp, %copier, %rank, %part, %shift : !thread  // without sets
        // with sets: %thread = vector.from_elements %id, %t, %group, %lane, %warp, %copier, %rank, %part, %shift, %set, %sets, %rows_per_set, %set_rows, %m : !thread
        // with sets: %subgroup_first = func.call @kth_row(%thread, %subgroup_k) : (!thread, i32) -> i32
        // with sets: %first = func.call @kth_row(%thread, %first_k) : (!thread, i32) -> i32
        // with sets: %set_step = func.call @set_step(%thread, %stride) : (!thread, i32) -> !set_step
        // with sets: func.call @begin_walk(%thread, %first_k, %stride, %walk) : (!thread, i32, i32, !walk) -> ()

        // with totals: func.call @begin_total(%dx_sums) : (!held) -> ()
        // The first rows are fetched before anything else but the weight; in bulk, before that, too.
        scf.if %in_bulk {
        } else {
          func.call @begin_columns(%thread, %gamma, %beta, %weight_early, %weight, %bias, %inverse, %dgamma_sums, %dbeta_sums)
              : (!thread, !gamma_row, !beta_row, !gamma_held, !weight_room, !bias_room, !inverse_room, !held, !held) -> ()
        }
        %first_in = arith.minsi %first, %last : i32
        %first_index = arith.index_castui %first_in : i32 to index
        func.call @fetch_first_rows(%thread, %leads, %first, %last, %stride, %cells, %dy, %x, %dy_rows, %x_rows, %mbarriers)  // without sets
        // with sets: func.call @fetch_first_rows(%thread, %leads, %first_k, %last, %stride, %cells, %dy, %x, %dy_rows, %x_rows, %mbarriers)
            : (!thread, i1, i32, i32, i32, index, !dy_lines, !x_lines, !dy_room, !x_room, !mbarriers) -> ()
        scf.if %in_bulk {
          func.call @begin_columns(%thread, %gamma, %beta, %weight_early, %weight, %bias, %inverse, %dgamma_sums, %dbeta_sums)
              : (!thread, !gamma_row, !beta_row, !gamma_held, !weight_room, !bias_room, !inverse_room, !held, !held) -> ()
        }
        %mean_first = memref.load %mean[%first_index] : !acc_column
        %rstd_first = memref.load %rstd[%first_index] : !acc_column
        // Those of the second row count where sums are received later.
        %second = arith.addi %first, %stride : i32  // without sets
        // with sets: %second = memref.load %walk[%c1] : !walk
        %second_in = arith.minsi %second, %last : i32
        %second_index = arith.index_castui %second_in : i32 to index
        %mean_behind_first = memref.load %mean[%second_index] : !acc_column
        %rstd_behind_first = memref.load %rstd[%second_index] : !acc_column
        scf.for %k = %c0 to %chunks step %c1 {
          func.call @fetch_first_chunk(%k, %thread, %first_index, %dy, %x, %dy_rows, %x_rows)
              : (index, !thread, index, !dy_lines, !x_lines, !dy_room, !x_room) -> ()
          func.call @complete_chunk(%k, %thread, %gamma, %beta, %weight_early, %weight, %bias, %inverse)
              : (index, !thread, !gamma_row, !beta_row, !gamma_held, !weight_room, !bias_room, !inverse_room) -> ()
        } {llvm.loop_annotation = #unrolled}

        func.call @ready_for_sums(%mbarriers, %thread) : (!mbarriers, !thread) -> ()

        func.call @load_more(%more, %dy3, %dy4, %first, %last, %thread, %more_held)
            : (!more_lines, !dy_lines, !dy_lines, i32, i32, !thread, !more_dy_held) -> ()

        // Each step uses one row and fetches a later one, #ahead_i32 steps ahead. Groups do not wait for
        // other groups: each has a barrier of its own.
        %stride_ahead = arith.muli %ahead_i32, %stride : i32
        %ahead = arith.index_castui %ahead_i32 : i32 to index
        %fill_first = arith.select %in_place, %c0, %ahead : index
        // Where sums are received later, those of the first row are sent before the walk.
        scf.if %defers {
          %walks = arith.cmpi slt, %subgroup_first, %m_i32 : i32
          scf.if %walks {
            func.call @await_first_copies() : () -> ()
            %slot = func.call @slot_in_use(%fill_first) : (index) -> index
            %row_zero = func.call @row_zero(%subgroup_first) : (i32) -> !acc
            %where = func.call @row_begin(%subgroup_first, %slot, %thread) : (i32, index, !thread) -> !begin
            func.call @await_row(%thread, %subgroup_first, %last, %where, %zero_i32, %dy, %x, %dy_rows, %x_rows, %mbarriers)
                : (!thread, i32, i32, !begin, i32, !dy_lines, !x_lines, !dy_room, !x_room, !mbarriers) -> ()
            %statistics = vector.from_elements %mean_first, %rstd_first, %row_zero : !statistics
            %first_h, %first_hx = func.call @row_shares(%thread, %where, %statistics, %more, %dy3, %dy4, %dy_rows, %x_rows, %more_held, %weight, %bias, %inverse)
                : (!thread, !begin, !statistics, !more_lines, !dy_lines, !dy_lines, !dy_room, !x_room, !more_dy_held, !weight_room, !bias_room, !inverse_room) -> (!chunk, !chunk)
            %warp_h, %warp_hx = func.call @subgroup_sums(%first_h, %first_hx) : (!chunk, !chunk) -> (!acc, !acc)
            func.call @send_sums(%exchange, %mbarriers, %posted, %c0, %subgroup_first, %thread, %leads, %warp_h, %warp_hx)
                : (!exchange, !mbarriers, !posted, index, i32, !thread, i1, !acc, !acc) -> ()
          }
        }
        %walked:8 = scf.for %subgroup_row = %subgroup_first to %m_i32 step %stride  // without sets
        // with sets: %walked:8 = scf.for %subgroup_row = %subgroup_k to %set_rows_i32 step %stride
            iter_args(%mean_row = %mean_first, %rstd_row = %rstd_first, %mean_then = %mean_behind_first, %rstd_then = %rstd_behind_first,
            %fill = %fill_first, %buffer = %c0, %parity = %zero_i32, %parity_of_copies = %zero_i32)
            -> (!acc, !acc, !acc, !acc, index, index, i32, i32) : i32 {
          %fill_next = func.call @slot_after(%fill) : (index) -> index
          %slot = func.call @slot_in_use(%fill) : (index) -> index
          %copies_next = func.call @parity_after(%fill_next, %parity_of_copies) : (index, i32) -> i32

          %own_row = arith.addi %subgroup_row, %groups_before : i32  // without sets
          // with sets: %own_k = arith.addi %subgroup_row, %k_on : i32
          // with sets: %own_row = memref.load %walk[%c0] : !walk
          %row, %has_row = scf.if %shares_subgroup -> (i32, i1) {
            %own_row_in = arith.minsi %own_row, %last : i32
            %is_in = arith.cmpi sle, %own_row, %last : i32
            scf.yield %own_row_in, %is_in : i32, i1
          } else {
            scf.yield %own_row, %yes : i32, i1
          }
          %stores_row = arith.andi %has_row, %is_last_turn : i1

          // Copies in place are made later: each overwrites a row whose dx is stored first.
          %row_ahead = arith.addi %own_row, %stride_ahead : i32  // without sets
          // with sets: %row_ahead = memref.load %walk[%ahead] : !walk
          %row_ahead_live = arith.cmpi sle, %row_ahead, %last : i32
          %row_ahead_in = arith.minsi %row_ahead, %last : i32
          %row_ahead_index = arith.index_castui %row_ahead_in : i32 to index
          func.call @fetch_ahead(%thread, %row_ahead_index, %row_ahead_live, %fill, %dy, %x, %dy_rows, %x_rows)
              : (!thread, index, i1, index, !dy_lines, !x_lines, !dy_room, !x_room) -> ()
          %where = func.call @row_begin(%row, %slot, %thread) : (i32, index, !thread) -> !begin

          // Statistics are loaded a whole step ahead of their use.
          %row_next = arith.addi %own_row, %stride : i32  // without sets
          // with sets: %row_next = memref.load %walk[%c1] : !walk
          %row_next_live = arith.cmpi sle, %row_next, %last : i32
          %row_next_in = arith.minsi %row_next, %last : i32
          %row_next_index = arith.index_castui %row_next_in : i32 to index
          %rows_ahead = vector.from_elements %row_ahead_index, %row_next_index : !rows_ahead
          %are_live = vector.from_elements %row_ahead_live, %row_next_live : !are_live
          %row_then = arith.addi %row_next, %stride : i32  // without sets
          // with sets: %c2 = arith.constant 2 : index
          // with sets: %row_then = memref.load %walk[%c2] : !walk
          %row_loaded = arith.select %defers, %row_then, %row_next : i32
          %row_loaded_in = arith.minsi %row_loaded, %last : i32
          %row_loaded_index = arith.index_castui %row_loaded_in : i32 to index
          %mean_loaded = memref.load %mean[%row_loaded_index] : !acc_column
          %rstd_loaded = memref.load %rstd[%row_loaded_index] : !acc_column

          func.call @load_more(%more, %dy3, %dy4, %row_next, %last, %thread, %more_next)
              : (!more_lines, !dy_lines, !dy_lines, i32, i32, !thread, !more_dy_held) -> ()

          %row_zero = func.call @row_zero(%row) : (i32) -> !acc
          %row_index = arith.index_castui %row : i32 to index
          scf.if %residual_early {
            scf.for %k = %c0 to %chunks step %c1 {
              func.call @load_residual(%k, %thread, %row_index, %has_row, %dresidual, %residual_held)
                  : (index, !thread, index, i1, !residual_lines, !residual_held) -> ()
            } {llvm.loop_annotation = #unrolled}
          }
          %statistics = vector.from_elements %mean_row, %rstd_row, %row_zero : !statistics
          %sum_h, %sum_hx = scf.if %defers -> (!acc, !acc) {
            %step_after = arith.addi %subgroup_row, %stride : i32
            %walks_on = arith.cmpi slt, %step_after, %m_i32 : i32  // without sets
            // with sets: %walks_on = arith.cmpi slt, %step_after, %set_rows_i32 : i32
            scf.if %walks_on {
              %buffer_then, %parity_then = func.call @buffer_after(%buffer, %parity) : (index, i32) -> (index, i32)
              %slot_then = func.call @slot_after(%slot) : (index) -> index
              %row_zero_then = func.call @row_zero(%row_next) : (i32) -> !acc
              %where_then = func.call @row_begin(%row_next, %slot_then, %thread) : (i32, index, !thread) -> !begin
              func.call @await_row(%thread, %row_next, %last, %where_then, %copies_next, %dy, %x, %dy_rows, %x_rows, %mbarriers)
                  : (!thread, i32, i32, !begin, i32, !dy_lines, !x_lines, !dy_room, !x_room, !mbarriers) -> ()
              %statistics_then = vector.from_elements %mean_then, %rstd_then, %row_zero_then : !statistics
              %then_h, %then_hx = func.call @row_shares(%thread, %where_then, %statistics_then, %more, %dy3, %dy4, %dy_rows, %x_rows, %more_held, %weight, %bias, %inverse)
                  : (!thread, !begin, !statistics, !more_lines, !dy_lines, !dy_lines, !dy_room, !x_room, !more_dy_held, !weight_room, !bias_room, !inverse_room) -> (!chunk, !chunk)
              %warp_h, %warp_hx = func.call @subgroup_sums(%then_h, %then_hx) : (!chunk, !chunk) -> (!acc, !acc)
              func.call @send_sums(%exchange, %mbarriers, %posted, %buffer_then, %row_next, %thread, %leads, %warp_h, %warp_hx)
                  : (!exchange, !mbarriers, !posted, index, i32, !thread, i1, !acc, !acc) -> ()
            }
            %sent_h, %sent_hx = func.call @receive_sums(%exchange, %mbarriers, %posted, %buffer, %parity, %row, %thread, %group_i32, %is_last_turn, %zero, %zero)
                : (!exchange, !mbarriers, !posted, index, i32, i32, !thread, i32, i1, !acc, !acc) -> (!acc, !acc)
            scf.yield %sent_h, %sent_hx : !acc, !acc
          } else {
            func.call @await_row(%thread, %row, %last, %where, %parity_of_copies, %dy, %x, %dy_rows, %x_rows, %mbarriers)
                : (!thread, i32, i32, !begin, i32, !dy_lines, !x_lines, !dy_room, !x_room, !mbarriers) -> ()
            %thread_sums = func.call @thread_anew(%thread) : (!thread) -> !thread
            %share_h, %share_hx = scf.for %k = %c0 to %chunks step %c1
                iter_args(%h_before = %minus_zeros, %hx_before = %minus_zeros) -> (!chunk, !chunk) {
              func.call @load_more_late(%more, %dy3, %dy4, %row_index, %has_row, %k, %thread_sums, %more_held)
                  : (!more_lines, !dy_lines, !dy_lines, index, i1, index, !thread, !more_dy_held) -> ()
              %dya, %xhat, %h, %xa, %ga, %b = func.call @row_chunk(%k, %thread_sums, %where, %statistics, %has_row, %first_time, %dy_rows, %x_rows, %more_held, %weight, %bias, %inverse)
                  : (index, !thread, !begin, !statistics, i1, i1, !dy_room, !x_room, !more_dy_held, !weight_room, !bias_room, !inverse_room)
                  -> (!chunk, !chunk, !chunk, !chunk, !chunk, !chunk)
              memref.store %dya, %dya_kept[%k] : !held
              memref.store %xhat, %xhat_kept[%k] : !held
              memref.store %h, %h_kept[%k] : !held
              %h_after, %hx_after = func.call @plus_chunk(%h_before, %hx_before, %dya, %xhat, %h, %xa, %ga, %b)
                  : (!chunk, !chunk, !chunk, !chunk, !chunk, !chunk, !chunk, !chunk) -> (!chunk, !chunk)
              %h_here, %hx_here = func.call @shares_after(%h_after, %hx_after) : (!chunk, !chunk) -> (!chunk, !chunk)
              scf.yield %h_here, %hx_here : !chunk, !chunk
            } {llvm.loop_annotation = #unrolled}
            %row_h, %row_hx = scf.if %wants_dx -> (!acc, !acc) {
              %warp_h, %warp_hx = func.call @subgroup_sums(%share_h, %share_hx) : (!chunk, !chunk) -> (!acc, !acc)
              func.call @send_sums(%exchange, %mbarriers, %posted, %buffer, %row, %thread, %leads, %warp_h, %warp_hx)
                  : (!exchange, !mbarriers, !posted, index, i32, !thread, i1, !acc, !acc) -> ()
              %group_h, %group_hx = func.call @receive_sums(%exchange, %mbarriers, %posted, %buffer, %parity, %row, %thread, %group_i32, %is_last_turn, %warp_h, %warp_hx)
                  : (!exchange, !mbarriers, !posted, index, i32, i32, !thread, i32, i1, !acc, !acc) -> (!acc, !acc)
              scf.yield %group_h, %group_hx : !acc, !acc
            } else {
              scf.yield %zero, %zero : !acc, !acc
            }
            scf.yield %row_h, %row_hx : !acc, !acc
          }

          // dx, and the row's part of dgamma and dbeta.
          %thread_dx = func.call @thread_anew(%thread) : (!thread) -> !thread
          %where_dx = func.call @begin_anew(%where) : (!begin) -> !begin
          scf.for %k = %c0 to %chunks step %c1 {
            %col, %inside = func.call @column(%k, %thread_dx) : (index, !thread) -> (index, i1)
            %at = arith.addi %part, %col : index
            func.call @load_more_late(%more, %dy3, %dy4, %row_index, %has_row, %k, %thread_dx, %more_held)
                : (!more_lines, !dy_lines, !dy_lines, index, i1, index, !thread, !more_dy_held) -> ()
            %dya, %xhat, %h = scf.if %rereads -> (!chunk, !chunk, !chunk) {
              %dya_again, %xhat_again, %h_again, %xa, %ga, %b = func.call @row_chunk(%k, %thread_dx, %where_dx, %statistics, %has_row, %yes, %dy_rows, %x_rows, %more_held, %weight, %bias, %inverse)
                  : (index, !thread, !begin, !statistics, i1, i1, !dy_room, !x_room, !more_dy_held, !weight_room, !bias_room, !inverse_room)
                  -> (!chunk, !chunk, !chunk, !chunk, !chunk, !chunk)
              scf.yield %dya_again, %xhat_again, %h_again : !chunk, !chunk, !chunk
            } else {
              %dya_mine = memref.load %dya_kept[%k] : !held
              %xhat_mine = memref.load %xhat_kept[%k] : !held
              %h_mine = memref.load %h_kept[%k] : !held
              scf.yield %dya_mine, %xhat_mine, %h_mine : !chunk, !chunk, !chunk
            }
            %dxa = func.call @dx(%h, %xhat, %rstd_row, %sum_h, %sum_hx) : (!chunk, !chunk, !acc, !acc, !acc) -> !chunk
            scf.if %residual_late {
              func.call @load_residual(%k, %thread_dx, %row_index, %has_row, %dresidual, %residual_held)
                  : (index, !thread, index, i1, !residual_lines, !residual_held) -> ()
            }
            %dresidual_k = memref.load %residual_held[%k] : !residual_held
            %dresidual_a = func.call @widen_of_residual(%dresidual_k) : (!residual_chunk) -> !chunk
            %dx_sum = func.call @plus_residual(%dxa, %dresidual_a) : (!chunk, !chunk) -> !chunk
            // With a gate:
            %dx_sum_gated, %dza = func.call @gate_gradients(%k, %thread_dx, %where_dx, %has_row, %dx_sum, %xhat, %dy_rows, %x_rows, %more_held, %weight, %bias)
                : (index, !thread, !begin, i1, !chunk, !chunk, !dy_room, !x_room, !more_dy_held, !weight_room, !bias_room) -> (!chunk, !chunk)
            scf.if %wants_dz {
              %dz_k = func.call @round_of_z(%dza) : (!chunk) -> !z_chunk
              %dz_settled = func.call @settled_of_z(%dz_k) : (!z_chunk) -> !z_chunk
              %has_cells = arith.andi %inside, %stores_row : i1
              %whole_z = func.call @is_whole(%k, %at, %shift) : (index, index, index) -> i1
              %stores_z = arith.andi %has_cells, %whole_z : i1
              func.call @store_of_z(%dz, %row_index, %part, %col, %stores_z, %dz_settled)
                  : (!z_lines, index, index, index, i1, !z_chunk) -> ()
              memref.store %dz_settled, %dz_kept[%k] : !z_held
            }
            // End of the gate.
            %dx_k = func.call @round_of_x(%dx_sum) : (!chunk) -> !x_chunk
            scf.if %wants_dx {
              %dx_stored = scf.if %fills -> !x_chunk {
                scf.yield %dx_k : !x_chunk
              } else {
                %settled = func.call @settled_of_x(%dx_k) : (!x_chunk) -> !x_chunk
                scf.yield %settled : !x_chunk
              }
              %exists = arith.andi %inside, %stores_row : i1
              %whole = func.call @is_whole(%k, %at, %shift) : (index, index, index) -> i1
              %stores = arith.andi %exists, %whole : i1
              func.call @store_of_x(%dx, %row_index, %part, %col, %stores, %dx_stored) : (!x_lines, index, index, index, i1, !x_chunk) -> ()
              // with copies: func.call @store_copy(%dx_copy, %row_index, %part, %col, %stores, %dx_stored) : (!copy_lines, index, index, index, i1, !x_chunk) -> ()
              memref.store %dx_stored, %dx_kept[%k] : !x_held
            }
            func.call @refill_chunk(%k, %thread_dx, %row_ahead_index, %row_ahead_live, %fill, %dy, %x, %dy_rows, %x_rows)
                : (index, !thread, index, i1, index, !dy_lines, !x_lines, !dy_room, !x_room) -> ()
            %dgamma_before = memref.load %dgamma_sums[%k] : !held
            %dbeta_before = memref.load %dbeta_sums[%k] : !held
            %dgamma_after = math.fma %dya, %xhat, %dgamma_before : !chunk
            %dbeta_more = arith.addf %dbeta_before, %dya : !chunk
            %dbeta_after = arith.select %sums_dbeta, %dbeta_more, %dbeta_before : !chunk
            %dgamma_here, %dbeta_here = func.call @sums_after(%dgamma_after, %dbeta_after) : (!chunk, !chunk) -> (!chunk, !chunk)
            memref.store %dgamma_here, %dgamma_sums[%k] : !held
            memref.store %dbeta_here, %dbeta_sums[%k] : !held
            // with totals: func.call @add_to_total(%k, %has_row, %dx_sum, %dx_sums) : (index, i1, !chunk, !held) -> ()

            func.call @take_next_chunk(%k, %dy_rows, %x_rows) : (index, !dy_room, !x_room) -> ()
            scf.for %which = %c0 to %c3 step %c1 {
              %more_fetched = memref.load %more_next[%which, %k] : !more_dy_held
              memref.store %more_fetched, %more_held[%which, %k] : !more_dy_held
            } {llvm.loop_annotation = #unrolled}
          } {llvm.loop_annotation = #unrolled}

          func.call @refill_row(%thread, %rows_ahead, %are_live, %cells, %fill, %dy, %x, %dy_rows, %x_rows, %mbarriers)
              : (!thread, !rows_ahead, !are_live, index, index, !dy_lines, !x_lines, !dy_room, !x_room, !mbarriers) -> ()
          // With a gate:
          scf.if %wants_dz {
            scf.for %k = %c0 to %chunks step %c1 {
              %edge = func.call @may_be_edge(%k) : (index) -> i1
              scf.if %edge {
                %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
                %exists = arith.andi %inside, %stores_row : i1
                %dz_k = memref.load %dz_kept[%k] : !z_held
                func.call @store_edge_of_z(%dz, %row_index, %k, %part, %col, %shift, %exists, %dz_k)
                    : (!z_lines, index, index, index, index, index, i1, !z_chunk) -> ()
              }
            } {llvm.loop_annotation = #unrolled}
          }
          // End of the gate.
          // A row's first and last chunk, apart from the others: these need no branch.
          scf.if %wants_dx {
            scf.for %k = %c0 to %chunks step %c1 {
              %edge = func.call @may_be_edge(%k) : (index) -> i1
              scf.if %edge {
                %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
                %exists = arith.andi %inside, %stores_row : i1
                %dx_k = memref.load %dx_kept[%k] : !x_held
                func.call @store_edge_of_x(%dx, %row_index, %k, %part, %col, %shift, %exists, %dx_k)
                    : (!x_lines, index, index, index, index, index, i1, !x_chunk) -> ()
                // with copies: func.call @store_copy_edge(%dx_copy, %row_index, %k, %part, %col, %shift, %exists, %dx_k)
                // with copies:     : (!copy_lines, index, index, index, index, index, i1, !x_chunk) -> ()
              }
            } {llvm.loop_annotation = #unrolled}
          }
          %buffer_next, %parity_next = func.call @buffer_after(%buffer, %parity) : (index, i32) -> (index, i32)
          // with sets: func.call @walk_on(%thread, %set_step, %own_k, %stride, %walk) : (!thread, !set_step, i32, i32, !walk) -> ()
          %mean_after = arith.select %defers, %mean_then, %mean_loaded : !acc
          %rstd_after = arith.select %defers, %rstd_then, %rstd_loaded : !acc
          %mean_behind = arith.select %defers, %mean_loaded, %mean_then : !acc
          %rstd_behind = arith.select %defers, %rstd_loaded, %rstd_then : !acc
          scf.yield %mean_after, %rstd_after, %mean_behind, %rstd_behind, %fill_next, %buffer_next, %parity_next, %copies_next
              : !acc, !acc, !acc, !acc, index, index, i32, i32
        }
        func.call @await_last_copies() : () -> ()
        func.call @store_partial_row(%thread, %workgroup, %dgamma_sums, %dbeta_sums, %dy_bytes, %dgamma_partials, %dbeta_partials)  // without totals
            : (!thread, index, !held, !held, !dy_bytes, !acc_rows, !acc_rows) -> ()  // without totals
        // with totals: func.call @store_partial_row(%thread, %workgroup, %dgamma_sums, %dbeta_sums, %dx_sums, %dy_bytes, %dgamma_partials, %dbeta_partials, %dx_partials)
        // with totals:     : (!thread, index, !held, !held, !held, !dy_bytes, !acc_rows, !acc_rows, !acc_rows) -> ()
        func.call @end_turn() : () -> ()
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
        scf.if %has_more {
          %zero_more = arith.constant dense<0.0> : !more_chunk
          vector.store %zero_more, %more[%c0, %c0] : !more_lines, !more_chunk
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
