// Layer normalization, backward, of few rows on a GPU: one kernel, and no partial rows.
//
// x and dy have M rows of N columns. With few rows there is little to read. The time goes into the start
// of a kernel, one trip to memory, and the code itself, which is not in the instruction cache at first.
//
// Two kinds of workgroups run side by side and do not wait for each other. Each of the first workgroups
// owns a tile of neighbouring columns, and sums dgamma and dbeta of these columns over all rows. Each of
// the other workgroups computes the dx of one row. So x and dy are read twice, the second time from the
// L2 cache. There are no atomics, so the bits are the same every time.
//
// From the forward's output (#from_output), x is that output, and xhat is (x - beta) / g.
//
// In a row, a workgroup's T threads take chunks of V neighbouring columns, as in one_pass.mlir. In a tile,
// the rows are divided into S slices: slice s has the rows s, s + S, s + 2S, ... The threads of a slice
// are neighbours, and take neighbouring columns of one row.

// What a NormSpec and a Schedule decide. These lines are replaced; the rest changes only by the rules
// of README.md.
!dy = bf16
!x = bf16
!gamma = bf16
!beta = bf16
!residual = bf16
!z = bf16
!acc = f32
!dy_sum = bf16               // of sums of gradients of the output
#columns = 4096 : index      // N
#few_vector = 8 : index          // V
#subgroup = 32 : index
#few_threads = 512 : index   // T
#few_chunks = 1 : index      // of a row that a thread owns
#tiles = 128 : index
#tile = 32 : index           // columns of a tile
#tile_vector = 4 : index     // neighbouring columns of a tile that a thread takes
#tile_slices = 64 : index    // S
#centres = true              // false for RMS normalization: the mean is not subtracted
#sums_dbeta = true           // there is a dbeta
#adds_residual = false       // a gradient that came back past the norm is added to dx
#has_dy2 = false             // the output has a second gradient, which is added to dy
#has_dy3 = false
#has_dy4 = false
#from_output = false         // x is the forward's output
#adds_bias = false           // it has a beta in it
#gates_first = false         // the gate is before the norm
#wants_dx = true             // the caller asks for dx
#wants_dz = true             // the caller asks for dz
#least_weight = 1.0e-5 : !acc
#few_rows_kernel = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline workgroup_size = [512, 1, 1] subgroup_size = 32>
!dy_rows = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>
!x_rows = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!residual_rows = memref<?x4096x!residual, #hal.descriptor_type<storage_buffer>>
!z_rows = memref<?x4096x!z, #hal.descriptor_type<storage_buffer>>
!acc_column = memref<?x!acc, #hal.descriptor_type<storage_buffer>>
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!few_exchange = memref<16x2x!acc, #gpu.address_space<workgroup>>
!few_warp_sums = vector<16x2x!acc>
!tile_sums = memref<2x64x36x!acc, #gpu.address_space<workgroup>>  // a little wider: no bank conflicts
!few_dy_chunk = vector<8x!dy>
!few_dy_sum_chunk = vector<8x!dy_sum>
!few_x_chunk = vector<8x!x>
!few_gamma_chunk = vector<8x!gamma>
!few_beta_chunk = vector<8x!beta>
!few_residual_chunk = vector<8x!residual>
!few_z_chunk = vector<8x!z>
!few_chunk = vector<8x!acc>
!few_dy = memref<1x!few_dy_chunk, #gpu.address_space<private>>  // a thread's chunks of a row, in registers
!few_more_dy = memref<3x1x!few_dy_chunk, #gpu.address_space<private>>  // likewise: of the other gradients
!few_x = memref<1x!few_x_chunk, #gpu.address_space<private>>
!few_gamma = memref<1x!few_gamma_chunk, #gpu.address_space<private>>
!few_beta = memref<1x!few_beta_chunk, #gpu.address_space<private>>
!few_residual = memref<1x!few_residual_chunk, #gpu.address_space<private>>
!few_z = memref<1x!few_z_chunk, #gpu.address_space<private>>
!few_held = memref<1x!few_chunk, #gpu.address_space<private>>
!dy_cells = vector<4x!dy>    // a thread's columns of a tile
!dy_sum_cells = vector<4x!dy_sum>
!x_cells = vector<4x!x>
!gamma_cells = vector<4x!gamma>
!beta_cells = vector<4x!beta>
!z_cells = vector<4x!z>
!cells = vector<4x!acc>
!gamma_cell = vector<1x!gamma>
!beta_cell = vector<1x!beta>
!cell = vector<1x!acc>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
// The launch, as iree_lnbwd/vmfb/launches.py states it: the bindings, and the workgroups for M rows, the least
// number of a list.
#few_rows_layout = #hal.pipeline.layout<constants = 1, bindings = [
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dy [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // x [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // mean [M]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // rstd [M]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // gamma [N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dresidual [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // beta [N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dy2 [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dy3 [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dy4 [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // z [M, N]
  #hal.pipeline.binding<storage_buffer>,            // dx [M, N]
  #hal.pipeline.binding<storage_buffer>,            // dgamma [N]
  #hal.pipeline.binding<storage_buffer>,            // dbeta [N]
  #hal.pipeline.binding<storage_buffer>,            // dz [M, N]
  #hal.pipeline.binding<storage_buffer>             // copy of dx [M, N]
]>
#few_rows_x = affine_map<()[m] -> (m ceildiv 1 + 128)>
// End of what is replaced.

