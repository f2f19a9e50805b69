// Layer normalization, backward, in two passes over memory: for rows that no workgroup can hold.
//
// @row_sums reads a row and leaves its two sums. @columns reads x and dy again: a workgroup owns a tile
// of columns and walks over the rows, writes dx and accumulates its columns' dgamma and dbeta, without
// ever waiting for another thread. The partial rows are added up by finalize.mlir. Five streams where
// one pass has three.
//
// A tile has few walkers, and no sum is long: after a span of rows a thread adds its sums to its partial
// row, and begins anew.
//
// A thread keeps memory busy by several loads at once: chunks of a row in @row_sums, rows in @columns.
// The lines between "Each chunk" or "Each row" and "End" stand for as many copies, as in one_pass.mlir.

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
#chunks_at_once = 1 : index
#whole = true                    // the chunks at once of all threads fill rows without a rest
#rows_at_once = 1 : index
#span_steps = 32 : index         // of a walker, which it sums at a time
#wants_dx = true                 // the caller asks for it
#workgroups_index = 66 : index   // that walk over the rows of a tile
#workgroups = affine_map<()[m] -> (m ceildiv 1, 66)>
#tile = 2048 : index             // columns of a workgroup
#resident = 1 : i32              // workgroups that shall fit a multiprocessor at once
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
    func.func @row_sums() attributes {translation_info = #two_pass_kernel, nvvm.minctasm = #resident} {
      %c0 = arith.constant 0 : index
      %n = arith.constant #columns
      %v = arith.constant #vector
      %t_count = arith.constant #threads
      %lanes = arith.constant #subgroup
      %zero = arith.constant 0.0 : !acc
      %zero_pair = arith.constant dense<0.0> : !pair
      %chunks_at_once = arith.constant #chunks_at_once
      %whole = arith.constant #whole
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

      // From the last row to the first, so that the cache still holds the rows that @columns begins with.
      %workgroup = hal.interface.workgroup.id[0] : index
      %c1 = arith.constant 1 : index
      %last = arith.subi %m, %c1 : index
      %row = arith.subi %last, %workgroup : index
      %t = gpu.thread_id x
      %lane = arith.remui %t, %lanes : index
      %warp = arith.divui %t, %lanes : index
      %leads = arith.cmpi eq, %lane, %c0 : index
      %exchange = memref.alloc() : !exchange
      %mean_row = memref.load %mean[%row] : !acc_column
      %rstd_row = memref.load %rstd[%row] : !acc_column
      %mean_v = vector.broadcast %mean_row : !acc to !chunk
      %rstd_v = vector.broadcast %rstd_row : !acc to !chunk

      // A chunk past the end of the row reads the row's first chunk, and counts for nothing.
      %first = arith.muli %t, %v : index
      %neighbours = arith.muli %t_count, %v : index
      %stride = arith.muli %neighbours, %chunks_at_once : index
      %sums:2 = scf.for %col = %first to %n step %stride iter_args(%sum_h_0 = %zeros, %sum_hx_0 = %zeros) -> (!chunk, !chunk) {
        // Each chunk
        %k_0 = arith.constant 0 : index
        %skipped_0 = arith.muli %k_0, %neighbours : index
        %col_0 = arith.addi %col, %skipped_0 : index
        %before_end_0 = arith.cmpi ult, %col_0, %n : index
        %inside_0 = arith.ori %whole, %before_end_0 : i1
        %col_in_0 = arith.select %inside_0, %col_0, %c0 : index
        %dy_0 = vector.load %dy[%row, %col_in_0] : !dy_rows, !dy_chunk
        %x_0 = vector.load %x[%row, %col_in_0] : !x_rows, !x_chunk
        %gamma_0 = vector.load %gamma[%col_in_0] : !gamma_row, !gamma_chunk
        // End
        // Each chunk
        %dya_0 = arith.extf %dy_0 : !dy_chunk to !chunk
        %xa_0 = arith.extf %x_0 : !x_chunk to !chunk
        %ga_0 = arith.extf %gamma_0 : !gamma_chunk to !chunk
        %centred_0 = arith.subf %xa_0, %mean_v : !chunk
        %xhat_0 = arith.mulf %centred_0, %rstd_v : !chunk
        %h_0 = arith.mulf %dya_0, %ga_0 : !chunk
        %more_h_0 = arith.addf %sum_h_0, %h_0 : !chunk
        %more_hx_0 = math.fma %h_0, %xhat_0, %sum_hx_0 : !chunk
        %sum_h_1 = arith.select %inside_0, %more_h_0, %sum_h_0 : !chunk
        %sum_hx_1 = arith.select %inside_0, %more_hx_0, %sum_hx_0 : !chunk
        // End
        scf.yield %sum_h_1, %sum_hx_1 : !chunk, !chunk
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
    func.func @columns() attributes {translation_info = #two_pass_kernel, nvvm.minctasm = #resident} {
      %c0 = arith.constant 0 : index
      %n = arith.constant #columns
      %v = arith.constant #vector
      %t_count = arith.constant #threads
      %tile = arith.constant #tile
      %p = arith.constant #workgroups_index
      %inv_n = arith.constant #inv_n
      %rows_at_once = arith.constant #rows_at_once
      %span_steps = arith.constant #span_steps
      %wants_dx = arith.constant #wants_dx
      %c1 = arith.constant 1 : index
      %zeros = arith.constant dense<0.0> : !chunk

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
      %walker = hal.interface.workgroup.id[1] : index
      %t = gpu.thread_id x
      %base = arith.muli %j, %tile : index
      // A thread past the end of the row reads the row's first chunk, and stores nothing.
      %offset = arith.muli %t, %v : index
      %col = arith.addi %base, %offset : index
      %inside = arith.cmpi ult, %col, %n : index
      %col_in = arith.select %inside, %col, %c0 : index
      %gamma_ = vector.load %gamma[%col_in] : !gamma_row, !gamma_chunk
      %ga = arith.extf %gamma_ : !gamma_chunk to !chunk

      %first = arith.muli %walker, %rows_at_once : index
      %stride = arith.muli %p, %rows_at_once : index
      %last = arith.subi %m, %c1 : index
      scf.if %inside {
        vector.store %zeros, %dgamma_partials[%walker, %col] : !acc_rows, !chunk
        vector.store %zeros, %dbeta_partials[%walker, %col] : !acc_rows, !chunk
      }
      %span = arith.muli %stride, %span_steps : index
      scf.for %span_first = %first to %m step %span {
        %span_after = arith.addi %span_first, %span : index
        %span_end = arith.minui %span_after, %m : index
        %sums:2 = scf.for %row = %span_first to %span_end step %stride
            iter_args(%dgamma_0 = %zeros, %dbeta_0 = %zeros) -> (!chunk, !chunk) {
          // A row past the end reads the last row, and counts for nothing.
          // Each row
          %k_0 = arith.constant 0 : index
          %row_0 = arith.addi %row, %k_0 : index
          %live_0 = arith.cmpi ule, %row_0, %last : index
          %row_in_0 = arith.minui %row_0, %last : index
          %dy_0 = vector.load %dy[%row_in_0, %col_in] : !dy_rows, !dy_chunk
          %x_0 = vector.load %x[%row_in_0, %col_in] : !x_rows, !x_chunk
          %mean_0 = memref.load %mean[%row_in_0] : !acc_column
          %rstd_0 = memref.load %rstd[%row_in_0] : !acc_column
          %row_h_0 = memref.load %sum_h[%row_in_0] : !acc_column
          %row_hx_0 = memref.load %sum_hx[%row_in_0] : !acc_column
          // End
          // dx = rstd * h - rstd * mean_N(h) - xhat * rstd * mean_N(h * xhat)
          // Each row
          %mean_v_0 = vector.broadcast %mean_0 : !acc to !chunk
          %rstd_v_0 = vector.broadcast %rstd_0 : !acc to !chunk
          %scale_0 = arith.mulf %rstd_0, %inv_n : !acc
          %minus_scale_0 = arith.negf %scale_0 : !acc
          %shift_h_0 = arith.mulf %row_h_0, %minus_scale_0 : !acc
          %shift_hx_0 = arith.mulf %row_hx_0, %minus_scale_0 : !acc
          %shift_h_v_0 = vector.broadcast %shift_h_0 : !acc to !chunk
          %shift_hx_v_0 = vector.broadcast %shift_hx_0 : !acc to !chunk
          %dya_0 = arith.extf %dy_0 : !dy_chunk to !chunk
          %xa_0 = arith.extf %x_0 : !x_chunk to !chunk
          %centred_0 = arith.subf %xa_0, %mean_v_0 : !chunk
          %xhat_0 = arith.mulf %centred_0, %rstd_v_0 : !chunk
          %h_0 = arith.mulf %dya_0, %ga : !chunk
          %shifted_0 = math.fma %h_0, %rstd_v_0, %shift_h_v_0 : !chunk
          %dxa_0 = math.fma %xhat_0, %shift_hx_v_0, %shifted_0 : !chunk
          %dx_0 = llvm.fptrunc %dxa_0 : !chunk to !x_chunk
          %exists_0 = arith.andi %inside, %live_0 : i1
          %keep_0 = arith.andi %exists_0, %wants_dx : i1
          scf.if %keep_0 {
            vector.store %dx_0, %dx[%row_0, %col] : !x_rows, !x_chunk
          }
          %dgamma_more_0 = math.fma %dya_0, %xhat_0, %dgamma_0 : !chunk
          %dbeta_more_0 = arith.addf %dbeta_0, %dya_0 : !chunk
          %dgamma_1 = arith.select %live_0, %dgamma_more_0, %dgamma_0 : !chunk
          %dbeta_1 = arith.select %live_0, %dbeta_more_0, %dbeta_0 : !chunk
          // End
          scf.yield %dgamma_1, %dbeta_1 : !chunk, !chunk
        }
        scf.if %inside {
          %dgamma_before = vector.load %dgamma_partials[%walker, %col] : !acc_rows, !chunk
          %dbeta_before = vector.load %dbeta_partials[%walker, %col] : !acc_rows, !chunk
          %dgamma_after = arith.addf %dgamma_before, %sums#0 : !chunk
          %dbeta_after = arith.addf %dbeta_before, %sums#1 : !chunk
          vector.store %dgamma_after, %dgamma_partials[%walker, %col] : !acc_rows, !chunk
          vector.store %dbeta_after, %dbeta_partials[%walker, %col] : !acc_rows, !chunk
        }
      }
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
  %wants_dx = arith.constant #wants_dx
  %dx_m = arith.select %wants_dx, %m, %c0 : index
  %sum_h, %sum_hx = scf.if %wants_dx -> (!acc_m, !acc_m) {
    %h, %hx = flow.dispatch @row_sums::@row_sums[%m](%m_i32, %dy, %x, %mean, %rstd, %gamma)
        : (i32, !dy_mn{%m}, !x_mn{%m}, !acc_m{%m}, !acc_m{%m}, !gamma_n) -> (!acc_m{%m}, !acc_m{%m})
    scf.yield %h, %hx : !acc_m, !acc_m
  } else {
    scf.yield %mean, %rstd : !acc_m, !acc_m  // which are not read
  }
  %dx, %dgamma_partials, %dbeta_partials = flow.dispatch @columns::@columns[%m](%m_i32, %dy, %x, %mean, %rstd, %gamma, %sum_h, %sum_hx)
      : (i32, !dy_mn{%m}, !x_mn{%m}, !acc_m{%m}, !acc_m{%m}, !gamma_n, !acc_m{%m}, !acc_m{%m}) -> (!x_mn{%dx_m}, !partials_pn, !partials_pn)
  %dgamma, %dbeta = flow.dispatch @finalize::@finalize(%p_i32, %dgamma_partials, %dbeta_partials)
      : (i32, !partials_pn, !partials_pn) -> (!gamma_n, !beta_n)
  return %dx, %dgamma, %dbeta : !x_mn, !gamma_n, !beta_n
}
