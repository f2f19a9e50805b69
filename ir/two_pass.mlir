// Layer normalization, backward, in two passes over memory: for rows that no workgroup can hold.
//
// x and dy have M rows of N columns. @row_sums reads a row and stores its two sums. @columns reads x and
// dy again: a workgroup owns a tile of columns and walks over rows. It writes dx, and accumulates dgamma
// and dbeta of its columns in P partial rows; no thread ever waits for another. finalize.mlir adds up the
// partial rows. Two passes take five streams, and one pass takes three.
//
// A tile has few workgroups, its walkers, so each sums many rows. No sum is long all the same: after a
// span of rows a thread adds its sums to its partial row, and begins again at zero.
//
// From the forward's output (#from_output), x is that output, and xhat is (x - beta) / g.
//
// with sets: // Where the weight has sets, walkers share out the rows of each, and count rows as the k-th of their set
// with sets: // (math/sets.mlir). Walkers of all sets count along x, set by set, and tiles along y.
// with sets: //
// A thread keeps memory busy by several loads at once: chunks of a row in @row_sums, rows in @columns.
// The loops over them are unrolled.

// What a NormSpec and a Schedule decide. These lines are replaced; the rest changes only by the rules
// of README.md.
!dy = bf16
!x = bf16
!gamma = bf16
!beta = bf16
!residual = bf16
!z = bf16
!acc = f32
!dy_sum = bf16                   // of sums of gradients of the output
#columns = 32768 : index         // N
#vector = 8 : index
#threads = 256 : index
#subgroup = 32 : index
#chunks_at_once = 1 : index
#whole = true                    // N is a multiple of the columns that all threads read at once
#rows_at_once = 1 : index
#span_steps = 32 : index         // steps of a walker that are summed at a time
#centres = true                  // false for RMS normalization: the mean is not subtracted
#sums_dbeta = true               // there is a dbeta
#has_dy2 = false                 // the output has a second gradient, which is added to dy
#has_dy3 = false
#has_dy4 = false
#from_output = false             // x is the forward's output
#adds_bias = false               // it has a beta in it
#least_weight = 1.0e-5 : !acc
#wants_dx = true                 // the caller asks for dx
#gates_first = false             // the gate is before the norm
#wants_dz = true                 // the caller asks for dz
#workgroups_index = 66 : index   // that walk over the rows of a tile
#tile = 2048 : index             // columns of a workgroup
#resident = 1 : i32              // workgroups that a multiprocessor must hold at once
#two_pass_kernel = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline workgroup_size = [256, 1, 1] subgroup_size = 32>
!dy_rows = memref<?x32768x!dy, #hal.descriptor_type<storage_buffer>>
!x_rows = memref<?x32768x!x, #hal.descriptor_type<storage_buffer>>
!residual_rows = memref<?x32768x!residual, #hal.descriptor_type<storage_buffer>>
!z_rows = memref<?x32768x!z, #hal.descriptor_type<storage_buffer>>
!acc_rows = memref<?x32768x!acc, #hal.descriptor_type<storage_buffer>>
!acc_column = memref<?x!acc, #hal.descriptor_type<storage_buffer>>
!gamma_row = memref<32768x!gamma, #hal.descriptor_type<storage_buffer>>
!beta_row = memref<32768x!beta, #hal.descriptor_type<storage_buffer>>
!exchange = memref<1x1x8x2x!acc, #gpu.address_space<workgroup>>
!warp_sums = vector<8x2x!acc>
!dy_chunk = vector<8x!dy>
!dy_sum_chunk = vector<8x!dy_sum>
!x_chunk = vector<8x!x>
!gamma_chunk = vector<8x!gamma>
!beta_chunk = vector<8x!beta>
!residual_chunk = vector<8x!residual>
!z_chunk = vector<8x!z>
!chunk = vector<8x!acc>
!dy_read = memref<1x!dy_chunk, #gpu.address_space<private>>  // the chunks that a thread reads at once, in registers
!more_dy_read = memref<3x1x!dy_chunk, #gpu.address_space<private>>  // likewise: of the other gradients
!x_read = memref<1x!x_chunk, #gpu.address_space<private>>
!gamma_read = memref<1x!gamma_chunk, #gpu.address_space<private>>
!beta_read = memref<1x!beta_chunk, #gpu.address_space<private>>
!z_read = memref<1x!z_chunk, #gpu.address_space<private>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
// The launches, as iree_lnbwd/vmfb/launches.py states them: the bindings, and the workgroups for M rows, the
// least number of a list.
#row_sums_layout = #hal.pipeline.layout<constants = 1, bindings = [
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dy [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // x [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // mean [M]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // rstd [M]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // gamma [N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // beta [N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dy2 [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dy3 [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dy4 [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // z [M, N]
  #hal.pipeline.binding<storage_buffer>,            // sum of h [M]
  #hal.pipeline.binding<storage_buffer>             // sum of h * xhat [M]
]>
#row_sums_x = affine_map<()[m] -> (m ceildiv 1)>
#columns_layout = #hal.pipeline.layout<constants = 1, bindings = [
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dy [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // x [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // mean [M]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // rstd [M]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // gamma [N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // sum of h [M]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // sum of h * xhat [M]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dresidual [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // beta [N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dy2 [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dy3 [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dy4 [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // z [M, N]
  #hal.pipeline.binding<storage_buffer>,            // dx [M, N]
  #hal.pipeline.binding<storage_buffer>,            // partial dgamma [P, N]
  #hal.pipeline.binding<storage_buffer>,            // partial dbeta [P, N]
  #hal.pipeline.binding<storage_buffer>,            // dz [M, N]
  #hal.pipeline.binding<storage_buffer>,            // copy of dx [M, N]
  #hal.pipeline.binding<storage_buffer>             // partial sum of dx over rows [P, N]
]>
#columns_x = affine_map<()[m] -> (16)>
#columns_y = affine_map<()[m] -> (m ceildiv 1, 66)>
// End of what is replaced.