!sum_pair = vector<2x!acc>

hal.executable.source private @few_rows {
  hal.executable.export public @few_rows ordinal(0) layout(#few_rows_layout)
      count(%device: !hal.device, %m: index) -> (index, index, index) {
    %x = affine.min #few_rows_x()[%m]
    %one = arith.constant 1 : index
    hal.return %x, %one, %one : index, index, index
  }
  builtin.module {
    // From ir/math/.
    // with strides: func.func private @row_of_dy(!dy_rows, index) -> !dy_rows
    // with strides: func.func private @row_of_x(!x_rows, index) -> !x_rows
    // with strides: func.func private @row_of_residual(!residual_rows, index) -> !residual_rows
    func.func private @widen_of_dy_cells(!dy_cells) -> !cells
    func.func private @round_apart_of_dy_sum_cells(!cells) -> !dy_sum_cells
    func.func private @widen_of_dy_sum_cells(!dy_sum_cells) -> !cells
    func.func private @widen_of_x_cells(!x_cells) -> !cells
    func.func private @widen_of_gamma_cells(!gamma_cells) -> !cells
    func.func private @widen_of_beta_cells(!beta_cells) -> !cells
    func.func private @weight_of_cells(!cells) -> !cells
    func.func private @away_from_zero_of_cells(!cells) -> !cells
    func.func private @reciprocal_of_cells(!cells) -> !cells
    func.func private @xhat_of_cells(!cells, !acc, !acc) -> !cells
    func.func private @xhat_from_output_of_cells(!cells, !cells, !cells) -> !cells
    func.func private @widen_of_dy(!few_dy_chunk) -> !few_chunk
    func.func private @round_apart_of_dy_sum(!few_chunk) -> !few_dy_sum_chunk
    func.func private @widen_of_dy_sum(!few_dy_sum_chunk) -> !few_chunk
    func.func private @widen_of_x(!few_x_chunk) -> !few_chunk
    func.func private @widen_of_gamma(!few_gamma_chunk) -> !few_chunk
    func.func private @widen_of_beta(!few_beta_chunk) -> !few_chunk
    func.func private @weight(!few_chunk) -> !few_chunk
    func.func private @away_from_zero(!few_chunk) -> !few_chunk
    func.func private @reciprocal(!few_chunk) -> !few_chunk
    func.func private @xhat(!few_chunk, !acc, !acc) -> !few_chunk
    func.func private @xhat_from_output(!few_chunk, !few_chunk, !few_chunk) -> !few_chunk
    func.func private @dx(!few_chunk, !few_chunk, !acc, !acc, !acc) -> !few_chunk
    func.func private @widen_of_residual(!few_residual_chunk) -> !few_chunk
    func.func private @plus_residual(!few_chunk, !few_chunk) -> !few_chunk
    func.func private @round_of_x(!few_chunk) -> !few_x_chunk
    // with copies: func.func private @round_of_copy(!few_chunk) -> !few_copy_chunk
    // with copies: // with strides: func.func private @row_of_copy(!copy_rows, index) -> !copy_rows
    func.func private @round_of_gamma(!cell) -> !gamma_cell
    func.func private @round_of_beta(!cell) -> !beta_cell
    // With a gate:
    // with strides: func.func private @row_of_z(!z_rows, index) -> !z_rows
    func.func private @widen_of_z_cells(!z_cells) -> !cells
    func.func private @silu_of_cells(!cells) -> (!cells, !cells)
    func.func private @gated_input_of_cells(!cells, !cells) -> !cells
    func.func private @gated_gradient_of_cells(!cells, !cells) -> !cells
    func.func private @widen_of_z(!few_z_chunk) -> !few_chunk
    func.func private @silu_of_z(!few_chunk) -> (!few_chunk, !few_chunk)
    func.func private @gated_input(!few_chunk, !few_chunk) -> !few_chunk
    func.func private @gated_gradient(!few_chunk, !few_chunk) -> !few_chunk
    func.func private @gated_dx(!few_chunk, !few_chunk) -> !few_chunk
    func.func private @y(!few_chunk, !few_chunk, !few_chunk) -> !few_chunk
    func.func private @dz(!few_chunk, !few_chunk, !few_chunk) -> !few_chunk
    func.func private @round_of_z(!few_chunk) -> !few_z_chunk
    // End of the gate.

    // A sum of gradients of the output and one more, rounded as an addition rounds it.
    func.func private @plus_dy_cells(%sum: !cells, %more: !dy_cells, %counts: i1) -> !cells {
      %after = scf.if %counts -> !cells {
        %wide = func.call @widen_of_dy_cells(%more) : (!dy_cells) -> !cells
        %exact = arith.addf %sum, %wide : !cells
        %rounded = func.call @round_apart_of_dy_sum_cells(%exact) : (!cells) -> !dy_sum_cells
        %both = func.call @widen_of_dy_sum_cells(%rounded) : (!dy_sum_cells) -> !cells
        scf.yield %both : !cells
      } else {
        scf.yield %sum : !cells
      }
      return %after : !cells
    }

    // A sum of gradients of the output and one more, rounded as an addition rounds it.
    func.func private @plus_dy(%sum: !few_chunk, %more: !few_dy_chunk, %counts: i1) -> !few_chunk {
      %after = scf.if %counts -> !few_chunk {
        %wide = func.call @widen_of_dy(%more) : (!few_dy_chunk) -> !few_chunk
        %exact = arith.addf %sum, %wide : !few_chunk
        %rounded = func.call @round_apart_of_dy_sum(%exact) : (!few_chunk) -> !few_dy_sum_chunk
        %both = func.call @widen_of_dy_sum(%rounded) : (!few_dy_sum_chunk) -> !few_chunk
        scf.yield %both : !few_chunk
      } else {
        scf.yield %sum : !few_chunk
      }
      return %after : !few_chunk
    }

    // The first column of thread t's chunk k, and whether the row has that chunk.
    func.func private @column(%k: index, %t: index) -> (index, i1) {
      %n = arith.constant #columns
      %v = arith.constant #few_vector
      %t_count = arith.constant #few_threads
      %before = arith.muli %k, %t_count : index
      %chunk = arith.addi %before, %t : index
      %col = arith.muli %chunk, %v : index
      %inside = arith.cmpi ult, %col, %n : index
      return %col, %inside : index, i1
    }

    func.func @few_rows() attributes {translation_info = #few_rows_kernel} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %n = arith.constant #columns
      %zero = arith.constant 0.0 : !acc
      %centres = arith.constant #centres
      %sums_dbeta = arith.constant #sums_dbeta
      %adds_residual = arith.constant #adds_residual
      %has_dy2 = arith.constant #has_dy2
      %has_dy3 = arith.constant #has_dy3
      %has_dy4 = arith.constant #has_dy4
      %from_output = arith.constant #from_output
      %adds_bias = arith.constant #adds_bias
      %m_i32 = hal.interface.constant.load layout(#few_rows_layout) ordinal(0) : i32
      %m = arith.index_castui %m_i32 : i32 to index
      %dy = hal.interface.binding.subspan layout(#few_rows_layout) binding(0) alignment(64) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      %x = hal.interface.binding.subspan layout(#few_rows_layout) binding(1) alignment(64) offset(%c0) flags(ReadOnly) : !x_rows{%m}
      %mean = hal.interface.binding.subspan layout(#few_rows_layout) binding(2) alignment(64) offset(%c0) flags(ReadOnly) : !acc_column{%m}
      %rstd = hal.interface.binding.subspan layout(#few_rows_layout) binding(3) alignment(64) offset(%c0) flags(ReadOnly) : !acc_column{%m}
      %gamma = hal.interface.binding.subspan layout(#few_rows_layout) binding(4) alignment(64) offset(%c0) flags(ReadOnly) : !gamma_row
      %dresidual = hal.interface.binding.subspan layout(#few_rows_layout) binding(5) alignment(64) offset(%c0) flags(ReadOnly) : !residual_rows{%m}
      %beta = hal.interface.binding.subspan layout(#few_rows_layout) binding(6) alignment(64) offset(%c0) flags(ReadOnly) : !beta_row
      %dy2 = hal.interface.binding.subspan layout(#few_rows_layout) binding(7) alignment(64) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      %dy3 = hal.interface.binding.subspan layout(#few_rows_layout) binding(8) alignment(64) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      %dy4 = hal.interface.binding.subspan layout(#few_rows_layout) binding(9) alignment(64) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      // With a gate:
      %z = hal.interface.binding.subspan layout(#few_rows_layout) binding(10) alignment(64) offset(%c0) flags(ReadOnly) : !z_rows{%m}
      %dz = hal.interface.binding.subspan layout(#few_rows_layout) binding(14) alignment(64) offset(%c0) : !z_rows{%m}
      // End of the gate.
      %dx = hal.interface.binding.subspan layout(#few_rows_layout) binding(11) alignment(64) offset(%c0) : !x_rows{%m}
      // with copies: %dx_copy = hal.interface.binding.subspan layout(#few_rows_layout) binding(15) alignment(64) offset(%c0) : !copy_rows{%m}
      %dgamma = hal.interface.binding.subspan layout(#few_rows_layout) binding(12) alignment(64) offset(%c0) : !gamma_row
      %dbeta = hal.interface.binding.subspan layout(#few_rows_layout) binding(13) alignment(64) offset(%c0) : !beta_row

      %workgroup = hal.interface.workgroup.id[0] : index
      %t = gpu.thread_id x
      %tiles = arith.constant #tiles
      %has_tile = arith.cmpi ult, %workgroup, %tiles : index
      scf.if %has_tile {
        // dgamma = sum_M(dy * xhat), dbeta = sum_M(dy)
        %width = arith.constant #tile
        %tile_v = arith.constant #tile_vector
        %slices = arith.constant #tile_slices
        %zeros = arith.constant dense<0.0> : !cells
        %tile_threads = arith.divui %width, %tile_v : index
        %slice = arith.divui %t, %tile_threads : index
        %place = arith.remui %t, %tile_threads : index
        %in_tile = arith.muli %place, %tile_v : index
        %tile_start = arith.muli %workgroup, %width : index
        %column = arith.addi %tile_start, %in_tile : index
        %inside = arith.cmpi ult, %column, %n : index
        %column_in = arith.select %inside, %column, %c0 : index
        %inverse = scf.if %from_output -> !cells {
          %gamma_tile = vector.load %gamma[%column_in] : !gamma_row, !gamma_cells
          %gamma_wide = func.call @widen_of_gamma_cells(%gamma_tile) : (!gamma_cells) -> !cells
          %g = func.call @weight_of_cells(%gamma_wide) : (!cells) -> !cells
          %divisor = func.call @away_from_zero_of_cells(%g) : (!cells) -> !cells
          %one_by_g = func.call @reciprocal_of_cells(%divisor) : (!cells) -> !cells
          scf.yield %one_by_g : !cells
        } else {
          scf.yield %zeros : !cells
        }
        %bias = scf.if %adds_bias -> !cells {
          %beta_tile = vector.load %beta[%column_in] : !beta_row, !beta_cells
          %beta_wide = func.call @widen_of_beta_cells(%beta_tile) : (!beta_cells) -> !cells
          scf.yield %beta_wide : !cells
        } else {
          scf.yield %zeros : !cells
        }
        %sums:2 = scf.for %row = %slice to %m step %slices iter_args(%dgamma_sum = %zeros, %dbeta_sum = %zeros) -> (!cells, !cells) {
          // with strides: %dy_strided = func.call @row_of_dy(%dy, %row) : (!dy_rows, index) -> !dy_rows
          // with strides: %dy2_strided = func.call @row_of_dy(%dy2, %row) : (!dy_rows, index) -> !dy_rows
          // with strides: %dy3_strided = func.call @row_of_dy(%dy3, %row) : (!dy_rows, index) -> !dy_rows
          // with strides: %dy4_strided = func.call @row_of_dy(%dy4, %row) : (!dy_rows, index) -> !dy_rows
          // with strides: %x_strided = func.call @row_of_x(%x, %row) : (!x_rows, index) -> !x_rows
          %dy_row = vector.load %dy[%row, %column_in] : !dy_rows, !dy_cells
          %x_row = vector.load %x[%row, %column_in] : !x_rows, !x_cells
          %mean_row = memref.load %mean[%row] : !acc_column
          %rstd_row = memref.load %rstd[%row] : !acc_column
          %dya_1 = func.call @widen_of_dy_cells(%dy_row) : (!dy_cells) -> !cells
          %dy2_row = vector.load %dy2[%row, %column_in] : !dy_rows, !dy_cells
          %dya_2 = func.call @plus_dy_cells(%dya_1, %dy2_row, %has_dy2) : (!cells, !dy_cells, i1) -> !cells
          %dy3_row = vector.load %dy3[%row, %column_in] : !dy_rows, !dy_cells
          %dya_3 = func.call @plus_dy_cells(%dya_2, %dy3_row, %has_dy3) : (!cells, !dy_cells, i1) -> !cells
          %dy4_row = vector.load %dy4[%row, %column_in] : !dy_rows, !dy_cells
          %dya = func.call @plus_dy_cells(%dya_3, %dy4_row, %has_dy4) : (!cells, !dy_cells, i1) -> !cells
          %xa = func.call @widen_of_x_cells(%x_row) : (!x_cells) -> !cells
          // With a gate:
          // with strides: %z_strided = func.call @row_of_z(%z, %row) : (!z_rows, index) -> !z_rows
          %z_row = vector.load %z[%row, %column_in] : !z_rows, !z_cells
          %za = func.call @widen_of_z_cells(%z_row) : (!z_cells) -> !cells
          %silu, %slope = func.call @silu_of_cells(%za) : (!cells) -> (!cells, !cells)
          %xa_gated = func.call @gated_input_of_cells(%xa, %silu) : (!cells, !cells) -> !cells
          %dya_gated = func.call @gated_gradient_of_cells(%dya, %silu) : (!cells, !cells) -> !cells
          // End of the gate.
          %of_y = func.call @xhat_from_output_of_cells(%xa, %bias, %inverse) : (!cells, !cells, !cells) -> !cells
          %of_x = func.call @xhat_of_cells(%xa, %mean_row, %rstd_row) : (!cells, !acc, !acc) -> !cells
          %xhat = arith.select %from_output, %of_y, %of_x : !cells
          %dgamma_more = math.fma %dya, %xhat, %dgamma_sum : !cells
          %dbeta_more = arith.addf %dbeta_sum, %dya : !cells
          %dbeta_after = arith.select %sums_dbeta, %dbeta_more, %dbeta_sum : !cells
          scf.yield %dgamma_more, %dbeta_after : !cells, !cells
        }

        // The slices' sums are added up. A few neighbouring threads, the parts, share each of the tile's
        // sums.
        %tile_sums = memref.alloc() : !tile_sums  // [(dgamma, dbeta), slices, columns of the tile and a few]
        vector.store %sums#0, %tile_sums[%c0, %slice, %in_tile] : !tile_sums, !cells
        vector.store %sums#1, %tile_sums[%c1, %slice, %in_tile] : !tile_sums, !cells
        gpu.barrier
        %t_count = arith.constant #few_threads
        %c2 = arith.constant 2 : index
        %sum_count = arith.muli %width, %c2 : index
        %parts = arith.divui %t_count, %sum_count : index
        %part = arith.remui %t, %parts : index
        %sum_index = arith.divui %t, %parts : index
        %which = arith.divui %sum_index, %width : index
        %at = arith.remui %sum_index, %width : index
        %part_slices = arith.divui %slices, %parts : index
        %part_sum = scf.for %i = %c0 to %part_slices step %c1 iter_args(%sum = %zero) -> (!acc) {
          %skipped = arith.muli %i, %parts : index
          %slice_i = arith.addi %skipped, %part : index
          %slice_sum = memref.load %tile_sums[%which, %slice_i, %at] : !tile_sums
          %more = arith.addf %sum, %slice_sum : !acc
          scf.yield %more : !acc
        }
        %total = gpu.subgroup_reduce add %part_sum cluster(size = 8) : (!acc) -> !acc
        %sum_column = arith.addi %tile_start, %at : index
        %exists = arith.cmpi ult, %sum_column, %n : index
        %leads = arith.cmpi eq, %part, %c0 : index
        %stores = arith.andi %exists, %leads : i1
        scf.if %stores {
          %is_dgamma = arith.cmpi eq, %which, %c0 : index
          %cell = vector.broadcast %total : !acc to !cell
          scf.if %is_dgamma {
            %dgamma_total = func.call @round_of_gamma(%cell) : (!cell) -> !gamma_cell
            vector.store %dgamma_total, %dgamma[%sum_column] : !gamma_row, !gamma_cell
          } else {
            scf.if %sums_dbeta {
              %dbeta_total = func.call @round_of_beta(%cell) : (!cell) -> !beta_cell
              vector.store %dbeta_total, %dbeta[%sum_column] : !beta_row, !beta_cell
            }
          }
        }
      } else {
        // A row's dx.
        %chunks = arith.constant #few_chunks
        %t_count = arith.constant #few_threads
        %lanes = arith.constant #subgroup
        %c2 = arith.constant 2 : index
        %minus_zeros = arith.constant dense<-0.0> : !few_chunk  // adding -0.0 changes no number
        %zeros = arith.constant dense<0.0> : !few_chunk
        %zero_pair = arith.constant dense<0.0> : !sum_pair
        %row = arith.subi %workgroup, %tiles : index
        // with strides: %dy_strided = func.call @row_of_dy(%dy, %row) : (!dy_rows, index) -> !dy_rows
        // with strides: %dy2_strided = func.call @row_of_dy(%dy2, %row) : (!dy_rows, index) -> !dy_rows
        // with strides: %dy3_strided = func.call @row_of_dy(%dy3, %row) : (!dy_rows, index) -> !dy_rows
        // with strides: %dy4_strided = func.call @row_of_dy(%dy4, %row) : (!dy_rows, index) -> !dy_rows
        // with strides: %x_strided = func.call @row_of_x(%x, %row) : (!x_rows, index) -> !x_rows
        // with strides: %dresidual_strided = func.call @row_of_residual(%dresidual, %row) : (!residual_rows, index) -> !residual_rows
        // with strides: %dx_strided = func.call @row_of_x(%dx, %row) : (!x_rows, index) -> !x_rows
        // with copies: // with strides: %dx_copy_strided = func.call @row_of_copy(%dx_copy, %row) : (!copy_rows, index) -> !copy_rows
        %mean_row = memref.load %mean[%row] : !acc_column
        %rstd_row = memref.load %rstd[%row] : !acc_column

        // All loads are issued before the first is waited for.
        %dy_read = memref.alloca() : !few_dy
        %more_read = memref.alloca() : !few_more_dy
        %x_read = memref.alloca() : !few_x
        %gamma_read = memref.alloca() : !few_gamma
        %beta_read = memref.alloca() : !few_beta
        %residual_read = memref.alloca() : !few_residual
        // With a gate:
        // with strides: %z_strided = func.call @row_of_z(%z, %row) : (!z_rows, index) -> !z_rows
        // with strides: %dz_strided = func.call @row_of_z(%dz, %row) : (!z_rows, index) -> !z_rows
        %z_read = memref.alloca() : !few_z
        // End of the gate.
        scf.for %k = %c0 to %chunks step %c1 {
          %col, %inside = func.call @column(%k, %t) : (index, index) -> (index, i1)
          %col_in = arith.select %inside, %col, %c0 : index
          %dy_k = vector.load %dy[%row, %col_in] : !dy_rows, !few_dy_chunk
          %x_k = vector.load %x[%row, %col_in] : !x_rows, !few_x_chunk
          %gamma_k = vector.load %gamma[%col_in] : !gamma_row, !few_gamma_chunk
          memref.store %dy_k, %dy_read[%k] : !few_dy
          // With a gate:
          %z_k = vector.load %z[%row, %col_in] : !z_rows, !few_z_chunk
          memref.store %z_k, %z_read[%k] : !few_z
          // End of the gate.
          scf.if %has_dy2 {
            %dy2_k = vector.load %dy2[%row, %col_in] : !dy_rows, !few_dy_chunk
            memref.store %dy2_k, %more_read[%c0, %k] : !few_more_dy
          }
          scf.if %has_dy3 {
            %dy3_k = vector.load %dy3[%row, %col_in] : !dy_rows, !few_dy_chunk
            memref.store %dy3_k, %more_read[%c1, %k] : !few_more_dy
          }
          scf.if %has_dy4 {
            %dy4_k = vector.load %dy4[%row, %col_in] : !dy_rows, !few_dy_chunk
            memref.store %dy4_k, %more_read[%c2, %k] : !few_more_dy
          }
          memref.store %x_k, %x_read[%k] : !few_x
          memref.store %gamma_k, %gamma_read[%k] : !few_gamma
          scf.if %adds_bias {
            %beta_k = vector.load %beta[%col_in] : !beta_row, !few_beta_chunk
            memref.store %beta_k, %beta_read[%k] : !few_beta
          }
          scf.if %adds_residual {
            %dresidual_k = vector.load %dresidual[%row, %col_in] : !residual_rows, !few_residual_chunk
            memref.store %dresidual_k, %residual_read[%k] : !few_residual
          }
        } {llvm.loop_annotation = #unrolled}

        %xhat_kept = memref.alloca() : !few_held
        %h_kept = memref.alloca() : !few_held
        %share_h, %share_hx = scf.for %k = %c0 to %chunks step %c1
            iter_args(%h_before = %minus_zeros, %hx_before = %minus_zeros) -> (!few_chunk, !few_chunk) {
          %col, %inside = func.call @column(%k, %t) : (index, index) -> (index, i1)
          %dy_k = memref.load %dy_read[%k] : !few_dy
          %x_k = memref.load %x_read[%k] : !few_x
          %gamma_k = memref.load %gamma_read[%k] : !few_gamma
          %dya_1 = func.call @widen_of_dy(%dy_k) : (!few_dy_chunk) -> !few_chunk
          %dy2_k = memref.load %more_read[%c0, %k] : !few_more_dy
          %dya_2 = func.call @plus_dy(%dya_1, %dy2_k, %has_dy2) : (!few_chunk, !few_dy_chunk, i1) -> !few_chunk
          %dy3_k = memref.load %more_read[%c1, %k] : !few_more_dy
          %dya_3 = func.call @plus_dy(%dya_2, %dy3_k, %has_dy3) : (!few_chunk, !few_dy_chunk, i1) -> !few_chunk
          %dy4_k = memref.load %more_read[%c2, %k] : !few_more_dy
          %dya = func.call @plus_dy(%dya_3, %dy4_k, %has_dy4) : (!few_chunk, !few_dy_chunk, i1) -> !few_chunk
          %xa = func.call @widen_of_x(%x_k) : (!few_x_chunk) -> !few_chunk
          // With a gate:
          %z_k = memref.load %z_read[%k] : !few_z
          %za = func.call @widen_of_z(%z_k) : (!few_z_chunk) -> !few_chunk
          %silu, %slope = func.call @silu_of_z(%za) : (!few_chunk) -> (!few_chunk, !few_chunk)
          %xa_gated = func.call @gated_input(%xa, %silu) : (!few_chunk, !few_chunk) -> !few_chunk
          %dya_gated = func.call @gated_gradient(%dya, %silu) : (!few_chunk, !few_chunk) -> !few_chunk
          // End of the gate.
          %gamma_wide = func.call @widen_of_gamma(%gamma_k) : (!few_gamma_chunk) -> !few_chunk
          %ga = func.call @weight(%gamma_wide) : (!few_chunk) -> !few_chunk
          %bias = scf.if %adds_bias -> !few_chunk {
            %beta_k = memref.load %beta_read[%k] : !few_beta
            %beta_wide = func.call @widen_of_beta(%beta_k) : (!few_beta_chunk) -> !few_chunk
            scf.yield %beta_wide : !few_chunk
          } else {
            scf.yield %zeros : !few_chunk
          }
          %divisor = func.call @away_from_zero(%ga) : (!few_chunk) -> !few_chunk
          %inverse = func.call @reciprocal(%divisor) : (!few_chunk) -> !few_chunk
          %of_y = func.call @xhat_from_output(%xa, %bias, %inverse) : (!few_chunk, !few_chunk, !few_chunk) -> !few_chunk
          %of_x = func.call @xhat(%xa, %mean_row, %rstd_row) : (!few_chunk, !acc, !acc) -> !few_chunk
          %xhat_any = arith.select %from_output, %of_y, %of_x : !few_chunk
          %h_any = arith.mulf %dya, %ga : !few_chunk
          %h = arith.select %inside, %h_any, %zeros : !few_chunk
          %xhat = arith.select %inside, %xhat_any, %zeros : !few_chunk
          memref.store %xhat, %xhat_kept[%k] : !few_held
          memref.store %h, %h_kept[%k] : !few_held
          %h_more = arith.addf %h_before, %h : !few_chunk
          %h_after = arith.select %centres, %h_more, %h_before : !few_chunk
          %hx_after = math.fma %h, %xhat, %hx_before : !few_chunk
          scf.yield %h_after, %hx_after : !few_chunk, !few_chunk
        } {llvm.loop_annotation = #unrolled}

        // Any order of these additions will do, as long as it is always the same order.
        %thread_h = vector.reduction <add>, %share_h fastmath<reassoc> : !few_chunk into !acc
        %thread_hx = vector.reduction <add>, %share_hx fastmath<reassoc> : !few_chunk into !acc
        %warp_h = scf.if %centres -> !acc {
          %subgroup_h = gpu.subgroup_reduce add %thread_h cluster(size = 32) : (!acc) -> !acc
          scf.yield %subgroup_h : !acc
        } else {
          scf.yield %zero : !acc
        }
        %warp_hx = gpu.subgroup_reduce add %thread_hx cluster(size = 32) : (!acc) -> !acc
        %exchange = memref.alloc() : !few_exchange  // [warps, (h, h * xhat)]
        %lane = arith.remui %t, %lanes : index
        %warp = arith.divui %t, %lanes : index
        %leads = arith.cmpi eq, %lane, %c0 : index
        %warp_pair = vector.from_elements %warp_h, %warp_hx : !sum_pair
        scf.if %leads {
          vector.store %warp_pair, %exchange[%warp, %c0] : !few_exchange, !sum_pair
        }
        gpu.barrier
        %pairs = vector.transfer_read %exchange[%c0, %c0], %zero {in_bounds = [true, true]} : !few_exchange, !few_warp_sums
        %pair = vector.multi_reduction <add>, %pairs, %zero_pair [0] : !few_warp_sums to !sum_pair
        %row_h = vector.extract %pair[0] : !acc from !sum_pair
        %row_hx = vector.extract %pair[1] : !acc from !sum_pair

        scf.for %k = %c0 to %chunks step %c1 {
          %col, %inside = func.call @column(%k, %t) : (index, index) -> (index, i1)
          %xhat = memref.load %xhat_kept[%k] : !few_held
          %h = memref.load %h_kept[%k] : !few_held
          %dxa = func.call @dx(%h, %xhat, %rstd_row, %row_h, %row_hx) : (!few_chunk, !few_chunk, !acc, !acc, !acc) -> !few_chunk
          %dresidual_k = memref.load %residual_read[%k] : !few_residual
          %dresidual_a = func.call @widen_of_residual(%dresidual_k) : (!few_residual_chunk) -> !few_chunk
          %dx_sum = func.call @plus_residual(%dxa, %dresidual_a) : (!few_chunk, !few_chunk) -> !few_chunk
          // With a gate:
          %gates_first = arith.constant #gates_first
          %wants_dx = arith.constant #wants_dx
          %wants_dz = arith.constant #wants_dz
          %z_k = memref.load %z_read[%k] : !few_z
          %za = func.call @widen_of_z(%z_k) : (!few_z_chunk) -> !few_chunk
          %silu, %slope = func.call @silu_of_z(%za) : (!few_chunk) -> (!few_chunk, !few_chunk)
          %dy_k = memref.load %dy_read[%k] : !few_dy
          %dya = func.call @widen_of_dy(%dy_k) : (!few_dy_chunk) -> !few_chunk
          %x_k = memref.load %x_read[%k] : !few_x
          %xa = func.call @widen_of_x(%x_k) : (!few_x_chunk) -> !few_chunk
          %gamma_k = memref.load %gamma_read[%k] : !few_gamma
          %gamma_wide = func.call @widen_of_gamma(%gamma_k) : (!few_gamma_chunk) -> !few_chunk
          %ga = func.call @weight(%gamma_wide) : (!few_chunk) -> !few_chunk
          %bias = scf.if %adds_bias -> !few_chunk {
            %beta_k = memref.load %beta_read[%k] : !few_beta
            %beta_wide = func.call @widen_of_beta(%beta_k) : (!few_beta_chunk) -> !few_chunk
            scf.yield %beta_wide : !few_chunk
          } else {
            scf.yield %minus_zeros : !few_chunk
          }
          %n_k = func.call @y(%xhat, %ga, %bias) : (!few_chunk, !few_chunk, !few_chunk) -> !few_chunk
          %dy_or_x = arith.select %gates_first, %xa, %dya : !few_chunk
          %n_or_dv = arith.select %gates_first, %dx_sum, %n_k : !few_chunk
          %dza = func.call @dz(%dy_or_x, %slope, %n_or_dv) : (!few_chunk, !few_chunk, !few_chunk) -> !few_chunk
          %dz_k = func.call @round_of_z(%dza) : (!few_chunk) -> !few_z_chunk
          %stores_dz = arith.andi %inside, %wants_dz : i1
          scf.if %stores_dz {
            vector.store %dz_k, %dz[%row, %col] : !z_rows, !few_z_chunk
          }
          %dx_sum_gated = func.call @gated_dx(%dx_sum, %silu) : (!few_chunk, !few_chunk) -> !few_chunk
          %inside_gated = arith.andi %inside, %wants_dx : i1
          // End of the gate.
          %dx_k = func.call @round_of_x(%dx_sum) : (!few_chunk) -> !few_x_chunk
          // with copies: %copy_k = func.call @round_of_copy(%dx_sum) : (!few_chunk) -> !few_copy_chunk
          scf.if %inside {
            vector.store %dx_k, %dx[%row, %col] : !x_rows, !few_x_chunk
            // with copies: vector.store %copy_k, %dx_copy[%row, %col] : !copy_rows, !few_copy_chunk
          }
        } {llvm.loop_annotation = #unrolled}
      }
      return
    }
  }
}
