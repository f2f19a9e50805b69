// Layer normalization, backward, in two passes over memory: for rows that no workgroup can hold.
//
// @row_sums reads a row and leaves its two sums. @columns reads x and dy again: a workgroup owns a tile
// of columns and walks over the rows, writes dx and accumulates its columns' dgamma and dbeta, without
// ever waiting for another thread. The partial rows are added up by finalize.mlir. Five streams where
// one pass has three.
//
// Chunks, and the lines between "Each chunk" and "End", are as in one_pass.mlir.

// What a LayerNormSpec and a Schedule decide. These lines are replaced; nothing below them is but by
// the rules of README.md.
!dy = bf16
!x = bf16
!gamma = bf16
!beta = bf16
!acc = f32
!dy_mn = tensor<?x32768x!dy>
!x_mn = tensor<?x32768x!x>
!acc_mn = tensor<?x32768x!acc>
!acc_m = tensor<?x!acc>
!acc_n = tensor<32768x!acc>
!gamma_n = tensor<32768x!gamma>
!beta_n = tensor<32768x!beta>
#inv_n = 3.0517578125e-5 : !acc
#eps = 1.0e-5 : !acc
#columns = 32768 : index
#vector = 8 : index
#threads = 256 : index
#subgroup = 32 : index
#workgroups_index = 66 : index   // that walk over the rows of a tile
#workgroups = affine_map<()[m] -> (m, 66)>
#tile = 2048 : index             // columns of a workgroup
#two_pass_kernel = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline workgroup_size = [256, 1, 1] subgroup_size = 32>
!partials_pn = tensor<66x32768x!acc>
!dy_rows = memref<?x32768x!dy, #hal.descriptor_type<storage_buffer>>
!x_rows = memref<?x32768x!x, #hal.descriptor_type<storage_buffer>>
!acc_rows = memref<?x32768x!acc, #hal.descriptor_type<storage_buffer>>
!acc_column = memref<?x!acc, #hal.descriptor_type<storage_buffer>>
!gamma_row = memref<32768x!gamma, #hal.descriptor_type<storage_buffer>>
!exchange = memref<1x1x8x2x!acc, #gpu.address_space<workgroup>>
!warp_sums = vector<8x2x!acc>
!dy_chunk = vector<8x!dy>
!x_chunk = vector<8x!x>
!gamma_chunk = vector<8x!gamma>
!chunk = vector<8x!acc>
!share = vector<1x8x!acc>
// End of what is replaced.

!pair = vector<2x!acc>

#row_sums_layout = #hal.pipeline.layout<constants = 1, bindings = [
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dy
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // x
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // mean
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // rstd
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // gamma
  #hal.pipeline.binding<storage_buffer>,            // sum of h
  #hal.pipeline.binding<storage_buffer>             // sum of h * xhat
]>