!pair = vector<2x!acc>
// with totals: !one_held = memref<1x!chunk, #gpu.address_space<private>>

hal.executable.source private @row_sums {
  hal.executable.export public @row_sums ordinal(0) layout(#row_sums_layout)
      count(%device: !hal.device, %m: index) -> (index, index, index) {
    %x = affine.min #row_sums_x()[%m]
    %one = arith.constant 1 : index
    hal.return %x, %one, %one : index, index, index
  }
  builtin.module {
    // From ir/math/.
    // with sets: func.func private @row_set(index, index, index) -> index
    // with strides: func.func private @row_of_dy(!dy_rows, index) -> !dy_rows
    // with strides: func.func private @row_of_x(!x_rows, index) -> !x_rows
    func.func private @widen_of_dy(!dy_chunk) -> !chunk
    func.func private @round_apart_of_dy_sum(!chunk) -> !dy_sum_chunk
    func.func private @widen_of_dy_sum(!dy_sum_chunk) -> !chunk
    func.func private @widen_of_x(!x_chunk) -> !chunk
    func.func private @widen_of_gamma(!gamma_chunk) -> !chunk
    func.func private @widen_of_beta(!beta_chunk) -> !chunk
    func.func private @weight(!chunk) -> !chunk
    func.func private @away_from_zero(!chunk) -> !chunk
    func.func private @reciprocal(!chunk) -> !chunk
    func.func private @xhat(!chunk, !acc, !acc) -> !chunk
    func.func private @xhat_from_output(!chunk, !chunk, !chunk) -> !chunk
    // With a gate:
    // with strides: func.func private @row_of_z(!z_rows, index) -> !z_rows
    func.func private @widen_of_z(!z_chunk) -> !chunk
    func.func private @silu_of_z(!chunk) -> (!chunk, !chunk)
    func.func private @gated_input(!chunk, !chunk) -> !chunk
    func.func private @gated_gradient(!chunk, !chunk) -> !chunk
    // End of the gate.

    // A sum of gradients of the output and one more, rounded as an addition rounds it.
    func.func private @plus_dy(%sum: !chunk, %more: !dy_chunk, %counts: i1) -> !chunk {
      %after = scf.if %counts -> !chunk {
        %wide = func.call @widen_of_dy(%more) : (!dy_chunk) -> !chunk
        %exact = arith.addf %sum, %wide : !chunk
        %rounded = func.call @round_apart_of_dy_sum(%exact) : (!chunk) -> !dy_sum_chunk
        %both = func.call @widen_of_dy_sum(%rounded) : (!dy_sum_chunk) -> !chunk
        scf.yield %both : !chunk
      } else {
        scf.yield %sum : !chunk
      }
      return %after : !chunk
    }

    // A thread reads several chunks at once, the first of them at column %first. This is the first column
    // of chunk k of them, and whether the row has that chunk.
    func.func private @column(%k: index, %first: index) -> (index, i1) {
      %n = arith.constant #columns
      %v = arith.constant #vector
      %t_count = arith.constant #threads
      %whole = arith.constant #whole
      %neighbours = arith.muli %t_count, %v : index
      %skipped = arith.muli %k, %neighbours : index
      %col = arith.addi %first, %skipped : index
      %before_end = arith.cmpi ult, %col, %n : index
      %inside = arith.ori %whole, %before_end : i1
      return %col, %inside : index, i1
    }

    func.func @row_sums() attributes {translation_info = #two_pass_kernel, nvvm.minctasm = #resident} {
      %c0 = arith.constant 0 : index
      %n = arith.constant #columns
      %v = arith.constant #vector
      %t_count = arith.constant #threads
      %lanes = arith.constant #subgroup
      %zero = arith.constant 0.0 : !acc
      %zero_pair = arith.constant dense<0.0> : !pair
      %chunks_at_once = arith.constant #chunks_at_once
      %centres = arith.constant #centres
      %has_dy2 = arith.constant #has_dy2
      %has_dy3 = arith.constant #has_dy3
      %has_dy4 = arith.constant #has_dy4
      %from_output = arith.constant #from_output
      %adds_bias = arith.constant #adds_bias
      %zeros = arith.constant dense<0.0> : !chunk

      %m_i32 = hal.interface.constant.load layout(#row_sums_layout) ordinal(0) : i32
      %m = arith.index_castui %m_i32 : i32 to index
      // with sets: %sets_i32 = hal.interface.constant.load layout(#row_sums_layout) ordinal(1) : i32
      // with sets: %sets = arith.index_castui %sets_i32 : i32 to index
      // with sets: %rows_per_set_i32 = hal.interface.constant.load layout(#row_sums_layout) ordinal(2) : i32
      // with sets: %rows_per_set = arith.index_castui %rows_per_set_i32 : i32 to index
      // with sets: %one = arith.constant 1 : index
      // with sets: %end_row = arith.subi %m, %one : index
      // with sets: %row_id = hal.interface.workgroup.id[0] : index
      // with sets: %set_row = arith.subi %end_row, %row_id : index
      // with sets: %set = func.call @row_set(%set_row, %sets, %rows_per_set) : (index, index, index) -> index
      // with sets: %gamma_bytes = arith.constant #gamma_bytes
      // with sets: %gamma_at = arith.muli %set, %gamma_bytes : index
      // with sets: %beta_bytes = arith.constant #beta_bytes
      // with sets: %beta_at = arith.muli %set, %beta_bytes : index
      %dy = hal.interface.binding.subspan layout(#row_sums_layout) binding(0) alignment(64) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      %x = hal.interface.binding.subspan layout(#row_sums_layout) binding(1) alignment(64) offset(%c0) flags(ReadOnly) : !x_rows{%m}
      %mean = hal.interface.binding.subspan layout(#row_sums_layout) binding(2) alignment(64) offset(%c0) flags(ReadOnly) : !acc_column{%m}
      %rstd = hal.interface.binding.subspan layout(#row_sums_layout) binding(3) alignment(64) offset(%c0) flags(ReadOnly) : !acc_column{%m}
      %gamma = hal.interface.binding.subspan layout(#row_sums_layout) binding(4) alignment(64) offset(%c0) flags(ReadOnly) : !gamma_row  // without sets
      // with sets: %gamma = hal.interface.binding.subspan layout(#row_sums_layout) binding(4) alignment(64) offset(%gamma_at) flags(ReadOnly) : !gamma_row
      %beta = hal.interface.binding.subspan layout(#row_sums_layout) binding(5) alignment(64) offset(%c0) flags(ReadOnly) : !beta_row  // without sets
      // with sets: %beta = hal.interface.binding.subspan layout(#row_sums_layout) binding(5) alignment(64) offset(%beta_at) flags(ReadOnly) : !beta_row
      %dy2 = hal.interface.binding.subspan layout(#row_sums_layout) binding(6) alignment(64) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      %dy3 = hal.interface.binding.subspan layout(#row_sums_layout) binding(7) alignment(64) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      %dy4 = hal.interface.binding.subspan layout(#row_sums_layout) binding(8) alignment(64) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      // With a gate:
      %z = hal.interface.binding.subspan layout(#row_sums_layout) binding(9) alignment(64) offset(%c0) flags(ReadOnly) : !z_rows{%m}
      // End of the gate.
      %sum_h = hal.interface.binding.subspan layout(#row_sums_layout) binding(10) alignment(64) offset(%c0) : !acc_column{%m}
      %sum_hx = hal.interface.binding.subspan layout(#row_sums_layout) binding(11) alignment(64) offset(%c0) : !acc_column{%m}

      // Workgroups go from the last row to the first, so that the cache still holds the rows that @columns
      // begins with.
      %workgroup = hal.interface.workgroup.id[0] : index
      %c1 = arith.constant 1 : index
      %c2 = arith.constant 2 : index
      %last = arith.subi %m, %c1 : index
      %row = arith.subi %last, %workgroup : index
      %t = gpu.thread_id x
      %lane = arith.remui %t, %lanes : index
      %warp = arith.divui %t, %lanes : index
      %leads = arith.cmpi eq, %lane, %c0 : index
      %exchange = memref.alloc() : !exchange  // [1, 1, warps, (h, h * xhat)]
      %mean_row = memref.load %mean[%row] : !acc_column
      %rstd_row = memref.load %rstd[%row] : !acc_column

      // All loads of a step are issued before the first is waited for. For a chunk past the end of the
      // row, the row's first chunk is read, and is not added.
      %dy_read = memref.alloca() : !dy_read
      %more_read = memref.alloca() : !more_dy_read
      %x_read = memref.alloca() : !x_read
      %gamma_read = memref.alloca() : !gamma_read
      %beta_read = memref.alloca() : !beta_read
      // With a gate:
      %z_read = memref.alloca() : !z_read
      // End of the gate.
      %first = arith.muli %t, %v : index
      %neighbours = arith.muli %t_count, %v : index
      %stride = arith.muli %neighbours, %chunks_at_once : index
      // with strides: %dy_strided = func.call @row_of_dy(%dy, %row) : (!dy_rows, index) -> !dy_rows
      // with strides: %dy2_strided = func.call @row_of_dy(%dy2, %row) : (!dy_rows, index) -> !dy_rows
      // with strides: %dy3_strided = func.call @row_of_dy(%dy3, %row) : (!dy_rows, index) -> !dy_rows
      // with strides: %dy4_strided = func.call @row_of_dy(%dy4, %row) : (!dy_rows, index) -> !dy_rows
      // with strides: %x_strided = func.call @row_of_x(%x, %row) : (!x_rows, index) -> !x_rows
      %sums:2 = scf.for %col_first = %first to %n step %stride iter_args(%h_sum = %zeros, %hx_sum = %zeros) -> (!chunk, !chunk) {
        scf.for %k = %c0 to %chunks_at_once step %c1 {
          %col, %inside = func.call @column(%k, %col_first) : (index, index) -> (index, i1)
          %col_in = arith.select %inside, %col, %c0 : index
          %dy_k = vector.load %dy[%row, %col_in] : !dy_rows, !dy_chunk
          %x_k = vector.load %x[%row, %col_in] : !x_rows, !x_chunk
          %gamma_k = vector.load %gamma[%col_in] : !gamma_row, !gamma_chunk
          memref.store %dy_k, %dy_read[%k] : !dy_read
          // With a gate:
          // with strides: %z_strided = func.call @row_of_z(%z, %row) : (!z_rows, index) -> !z_rows
          %z_k = vector.load %z[%row, %col_in] : !z_rows, !z_chunk
          memref.store %z_k, %z_read[%k] : !z_read
          // End of the gate.
          scf.if %has_dy2 {
            %dy2_k = vector.load %dy2[%row, %col_in] : !dy_rows, !dy_chunk
            memref.store %dy2_k, %more_read[%c0, %k] : !more_dy_read
          }
          scf.if %has_dy3 {
            %dy3_k = vector.load %dy3[%row, %col_in] : !dy_rows, !dy_chunk
            memref.store %dy3_k, %more_read[%c1, %k] : !more_dy_read
          }
          scf.if %has_dy4 {
            %dy4_k = vector.load %dy4[%row, %col_in] : !dy_rows, !dy_chunk
            memref.store %dy4_k, %more_read[%c2, %k] : !more_dy_read
          }
          memref.store %x_k, %x_read[%k] : !x_read
          memref.store %gamma_k, %gamma_read[%k] : !gamma_read
          scf.if %adds_bias {
            %beta_k = vector.load %beta[%col_in] : !beta_row, !beta_chunk
            memref.store %beta_k, %beta_read[%k] : !beta_read
          }
        } {llvm.loop_annotation = #unrolled}
        %h_step, %hx_step = scf.for %k = %c0 to %chunks_at_once step %c1
            iter_args(%h_before = %h_sum, %hx_before = %hx_sum) -> (!chunk, !chunk) {
          %col, %inside = func.call @column(%k, %col_first) : (index, index) -> (index, i1)
          %dy_k = memref.load %dy_read[%k] : !dy_read
          %x_k = memref.load %x_read[%k] : !x_read
          %gamma_k = memref.load %gamma_read[%k] : !gamma_read
          %dya_1 = func.call @widen_of_dy(%dy_k) : (!dy_chunk) -> !chunk
          %dy2_k = memref.load %more_read[%c0, %k] : !more_dy_read
          %dya_2 = func.call @plus_dy(%dya_1, %dy2_k, %has_dy2) : (!chunk, !dy_chunk, i1) -> !chunk
          %dy3_k = memref.load %more_read[%c1, %k] : !more_dy_read
          %dya_3 = func.call @plus_dy(%dya_2, %dy3_k, %has_dy3) : (!chunk, !dy_chunk, i1) -> !chunk
          %dy4_k = memref.load %more_read[%c2, %k] : !more_dy_read
          %dya = func.call @plus_dy(%dya_3, %dy4_k, %has_dy4) : (!chunk, !dy_chunk, i1) -> !chunk
          %xa = func.call @widen_of_x(%x_k) : (!x_chunk) -> !chunk
          // With a gate:
          %z_k = memref.load %z_read[%k] : !z_read
          %za = func.call @widen_of_z(%z_k) : (!z_chunk) -> !chunk
          %silu, %slope = func.call @silu_of_z(%za) : (!chunk) -> (!chunk, !chunk)
          %xa_gated = func.call @gated_input(%xa, %silu) : (!chunk, !chunk) -> !chunk
          %dya_gated = func.call @gated_gradient(%dya, %silu) : (!chunk, !chunk) -> !chunk
          // End of the gate.
          %gamma_wide = func.call @widen_of_gamma(%gamma_k) : (!gamma_chunk) -> !chunk
          %ga = func.call @weight(%gamma_wide) : (!chunk) -> !chunk
          %bias = scf.if %adds_bias -> !chunk {
            %beta_k = memref.load %beta_read[%k] : !beta_read
            %beta_wide = func.call @widen_of_beta(%beta_k) : (!beta_chunk) -> !chunk
            scf.yield %beta_wide : !chunk
          } else {
            scf.yield %zeros : !chunk
          }
          %divisor = func.call @away_from_zero(%ga) : (!chunk) -> !chunk
          %inverse = func.call @reciprocal(%divisor) : (!chunk) -> !chunk
          %of_y = func.call @xhat_from_output(%xa, %bias, %inverse) : (!chunk, !chunk, !chunk) -> !chunk
          %of_x = func.call @xhat(%xa, %mean_row, %rstd_row) : (!chunk, !acc, !acc) -> !chunk
          %xhat = arith.select %from_output, %of_y, %of_x : !chunk
          %h = arith.mulf %dya, %ga : !chunk
          %h_more = arith.addf %h_before, %h : !chunk
          %hx_more = math.fma %h, %xhat, %hx_before : !chunk
          %h_counts = arith.andi %inside, %centres : i1
          %h_after = arith.select %h_counts, %h_more, %h_before : !chunk
          %hx_after = arith.select %inside, %hx_more, %hx_before : !chunk
          scf.yield %h_after, %hx_after : !chunk, !chunk
        } {llvm.loop_annotation = #unrolled}
        scf.yield %h_step, %hx_step : !chunk, !chunk
      }
      %thread_h = vector.reduction <add>, %sums#0 fastmath<reassoc> : !chunk into !acc
      %thread_hx = vector.reduction <add>, %sums#1 fastmath<reassoc> : !chunk into !acc
      %warp_h = scf.if %centres -> !acc {
        %subgroup_h = gpu.subgroup_reduce add %thread_h cluster(size = 32) : (!acc) -> !acc
        scf.yield %subgroup_h : !acc
      } else {
        scf.yield %zero : !acc
      }
      %warp_hx = gpu.subgroup_reduce add %thread_hx cluster(size = 32) : (!acc) -> !acc
      %warp_pair = vector.from_elements %warp_h, %warp_hx : !pair
      scf.if %leads {
        vector.store %warp_pair, %exchange[%c0, %c0, %warp, %c0] : !exchange, !pair
      }
      gpu.barrier
      %is_first = arith.cmpi eq, %t, %c0 : index
      scf.if %is_first {
        %pairs = vector.transfer_read %exchange[%c0, %c0, %c0, %c0], %zero {in_bounds = [true, true]} : !exchange, !warp_sums
        %pair = vector.multi_reduction <add>, %pairs, %zero_pair [0] : !warp_sums to !pair
        %row_h = vector.extract %pair[0] : !acc from !pair
        %row_hx = vector.extract %pair[1] : !acc from !pair
        scf.if %centres {
          memref.store %row_h, %sum_h[%row] : !acc_column
        }
        memref.store %row_hx, %sum_hx[%row] : !acc_column
      }
      return
    }
  }
}

hal.executable.source private @columns {
  hal.executable.export public @columns ordinal(0) layout(#columns_layout)
      count(%device: !hal.device, %m: index) -> (index, index, index) {
    %x = affine.min #columns_x()[%m]
    %y = affine.min #columns_y()[%m]
    %one = arith.constant 1 : index
    hal.return %x, %y, %one : index, index, index
  }
  builtin.module {
    // From ir/math/.
    // with sets: func.func private @count_set_rows(index, index, index, index) -> index
    // with sets: func.func private @set_row(index, index, index, index) -> index
    // with strides: func.func private @row_of_dy(!dy_rows, index) -> !dy_rows
    // with strides: func.func private @row_of_x(!x_rows, index) -> !x_rows
    // with strides: func.func private @row_of_residual(!residual_rows, index) -> !residual_rows
    func.func private @widen_of_dy(!dy_chunk) -> !chunk
    func.func private @round_apart_of_dy_sum(!chunk) -> !dy_sum_chunk
    func.func private @widen_of_dy_sum(!dy_sum_chunk) -> !chunk
    func.func private @widen_of_x(!x_chunk) -> !chunk
    func.func private @widen_of_gamma(!gamma_chunk) -> !chunk
    func.func private @widen_of_beta(!beta_chunk) -> !chunk
    func.func private @weight(!chunk) -> !chunk
    func.func private @away_from_zero(!chunk) -> !chunk
    func.func private @reciprocal(!chunk) -> !chunk
    func.func private @xhat(!chunk, !acc, !acc) -> !chunk
    func.func private @xhat_from_output(!chunk, !chunk, !chunk) -> !chunk
    func.func private @dx(!chunk, !chunk, !acc, !acc, !acc) -> !chunk
    func.func private @widen_of_residual(!residual_chunk) -> !chunk
    func.func private @plus_residual(!chunk, !chunk) -> !chunk
    func.func private @round_of_x(!chunk) -> !x_chunk
    // with copies: func.func private @round_of_copy(!chunk) -> !copy_chunk
    // with copies: // with strides: func.func private @row_of_copy(!copy_rows, index) -> !copy_rows
    // With a gate:
    // with strides: func.func private @row_of_z(!z_rows, index) -> !z_rows
    func.func private @widen_of_z(!z_chunk) -> !chunk
    func.func private @silu_of_z(!chunk) -> (!chunk, !chunk)
    func.func private @gated_input(!chunk, !chunk) -> !chunk
    func.func private @gated_gradient(!chunk, !chunk) -> !chunk
    func.func private @gated_dx(!chunk, !chunk) -> !chunk
    func.func private @y(!chunk, !chunk, !chunk) -> !chunk
    func.func private @dz(!chunk, !chunk, !chunk) -> !chunk
    func.func private @round_of_z(!chunk) -> !z_chunk
    // End of the gate.

    // A sum of gradients of the output and one more, rounded as an addition rounds it.
    func.func private @plus_dy(%sum: !chunk, %more: !dy_chunk, %counts: i1) -> !chunk {
      %after = scf.if %counts -> !chunk {
        %wide = func.call @widen_of_dy(%more) : (!dy_chunk) -> !chunk
        %exact = arith.addf %sum, %wide : !chunk
        %rounded = func.call @round_apart_of_dy_sum(%exact) : (!chunk) -> !dy_sum_chunk
        %both = func.call @widen_of_dy_sum(%rounded) : (!dy_sum_chunk) -> !chunk
        scf.yield %both : !chunk
      } else {
        scf.yield %sum : !chunk
      }
      return %after : !chunk
    }

    func.func @columns() attributes {translation_info = #two_pass_kernel, nvvm.minctasm = #resident} {
      %c0 = arith.constant 0 : index
      %n = arith.constant #columns
      %v = arith.constant #vector
      %t_count = arith.constant #threads
      %tile = arith.constant #tile
      %p = arith.constant #workgroups_index  // without sets
      %rows_at_once = arith.constant #rows_at_once
      %span_steps = arith.constant #span_steps
      %wants_dx = arith.constant #wants_dx
      %sums_dbeta = arith.constant #sums_dbeta
      %has_dy2 = arith.constant #has_dy2
      %has_dy3 = arith.constant #has_dy3
      %has_dy4 = arith.constant #has_dy4
      %from_output = arith.constant #from_output
      %adds_bias = arith.constant #adds_bias
      %c1 = arith.constant 1 : index
      %zeros = arith.constant dense<0.0> : !chunk

      %m_i32 = hal.interface.constant.load layout(#columns_layout) ordinal(0) : i32
      %m = arith.index_castui %m_i32 : i32 to index
      // with sets: %sets_i32 = hal.interface.constant.load layout(#columns_layout) ordinal(1) : i32
      // with sets: %sets = arith.index_castui %sets_i32 : i32 to index
      // with sets: %rows_per_set_i32 = hal.interface.constant.load layout(#columns_layout) ordinal(2) : i32
      // with sets: %rows_per_set = arith.index_castui %rows_per_set_i32 : i32 to index
      // with sets: %all_walkers = hal.interface.workgroup.count[0] : index
      // with sets: %p = arith.divui %all_walkers, %sets : index
      // with sets: %id = hal.interface.workgroup.id[0] : index
      // with sets: %set = arith.divui %id, %p : index
      // with sets: %own_id = arith.remui %id, %p : index
      // with sets: %set_rows = func.call @count_set_rows(%m, %set, %sets, %rows_per_set) : (index, index, index, index) -> index
      // with sets: %gamma_bytes = arith.constant #gamma_bytes
      // with sets: %gamma_at = arith.muli %set, %gamma_bytes : index
      // with sets: %beta_bytes = arith.constant #beta_bytes
      // with sets: %beta_at = arith.muli %set, %beta_bytes : index
      %dy = hal.interface.binding.subspan layout(#columns_layout) binding(0) alignment(64) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      %x = hal.interface.binding.subspan layout(#columns_layout) binding(1) alignment(64) offset(%c0) flags(ReadOnly) : !x_rows{%m}
      %mean = hal.interface.binding.subspan layout(#columns_layout) binding(2) alignment(64) offset(%c0) flags(ReadOnly) : !acc_column{%m}
      %rstd = hal.interface.binding.subspan layout(#columns_layout) binding(3) alignment(64) offset(%c0) flags(ReadOnly) : !acc_column{%m}
      %gamma = hal.interface.binding.subspan layout(#columns_layout) binding(4) alignment(64) offset(%c0) flags(ReadOnly) : !gamma_row  // without sets
      // with sets: %gamma = hal.interface.binding.subspan layout(#columns_layout) binding(4) alignment(64) offset(%gamma_at) flags(ReadOnly) : !gamma_row
      %sum_h = hal.interface.binding.subspan layout(#columns_layout) binding(5) alignment(64) offset(%c0) flags(ReadOnly) : !acc_column{%m}
      %sum_hx = hal.interface.binding.subspan layout(#columns_layout) binding(6) alignment(64) offset(%c0) flags(ReadOnly) : !acc_column{%m}
      %dresidual = hal.interface.binding.subspan layout(#columns_layout) binding(7) alignment(64) offset(%c0) flags(ReadOnly) : !residual_rows{%m}
      %beta = hal.interface.binding.subspan layout(#columns_layout) binding(8) alignment(64) offset(%c0) flags(ReadOnly) : !beta_row  // without sets
      // with sets: %beta = hal.interface.binding.subspan layout(#columns_layout) binding(8) alignment(64) offset(%beta_at) flags(ReadOnly) : !beta_row
      %dy2 = hal.interface.binding.subspan layout(#columns_layout) binding(9) alignment(64) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      %dy3 = hal.interface.binding.subspan layout(#columns_layout) binding(10) alignment(64) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      %dy4 = hal.interface.binding.subspan layout(#columns_layout) binding(11) alignment(64) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      // With a gate:
      %z = hal.interface.binding.subspan layout(#columns_layout) binding(12) alignment(64) offset(%c0) flags(ReadOnly) : !z_rows{%m}
      %dz = hal.interface.binding.subspan layout(#columns_layout) binding(16) alignment(64) offset(%c0) : !z_rows{%m}
      %gates_first = arith.constant #gates_first
      %wants_dz = arith.constant #wants_dz
      // End of the gate.
      %dx = hal.interface.binding.subspan layout(#columns_layout) binding(13) alignment(64) offset(%c0) : !x_rows{%m}
      // with copies: %dx_copy = hal.interface.binding.subspan layout(#columns_layout) binding(17) alignment(64) offset(%c0) : !copy_rows{%m}
      %walkers = hal.interface.workgroup.count[1] : index  // without sets
      // with sets: %walkers = hal.interface.workgroup.count[0] : index
      %dgamma_partials = hal.interface.binding.subspan layout(#columns_layout) binding(14) alignment(64) offset(%c0) : !acc_rows{%walkers}
      %dbeta_partials = hal.interface.binding.subspan layout(#columns_layout) binding(15) alignment(64) offset(%c0) : !acc_rows{%walkers}
      // with totals: %dx_partials = hal.interface.binding.subspan layout(#columns_layout) binding(18) alignment(64) offset(%c0) : !acc_rows{%walkers}
      // with totals: %dx_sums = memref.alloca() : !one_held

      %j = hal.interface.workgroup.id[0] : index  // without sets
      // with sets: %j = hal.interface.workgroup.id[1] : index
      %walker = hal.interface.workgroup.id[1] : index  // without sets
      // with sets: %walker = hal.interface.workgroup.id[0] : index
      %t = gpu.thread_id x
      %base = arith.muli %j, %tile : index
      // A thread past the end of the row reads the row's first chunk, and stores nothing.
      %offset = arith.muli %t, %v : index
      %col = arith.addi %base, %offset : index
      %inside = arith.cmpi ult, %col, %n : index
      %col_in = arith.select %inside, %col, %c0 : index
      %gamma_ = vector.load %gamma[%col_in] : !gamma_row, !gamma_chunk
      %gamma_wide = func.call @widen_of_gamma(%gamma_) : (!gamma_chunk) -> !chunk
      %ga = func.call @weight(%gamma_wide) : (!chunk) -> !chunk
      %divisor = func.call @away_from_zero(%ga) : (!chunk) -> !chunk
      %inverse = func.call @reciprocal(%divisor) : (!chunk) -> !chunk
      %bias = scf.if %adds_bias -> !chunk {
        %beta_ = vector.load %beta[%col_in] : !beta_row, !beta_chunk
        %beta_wide = func.call @widen_of_beta(%beta_) : (!beta_chunk) -> !chunk
        scf.yield %beta_wide : !chunk
      } else {
        scf.yield %zeros : !chunk
      }

      %first = arith.muli %walker, %rows_at_once : index  // without sets
      // with sets: %first = arith.muli %own_id, %rows_at_once : index
      %stride = arith.muli %p, %rows_at_once : index
      %last = arith.subi %m, %c1 : index  // without sets
      // with sets: %last = arith.subi %set_rows, %c1 : index
      scf.if %inside {
        vector.store %zeros, %dgamma_partials[%walker, %col] : !acc_rows, !chunk
        // with totals: vector.store %zeros, %dx_partials[%walker, %col] : !acc_rows, !chunk
        scf.if %sums_dbeta {
          vector.store %zeros, %dbeta_partials[%walker, %col] : !acc_rows, !chunk
        }
      }
      %span = arith.muli %stride, %span_steps : index
      scf.for %span_first = %first to %m step %span {  // without sets
      // with sets: scf.for %span_first = %first to %set_rows step %span {
        %span_after = arith.addi %span_first, %span : index
        %span_end = arith.minui %span_after, %m : index  // without sets
        // with sets: %span_end = arith.minui %span_after, %set_rows : index
        // with totals: memref.store %zeros, %dx_sums[%c0] : !one_held
        %sums:2 = scf.for %row_first = %span_first to %span_end step %stride
            iter_args(%dgamma_sum = %zeros, %dbeta_sum = %zeros) -> (!chunk, !chunk) {
          %dgamma_step, %dbeta_step = scf.for %k = %c0 to %rows_at_once step %c1
              iter_args(%dgamma_before = %dgamma_sum, %dbeta_before = %dbeta_sum) -> (!chunk, !chunk) {
            // For a row past the end, the last row is read, and is not added.
            %row = arith.addi %row_first, %k : index  // without sets
            // with sets: %own_row = arith.addi %row_first, %k : index
            %live = arith.cmpi ule, %row, %last : index  // without sets
            // with sets: %live = arith.cmpi ule, %own_row, %last : index
            %row_in = arith.minui %row, %last : index  // without sets
            // with sets: %own_row_in = arith.minui %own_row, %last : index
            // with sets: %row_in = func.call @set_row(%own_row_in, %set, %sets, %rows_per_set) : (index, index, index, index) -> index
            // with strides: %dy_strided = func.call @row_of_dy(%dy, %row_in) : (!dy_rows, index) -> !dy_rows
            // with strides: %dy2_strided = func.call @row_of_dy(%dy2, %row_in) : (!dy_rows, index) -> !dy_rows
            // with strides: %dy3_strided = func.call @row_of_dy(%dy3, %row_in) : (!dy_rows, index) -> !dy_rows
            // with strides: %dy4_strided = func.call @row_of_dy(%dy4, %row_in) : (!dy_rows, index) -> !dy_rows
            // with strides: %x_strided = func.call @row_of_x(%x, %row_in) : (!x_rows, index) -> !x_rows
            // with strides: %dresidual_strided = func.call @row_of_residual(%dresidual, %row_in) : (!residual_rows, index) -> !residual_rows
            // with strides: %dx_strided = func.call @row_of_x(%dx, %row_in) : (!x_rows, index) -> !x_rows
            // with copies: // with strides: %dx_copy_strided = func.call @row_of_copy(%dx_copy, %row_in) : (!copy_rows, index) -> !copy_rows
            %dy_k = vector.load %dy[%row_in, %col_in] : !dy_rows, !dy_chunk
            %x_k = vector.load %x[%row_in, %col_in] : !x_rows, !x_chunk
            %mean_row = memref.load %mean[%row_in] : !acc_column
            %rstd_row = memref.load %rstd[%row_in] : !acc_column
            %row_h = memref.load %sum_h[%row_in] : !acc_column
            %row_hx = memref.load %sum_hx[%row_in] : !acc_column
            %dya_1 = func.call @widen_of_dy(%dy_k) : (!dy_chunk) -> !chunk
            %dy2_k = vector.load %dy2[%row_in, %col_in] : !dy_rows, !dy_chunk
            %dya_2 = func.call @plus_dy(%dya_1, %dy2_k, %has_dy2) : (!chunk, !dy_chunk, i1) -> !chunk
            %dy3_k = vector.load %dy3[%row_in, %col_in] : !dy_rows, !dy_chunk
            %dya_3 = func.call @plus_dy(%dya_2, %dy3_k, %has_dy3) : (!chunk, !dy_chunk, i1) -> !chunk
            %dy4_k = vector.load %dy4[%row_in, %col_in] : !dy_rows, !dy_chunk
            %dya = func.call @plus_dy(%dya_3, %dy4_k, %has_dy4) : (!chunk, !dy_chunk, i1) -> !chunk
            %xa = func.call @widen_of_x(%x_k) : (!x_chunk) -> !chunk
            // With a gate:
            // with strides: %z_strided = func.call @row_of_z(%z, %row_in) : (!z_rows, index) -> !z_rows
            // with strides: %dz_strided = func.call @row_of_z(%dz, %row_in) : (!z_rows, index) -> !z_rows
            %z_k = vector.load %z[%row_in, %col_in] : !z_rows, !z_chunk
            %za = func.call @widen_of_z(%z_k) : (!z_chunk) -> !chunk
            %silu, %slope = func.call @silu_of_z(%za) : (!chunk) -> (!chunk, !chunk)
            %dy_or_x = arith.select %gates_first, %xa, %dya : !chunk
            %xa_gated = func.call @gated_input(%xa, %silu) : (!chunk, !chunk) -> !chunk
            %dya_gated = func.call @gated_gradient(%dya, %silu) : (!chunk, !chunk) -> !chunk
            // End of the gate.
            %of_y = func.call @xhat_from_output(%xa, %bias, %inverse) : (!chunk, !chunk, !chunk) -> !chunk
            %of_x = func.call @xhat(%xa, %mean_row, %rstd_row) : (!chunk, !acc, !acc) -> !chunk
            %xhat = arith.select %from_output, %of_y, %of_x : !chunk
            %h = arith.mulf %dya, %ga : !chunk
            %dxa = func.call @dx(%h, %xhat, %rstd_row, %row_h, %row_hx) : (!chunk, !chunk, !acc, !acc, !acc) -> !chunk
            %dresidual_k = vector.load %dresidual[%row_in, %col_in] : !residual_rows, !residual_chunk
            %dresidual_a = func.call @widen_of_residual(%dresidual_k) : (!residual_chunk) -> !chunk
            %dx_sum = func.call @plus_residual(%dxa, %dresidual_a) : (!chunk, !chunk) -> !chunk
            // With a gate:
            %n_k = func.call @y(%xhat, %ga, %bias) : (!chunk, !chunk, !chunk) -> !chunk
            %n_or_dv = arith.select %gates_first, %dx_sum, %n_k : !chunk
            %dza = func.call @dz(%dy_or_x, %slope, %n_or_dv) : (!chunk, !chunk, !chunk) -> !chunk
            %dz_k = func.call @round_of_z(%dza) : (!chunk) -> !z_chunk
            %has_cells = arith.andi %inside, %live : i1
            %stores_dz = arith.andi %has_cells, %wants_dz : i1
            scf.if %stores_dz {
              vector.store %dz_k, %dz[%row, %col] : !z_rows, !z_chunk  // without sets
              // with sets: vector.store %dz_k, %dz[%row_in, %col] : !z_rows, !z_chunk
            }
            %dx_sum_gated = func.call @gated_dx(%dx_sum, %silu) : (!chunk, !chunk) -> !chunk
            // End of the gate.
            %dx_k = func.call @round_of_x(%dx_sum) : (!chunk) -> !x_chunk
            %exists = arith.andi %inside, %live : i1
            %stores = arith.andi %exists, %wants_dx : i1
            // with copies: %copy_k = func.call @round_of_copy(%dx_sum) : (!chunk) -> !copy_chunk
            scf.if %stores {
              vector.store %dx_k, %dx[%row, %col] : !x_rows, !x_chunk  // without sets
              // with sets: vector.store %dx_k, %dx[%row_in, %col] : !x_rows, !x_chunk
              // with copies: vector.store %copy_k, %dx_copy[%row_in, %col] : !copy_rows, !copy_chunk
            }
            %dgamma_more = math.fma %dya, %xhat, %dgamma_before : !chunk
            %dbeta_more = arith.addf %dbeta_before, %dya : !chunk
            %dgamma_after = arith.select %live, %dgamma_more, %dgamma_before : !chunk
            // with totals: %dx_before = memref.load %dx_sums[%c0] : !one_held
            // with totals: %dx_more = arith.addf %dx_before, %dx_sum : !chunk
            // with totals: %dx_after = arith.select %live, %dx_more, %dx_before : !chunk
            // with totals: memref.store %dx_after, %dx_sums[%c0] : !one_held
            %dbeta_counts = arith.andi %live, %sums_dbeta : i1
            %dbeta_after = arith.select %dbeta_counts, %dbeta_more, %dbeta_before : !chunk
            scf.yield %dgamma_after, %dbeta_after : !chunk, !chunk
          } {llvm.loop_annotation = #unrolled}
          scf.yield %dgamma_step, %dbeta_step : !chunk, !chunk
        }
        scf.if %inside {
          %dgamma_before = vector.load %dgamma_partials[%walker, %col] : !acc_rows, !chunk
          %dgamma_after = arith.addf %dgamma_before, %sums#0 : !chunk
          vector.store %dgamma_after, %dgamma_partials[%walker, %col] : !acc_rows, !chunk
          // with totals: %dx_of_span = memref.load %dx_sums[%c0] : !one_held
          // with totals: %dx_of_others = vector.load %dx_partials[%walker, %col] : !acc_rows, !chunk
          // with totals: %dx_of_both = arith.addf %dx_of_others, %dx_of_span : !chunk
          // with totals: vector.store %dx_of_both, %dx_partials[%walker, %col] : !acc_rows, !chunk
          scf.if %sums_dbeta {
            %dbeta_before = vector.load %dbeta_partials[%walker, %col] : !acc_rows, !chunk
            %dbeta_after = arith.addf %dbeta_before, %sums#1 : !chunk
            vector.store %dbeta_after, %dbeta_partials[%walker, %col] : !acc_rows, !chunk
          }
        }
      }
      return
    }
  }
}