hal.executable.source private @row_sums {
  hal.executable.export public @row_sums ordinal(0) layout(#row_sums_layout)
      count(%device: !hal.device, %m: index) -> (index, index, index) {
    %one = arith.constant 1 : index
    hal.return %m, %one, %one : index, index, index
  }
  builtin.module {
    func.func @row_sums() attributes {translation_info = #two_pass_kernel} {
      %c0 = arith.constant 0 : index
      %n = arith.constant #columns
      %v = arith.constant #vector
      %t_count = arith.constant #threads
      %lanes = arith.constant #subgroup
      %zero = arith.constant 0.0 : !acc
      %zero_pair = arith.constant dense<0.0> : !pair
      %zeros = arith.constant dense<0.0> : !chunk

      %m_i32 = hal.interface.constant.load layout(#row_sums_layout) ordinal(0) : i32
      %m = arith.index_castui %m_i32 : i32 to index
      %dy = hal.interface.binding.subspan layout(#row_sums_layout) binding(0) alignment(64) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      %x = hal.interface.binding.subspan layout(#row_sums_layout) binding(1) alignment(64) offset(%c0) flags(ReadOnly) : !x_rows{%m}
      %mean = hal.interface.binding.subspan layout(#row_sums_layout) binding(2) alignment(64) offset(%c0) flags(ReadOnly) : !acc_column{%m}
      %rstd = hal.interface.binding.subspan layout(#row_sums_layout) binding(3) alignment(64) offset(%c0) flags(ReadOnly) : !acc_column{%m}
      %gamma = hal.interface.binding.subspan layout(#row_sums_layout) binding(4) alignment(64) offset(%c0) flags(ReadOnly) : !gamma_row
      %sum_h = hal.interface.binding.subspan layout(#row_sums_layout) binding(5) alignment(64) offset(%c0) : !acc_column{%m}
      %sum_hx = hal.interface.binding.subspan layout(#row_sums_layout) binding(6) alignment(64) offset(%c0) : !acc_column{%m}

      %row = hal.interface.workgroup.id[0] : index
      %t = gpu.thread_id x
      %lane = arith.remui %t, %lanes : index
      %warp = arith.divui %t, %lanes : index
      %leads = arith.cmpi eq, %lane, %c0 : index
      %exchange = memref.alloc() : !exchange
      %mean_row = memref.load %mean[%row] : !acc_column
      %rstd_row = memref.load %rstd[%row] : !acc_column
      %mean_v = vector.broadcast %mean_row : !acc to !chunk
      %rstd_v = vector.broadcast %rstd_row : !acc to !chunk

      %first = arith.muli %t, %v : index
      %stride = arith.muli %t_count, %v : index
      %sums:2 = scf.for %col = %first to %n step %stride iter_args(%thread_h_v = %zeros, %thread_hx_v = %zeros) -> (!chunk, !chunk) {
        %dy_ = vector.load %dy[%row, %col] : !dy_rows, !dy_chunk
        %x_ = vector.load %x[%row, %col] : !x_rows, !x_chunk
        %gamma_ = vector.load %gamma[%col] : !gamma_row, !gamma_chunk
        %dya = arith.extf %dy_ : !dy_chunk to !chunk
        %xa = arith.extf %x_ : !x_chunk to !chunk
        %ga = arith.extf %gamma_ : !gamma_chunk to !chunk
        %centred = arith.subf %xa, %mean_v : !chunk
        %xhat = arith.mulf %centred, %rstd_v : !chunk
        %h = arith.mulf %dya, %ga : !chunk
        %more_h = arith.addf %thread_h_v, %h : !chunk
        %more_hx = math.fma %h, %xhat, %thread_hx_v : !chunk
        scf.yield %more_h, %more_hx : !chunk, !chunk
      }
      %thread_h = vector.reduction <add>, %sums#0 fastmath<reassoc> : !chunk into !acc
      %thread_hx = vector.reduction <add>, %sums#1 fastmath<reassoc> : !chunk into !acc
      %warp_h = gpu.subgroup_reduce add %thread_h cluster(size = 32) : (!acc) -> !acc
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
        memref.store %row_h, %sum_h[%row] : !acc_column
        memref.store %row_hx, %sum_hx[%row] : !acc_column
      }
      return
    }
  }
}

#columns_layout = #hal.pipeline.layout<constants = 1, bindings = [
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dy
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // x
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // mean
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // rstd
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // gamma
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // sum of h
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // sum of h * xhat
  #hal.pipeline.binding<storage_buffer>,            // dx
  #hal.pipeline.binding<storage_buffer>,            // partial dgamma
  #hal.pipeline.binding<storage_buffer>             // partial dbeta
]>

hal.executable.source private @columns {
  hal.executable.export public @columns ordinal(0) layout(#columns_layout)
      count(%device: !hal.device, %m: index) -> (index, index, index) {
    %n = arith.constant #columns
    %tile = arith.constant #tile
    %tiles = arith.ceildivui %n, %tile : index
    %p = affine.min #workgroups()[%m]
    %one = arith.constant 1 : index
    hal.return %tiles, %p, %one : index, index, index
  }
  builtin.module {
    func.func @columns() attributes {translation_info = #two_pass_kernel} {
      %c0 = arith.constant 0 : index
      %n = arith.constant #columns
      %v = arith.constant #vector
      %t_count = arith.constant #threads
      %tile = arith.constant #tile
      %p = arith.constant #workgroups_index
      %inv_n = arith.constant #inv_n
      %zeros = arith.constant dense<0.0> : !share

      %m_i32 = hal.interface.constant.load layout(#columns_layout) ordinal(0) : i32
      %m = arith.index_castui %m_i32 : i32 to index
      %dy = hal.interface.binding.subspan layout(#columns_layout) binding(0) alignment(64) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      %x = hal.interface.binding.subspan layout(#columns_layout) binding(1) alignment(64) offset(%c0) flags(ReadOnly) : !x_rows{%m}
      %mean = hal.interface.binding.subspan layout(#columns_layout) binding(2) alignment(64) offset(%c0) flags(ReadOnly) : !acc_column{%m}
      %rstd = hal.interface.binding.subspan layout(#columns_layout) binding(3) alignment(64) offset(%c0) flags(ReadOnly) : !acc_column{%m}
      %gamma = hal.interface.binding.subspan layout(#columns_layout) binding(4) alignment(64) offset(%c0) flags(ReadOnly) : !gamma_row
      %sum_h = hal.interface.binding.subspan layout(#columns_layout) binding(5) alignment(64) offset(%c0) flags(ReadOnly) : !acc_column{%m}
      %sum_hx = hal.interface.binding.subspan layout(#columns_layout) binding(6) alignment(64) offset(%c0) flags(ReadOnly) : !acc_column{%m}
      %dx = hal.interface.binding.subspan layout(#columns_layout) binding(7) alignment(64) offset(%c0) : !x_rows{%m}
      %live = hal.interface.workgroup.count[1] : index
      %dgamma_partials = hal.interface.binding.subspan layout(#columns_layout) binding(8) alignment(64) offset(%c0) : !acc_rows{%live}
      %dbeta_partials = hal.interface.binding.subspan layout(#columns_layout) binding(9) alignment(64) offset(%c0) : !acc_rows{%live}

      %j = hal.interface.workgroup.id[0] : index
      %first = hal.interface.workgroup.id[1] : index
      %t = gpu.thread_id x
      %base = arith.muli %j, %tile : index
      // A chunk past the end of the row reads the row's first chunk, and stores nothing.
      // Each chunk
      %k_0 = arith.constant 0 : index
      %chunk_0 = arith.muli %k_0, %t_count : index
      %mine_0 = arith.addi %chunk_0, %t : index
      %offset_0 = arith.muli %mine_0, %v : index
      %col_0 = arith.addi %base, %offset_0 : index
      %inside_0 = arith.cmpi ult, %col_0, %n : index
      %col_in_0 = arith.select %inside_0, %col_0, %c0 : index
      %gamma_0 = vector.load %gamma[%col_in_0] : !gamma_row, !gamma_chunk
      // End

      %sums:2 = scf.for %row = %first to %m step %p iter_args(%dgamma_0 = %zeros, %dbeta_0 = %zeros) -> (!share, !share) {
        %mean_row = memref.load %mean[%row] : !acc_column
        %rstd_row = memref.load %rstd[%row] : !acc_column
        %row_h = memref.load %sum_h[%row] : !acc_column
        %row_hx = memref.load %sum_hx[%row] : !acc_column
        %mean_v = vector.broadcast %mean_row : !acc to !chunk
        %rstd_v = vector.broadcast %rstd_row : !acc to !chunk
        // dx = rstd * h - rstd * mean_N(h) - xhat * rstd * mean_N(h * xhat)
        %scale = arith.mulf %rstd_row, %inv_n : !acc
        %minus_scale = arith.negf %scale : !acc
        %shift_h = arith.mulf %row_h, %minus_scale : !acc
        %shift_hx = arith.mulf %row_hx, %minus_scale : !acc
        %shift_h_v = vector.broadcast %shift_h : !acc to !chunk
        %shift_hx_v = vector.broadcast %shift_hx : !acc to !chunk
        // Each chunk
        %dy_0 = vector.load %dy[%row, %col_in_0] : !dy_rows, !dy_chunk
        %x_0 = vector.load %x[%row, %col_in_0] : !x_rows, !x_chunk
        %dya_0 = arith.extf %dy_0 : !dy_chunk to !chunk
        %xa_0 = arith.extf %x_0 : !x_chunk to !chunk
        %ga_0 = arith.extf %gamma_0 : !gamma_chunk to !chunk
        %centred_0 = arith.subf %xa_0, %mean_v : !chunk
        %xhat_0 = arith.mulf %centred_0, %rstd_v : !chunk
        %h_0 = arith.mulf %dya_0, %ga_0 : !chunk
        %shifted_0 = math.fma %h_0, %rstd_v, %shift_h_v : !chunk
        %dxa_0 = math.fma %xhat_0, %shift_hx_v, %shifted_0 : !chunk
        %dx_0 = llvm.fptrunc %dxa_0 : !chunk to !x_chunk
        scf.if %inside_0 {
          vector.store %dx_0, %dx[%row, %col_0] : !x_rows, !x_chunk
        }
        %dgamma_old_0 = vector.extract %dgamma_0[0] : !chunk from !share
        %dgamma_new_0 = math.fma %dya_0, %xhat_0, %dgamma_old_0 : !chunk
        %dgamma_1 = vector.insert %dgamma_new_0, %dgamma_0[0] : !chunk into !share
        %dbeta_old_0 = vector.extract %dbeta_0[0] : !chunk from !share
        %dbeta_new_0 = arith.addf %dbeta_old_0, %dya_0 : !chunk
        %dbeta_1 = vector.insert %dbeta_new_0, %dbeta_0[0] : !chunk into !share
        // End
        scf.yield %dgamma_1, %dbeta_1 : !share, !share
      }
      // Each chunk
      %dgamma_sum_0 = vector.extract %sums#0[0] : !chunk from !share
      %dbeta_sum_0 = vector.extract %sums#1[0] : !chunk from !share
      scf.if %inside_0 {
        vector.store %dgamma_sum_0, %dgamma_partials[%first, %col_0] : !acc_rows, !chunk
        vector.store %dbeta_sum_0, %dbeta_partials[%first, %col_0] : !acc_rows, !chunk
      }
      // End
      return
    }
  }
}

func.func private @backward(%dy: !dy_mn, %x: !x_mn, %mean: !acc_m, %rstd: !acc_m, %gamma: !gamma_n)
    -> (!x_mn, !gamma_n, !beta_n) {
  %c0 = arith.constant 0 : index
  %m = tensor.dim %x, %c0 : !x_mn
  %m_i32 = arith.index_cast %m : index to i32
  %p = affine.min #workgroups()[%m]
  %p_i32 = arith.index_cast %p : index to i32
  %sum_h, %sum_hx = flow.dispatch @row_sums::@row_sums[%m](%m_i32, %dy, %x, %mean, %rstd, %gamma)
      : (i32, !dy_mn{%m}, !x_mn{%m}, !acc_m{%m}, !acc_m{%m}, !gamma_n) -> (!acc_m{%m}, !acc_m{%m})
  %dx, %dgamma_partials, %dbeta_partials = flow.dispatch @columns::@columns[%m](%m_i32, %dy, %x, %mean, %rstd, %gamma, %sum_h, %sum_hx)
      : (i32, !dy_mn{%m}, !x_mn{%m}, !acc_m{%m}, !acc_m{%m}, !gamma_n, !acc_m{%m}, !acc_m{%m}) -> (!x_mn{%m}, !partials_pn, !partials_pn)
  %dgamma, %dbeta = flow.dispatch @finalize::@finalize(%p_i32, %dgamma_partials, %dbeta_partials)
      : (i32, !partials_pn, !partials_pn) -> (!gamma_n, !beta_n)
  return %dx, %dgamma, %dbeta : !x_mn, !gamma_n, !beta_n
}
