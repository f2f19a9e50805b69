// Layer normalization, backward, in one pass over memory: how the algorithm runs on a GPU.
//
// A fixed number of workgroups walk over the rows. A row is read once: its two sums are reduced over
// the threads that hold it, dx is written, and dgamma and dbeta accumulate in registers over all rows
// that a thread sees. They leave as one partial row a workgroup, which finalize.mlir adds up. No
// atomics: the same bits every time.
//
// A row has N columns, in chunks of V neighbours, 16 bytes of them where N allows it. A workgroup has
// several groups of T threads; a group works on one row at a time, and its thread t owns the chunks
// t, t + T, t + 2T, ... The lines between "Each chunk" and "End" stand for as many copies as a thread
// has chunks: in copy k, what ends in _0 ends in _k, what ends in _1 in _(k+1), and 0 is k.
//
// Two kernels do this; a Schedule picks one of them:
//   @rows            reads rows where it uses them. Any GPU.
//   @rows_cp_async   has rows copied to shared memory a few steps ahead. NVIDIA since sm_80.

// What a LayerNormSpec and a Schedule decide. These lines are replaced; nothing below them is but by
// the rules of README.md.
!dy = bf16
!x = bf16
!gamma = bf16
!beta = bf16
!acc = f32
!dy_mn = tensor<?x4096x!dy>
!x_mn = tensor<?x4096x!x>
!acc_mn = tensor<?x4096x!acc>
!acc_m = tensor<?x!acc>
!acc_n = tensor<4096x!acc>
!gamma_n = tensor<4096x!gamma>
!beta_n = tensor<4096x!beta>
#inv_n = 2.44140625e-4 : !acc
#eps = 1.0e-5 : !acc
#columns = 4096 : index
#vector = 8 : index          // V
#threads = 512 : index       // T
#subgroup = 32 : index
#groups = 1 : index
#ahead = 2 : index           // steps between a row's copy and its use
#ahead_i32 = 2 : i32
#workgroups_i32 = 132 : i32
#groups_i32 = 1 : i32
#workgroups = affine_map<()[m] -> (m ceildiv 1, 132)>
#resident = 1 : i32           // workgroups that shall fit a multiprocessor at once
#rows_kernel = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline workgroup_size = [512, 1, 1] subgroup_size = 32>
!partials_pn = tensor<132x4096x!acc>
!dy_rows = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>
!x_rows = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!acc_rows = memref<?x4096x!acc, #hal.descriptor_type<storage_buffer>>
!acc_column = memref<?x!acc, #hal.descriptor_type<storage_buffer>>
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!dy_bytes = memref<24576xi8, #gpu.address_space<workgroup>>
!dy_staged = memref<3x1x4096x!dy, #gpu.address_space<workgroup>>
!x_staged = memref<3x1x4096x!x, #gpu.address_space<workgroup>>
!gamma_staged = memref<4096x!gamma, #gpu.address_space<workgroup>>
!exchange = memref<2x1x16x2x!acc, #gpu.address_space<workgroup>>
!warp_sums = vector<16x2x!acc>
!group_sums = memref<1x4096x!acc, #gpu.address_space<workgroup>>
!dy_chunk = vector<8x!dy>
!x_chunk = vector<8x!x>
!gamma_chunk = vector<8x!gamma>
!chunk = vector<8x!acc>
!share = vector<1x8x!acc>    // a thread's chunks of a row
// End of what is replaced.

!pair = vector<2x!acc>

#rows_layout = #hal.pipeline.layout<constants = 1, bindings = [
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // dy
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // x
  #hal.pipeline.binding<storage_buffer>,            // mean
  #hal.pipeline.binding<storage_buffer>,            // rstd
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // gamma
  #hal.pipeline.binding<storage_buffer>,            // dx
  #hal.pipeline.binding<storage_buffer>,            // partial dgamma
  #hal.pipeline.binding<storage_buffer>             // partial dbeta
]>

hal.executable.source private @rows {
  hal.executable.export public @rows ordinal(0) layout(#rows_layout)
      count(%device: !hal.device, %m: index) -> (index, index, index) {
    %p = affine.min #workgroups()[%m]
    %one = arith.constant 1 : index
    hal.return %p, %one, %one : index, index, index
  }
  builtin.module {
    func.func @rows() attributes {translation_info = #rows_kernel, nvvm.minctasm = #resident} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %n = arith.constant #columns
      %v = arith.constant #vector
      %t_count = arith.constant #threads
      %lanes = arith.constant #subgroup
      %groups = arith.constant #groups
      %p_i32 = arith.constant #workgroups_i32
      %groups_i32 = arith.constant #groups_i32
      %one_i32 = arith.constant 1 : i32
      %zero = arith.constant 0.0 : !acc
      %zero_pair = arith.constant dense<0.0> : !pair
      %zeros = arith.constant dense<0.0> : !share
      %inv_n = arith.constant #inv_n
      %zero_dy = arith.constant dense<0.0> : !dy_chunk
      %zero_x = arith.constant dense<0.0> : !x_chunk
      %zero_gamma = arith.constant dense<0.0> : !gamma_chunk

      %m_i32 = hal.interface.constant.load layout(#rows_layout) ordinal(0) : i32
      %m = arith.index_castui %m_i32 : i32 to index
      %dy = hal.interface.binding.subspan layout(#rows_layout) binding(0) alignment(64) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      %x = hal.interface.binding.subspan layout(#rows_layout) binding(1) alignment(64) offset(%c0) flags(ReadOnly) : !x_rows{%m}
      %mean = hal.interface.binding.subspan layout(#rows_layout) binding(2) alignment(64) offset(%c0) : !acc_column{%m}
      %rstd = hal.interface.binding.subspan layout(#rows_layout) binding(3) alignment(64) offset(%c0) : !acc_column{%m}
      %gamma = hal.interface.binding.subspan layout(#rows_layout) binding(4) alignment(64) offset(%c0) flags(ReadOnly) : !gamma_row
      %dx = hal.interface.binding.subspan layout(#rows_layout) binding(5) alignment(64) offset(%c0) : !x_rows{%m}
      %p = hal.interface.workgroup.count[0] : index
      %dgamma_partials = hal.interface.binding.subspan layout(#rows_layout) binding(6) alignment(64) offset(%c0) : !acc_rows{%p}
      %dbeta_partials = hal.interface.binding.subspan layout(#rows_layout) binding(7) alignment(64) offset(%c0) : !acc_rows{%p}

      // Rows are counted in 32 bits, which saves registers; their offsets have 64.
      %workgroup = hal.interface.workgroup.id[0] : index
      %thread = gpu.thread_id x
      %t = arith.remui %thread, %t_count : index
      %group = arith.divui %thread, %t_count : index
      %lane = arith.remui %t, %lanes : index
      %warp = arith.divui %t, %lanes : index
      %leads = arith.cmpi eq, %lane, %c0 : index
      %workgroup_i32 = arith.index_castui %workgroup : index to i32
      %group_i32 = arith.index_castui %group : index to i32
      %first = arith.muli %workgroup_i32, %groups_i32 : i32
      %stride = arith.muli %p_i32, %groups_i32 : i32
      %last = arith.subi %m_i32, %one_i32 : i32

      %exchange = memref.alloc() : !exchange
      %group_sums = memref.alloc() : !group_sums

      // A chunk past the end of the row is all zeros and is never stored.
      // Each chunk
      %k_0 = arith.constant 0 : index
      %chunk_0 = arith.muli %k_0, %t_count : index
      %mine_0 = arith.addi %chunk_0, %t : index
      %col_0 = arith.muli %mine_0, %v : index
      %inside_0 = arith.cmpi ult, %col_0, %n : index
      %col_in_0 = arith.select %inside_0, %col_0, %c0 : index
      %gamma_read_0 = vector.load %gamma[%col_in_0] : !gamma_row, !gamma_chunk
      %gamma_0 = arith.select %inside_0, %gamma_read_0, %zero_gamma : !gamma_chunk
      // End

      // All groups of a workgroup take the same steps: they meet at a barrier in each.
      %sums:3 = scf.for %base = %first to %m_i32 step %stride
          iter_args(%dgamma_0 = %zeros, %dbeta_0 = %zeros, %half = %c0) -> (!share, !share, index) : i32 {
        %row = arith.addi %base, %group_i32 : i32
        %row_live = arith.cmpi sle, %row, %last : i32
        %row_in = arith.minsi %row, %last : i32
        %row_index = arith.index_castui %row_in : i32 to index
        %mean_loaded = memref.load %mean[%row_index] : !acc_column
        %rstd_loaded = memref.load %rstd[%row_index] : !acc_column
        // A row past the end is all zeros, and counts for nothing.
        %mean_row = arith.select %row_live, %mean_loaded, %zero : !acc
        %rstd_row = arith.select %row_live, %rstd_loaded, %zero : !acc
        %mean_v = vector.broadcast %mean_row : !acc to !chunk
        %rstd_v = vector.broadcast %rstd_row : !acc to !chunk

        // Row sums of this thread's chunks: h and h * xhat.
        // -0.0 changes no number that it is added to.
        %sum_h_0 = arith.constant dense<-0.0> : !chunk
        %sum_hx_0 = arith.constant dense<-0.0> : !chunk
        // Each chunk
        %dy_read_0 = vector.load %dy[%row_index, %col_in_0] : !dy_rows, !dy_chunk
        %x_read_0 = vector.load %x[%row_index, %col_in_0] : !x_rows, !x_chunk
        %keep_0 = arith.andi %inside_0, %row_live : i1
        %dy_0 = arith.select %keep_0, %dy_read_0, %zero_dy : !dy_chunk
        %x_0 = arith.select %keep_0, %x_read_0, %zero_x : !x_chunk
        %dya_0 = arith.extf %dy_0 : !dy_chunk to !chunk
        %xa_0 = arith.extf %x_0 : !x_chunk to !chunk
        %ga_0 = arith.extf %gamma_0 : !gamma_chunk to !chunk
        %centred_0 = arith.subf %xa_0, %mean_v : !chunk
        %xhat_0 = arith.mulf %centred_0, %rstd_v : !chunk
        %h_0 = arith.mulf %dya_0, %ga_0 : !chunk
        %sum_h_1 = arith.addf %sum_h_0, %h_0 : !chunk
        %sum_hx_1 = math.fma %h_0, %xhat_0, %sum_hx_0 : !chunk
        // End
        // Any order of these additions will do, as long as it is always the same one.
        %thread_h = vector.reduction <add>, %sum_h_1 fastmath<reassoc> : !chunk into !acc
        %thread_hx = vector.reduction <add>, %sum_hx_1 fastmath<reassoc> : !chunk into !acc
        %warp_h = gpu.subgroup_reduce add %thread_h cluster(size = 32) : (!acc) -> !acc
        %warp_hx = gpu.subgroup_reduce add %thread_hx cluster(size = 32) : (!acc) -> !acc

        // Across warps: through one of two buffers in turn, so that one barrier a row is enough.
        %warp_pair = vector.from_elements %warp_h, %warp_hx : !pair
        scf.if %leads {
          vector.store %warp_pair, %exchange[%half, %group, %warp, %c0] : !exchange, !pair
        }
        gpu.barrier
        %pairs = vector.transfer_read %exchange[%half, %group, %c0, %c0], %zero {in_bounds = [true, true]} : !exchange, !warp_sums
        %pair = vector.multi_reduction <add>, %pairs, %zero_pair [0] : !warp_sums to !pair
        %row_h = vector.extract %pair[0] : !acc from !pair
        %row_hx = vector.extract %pair[1] : !acc from !pair
        // End

        // dx = rstd * h - rstd * mean_N(h) - xhat * rstd * mean_N(h * xhat)
        %scale = arith.mulf %rstd_row, %inv_n : !acc
        %minus_scale = arith.negf %scale : !acc
        %shift_h = arith.mulf %row_h, %minus_scale : !acc
        %shift_hx = arith.mulf %row_hx, %minus_scale : !acc
        %shift_h_v = vector.broadcast %shift_h : !acc to !chunk
        %shift_hx_v = vector.broadcast %shift_hx : !acc to !chunk
        // Each chunk
        %shifted_0 = math.fma %h_0, %rstd_v, %shift_h_v : !chunk
        %dxa_0 = math.fma %xhat_0, %shift_hx_v, %shifted_0 : !chunk
        %dx_0 = llvm.fptrunc %dxa_0 : !chunk to !x_chunk
        scf.if %keep_0 {
          vector.store %dx_0, %dx[%row_index, %col_0] : !x_rows, !x_chunk
        }
        %dgamma_old_0 = vector.extract %dgamma_0[0] : !chunk from !share
        %dgamma_new_0 = math.fma %dya_0, %xhat_0, %dgamma_old_0 : !chunk
        %dgamma_1 = vector.insert %dgamma_new_0, %dgamma_0[0] : !chunk into !share
        %dbeta_old_0 = vector.extract %dbeta_0[0] : !chunk from !share
        %dbeta_new_0 = arith.addf %dbeta_old_0, %dya_0 : !chunk
        %dbeta_1 = vector.insert %dbeta_new_0, %dbeta_0[0] : !chunk into !share
        // End

        %half_next = arith.xori %half, %c1 : index
        scf.yield %dgamma_1, %dbeta_1, %half_next : !share, !share, index
      }

      // The groups' sums become one partial row.
      %workgroup_threads = arith.muli %t_count, %groups : index
      // Each chunk
      %dgamma_sum_0 = vector.extract %sums#0[0] : !chunk from !share
      vector.store %dgamma_sum_0, %group_sums[%group, %col_0] : !group_sums, !chunk
      // End
      gpu.barrier
      scf.for %column = %thread to %n step %workgroup_threads {
        %total = scf.for %g = %c0 to %groups step %c1 iter_args(%sum = %zero) -> (!acc) {
          %group_sum = memref.load %group_sums[%g, %column] : !group_sums
          %more = arith.addf %sum, %group_sum : !acc
          scf.yield %more : !acc
        }
        memref.store %total, %dgamma_partials[%workgroup, %column] : !acc_rows
      }
      gpu.barrier
      // Each chunk
      %dbeta_sum_0 = vector.extract %sums#1[0] : !chunk from !share
      vector.store %dbeta_sum_0, %group_sums[%group, %col_0] : !group_sums, !chunk
      // End
      gpu.barrier
      scf.for %column = %thread to %n step %workgroup_threads {
        %total = scf.for %g = %c0 to %groups step %c1 iter_args(%sum = %zero) -> (!acc) {
          %group_sum = memref.load %group_sums[%g, %column] : !group_sums
          %more = arith.addf %sum, %group_sum : !acc
          scf.yield %more : !acc
        }
        memref.store %total, %dbeta_partials[%workgroup, %column] : !acc_rows
      }
      return
    }
  }
}

hal.executable.source private @rows_cp_async {
  hal.executable.export public @rows_cp_async ordinal(0) layout(#rows_layout)
      count(%device: !hal.device, %m: index) -> (index, index, index) {
    %p = affine.min #workgroups()[%m]
    %one = arith.constant 1 : index
    hal.return %p, %one, %one : index, index, index
  }
  builtin.module {
    func.func @rows_cp_async() attributes {translation_info = #rows_kernel, nvvm.minctasm = #resident} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %n = arith.constant #columns
      %v = arith.constant #vector
      %t_count = arith.constant #threads
      %lanes = arith.constant #subgroup
      %groups = arith.constant #groups
      %ahead = arith.constant #ahead
      %ahead_i32 = arith.constant #ahead_i32
      %p_i32 = arith.constant #workgroups_i32
      %groups_i32 = arith.constant #groups_i32
      %one_i32 = arith.constant 1 : i32
      %zero = arith.constant 0.0 : !acc
      %zero_pair = arith.constant dense<0.0> : !pair
      %zeros = arith.constant dense<0.0> : !share
      %inv_n = arith.constant #inv_n
      %zero_gamma = arith.constant dense<0.0> : !gamma_chunk

      %m_i32 = hal.interface.constant.load layout(#rows_layout) ordinal(0) : i32
      %m = arith.index_castui %m_i32 : i32 to index
      %dy = hal.interface.binding.subspan layout(#rows_layout) binding(0) alignment(64) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      %x = hal.interface.binding.subspan layout(#rows_layout) binding(1) alignment(64) offset(%c0) flags(ReadOnly) : !x_rows{%m}
      %mean = hal.interface.binding.subspan layout(#rows_layout) binding(2) alignment(64) offset(%c0) : !acc_column{%m}
      %rstd = hal.interface.binding.subspan layout(#rows_layout) binding(3) alignment(64) offset(%c0) : !acc_column{%m}
      %gamma = hal.interface.binding.subspan layout(#rows_layout) binding(4) alignment(64) offset(%c0) flags(ReadOnly) : !gamma_row
      %dx = hal.interface.binding.subspan layout(#rows_layout) binding(5) alignment(64) offset(%c0) : !x_rows{%m}
      %p = hal.interface.workgroup.count[0] : index
      %dgamma_partials = hal.interface.binding.subspan layout(#rows_layout) binding(6) alignment(64) offset(%c0) : !acc_rows{%p}
      %dbeta_partials = hal.interface.binding.subspan layout(#rows_layout) binding(7) alignment(64) offset(%c0) : !acc_rows{%p}

      // Rows are counted in 32 bits, which saves registers; their offsets have 64.
      %workgroup = hal.interface.workgroup.id[0] : index
      %thread = gpu.thread_id x
      %t = arith.remui %thread, %t_count : index
      %group = arith.divui %thread, %t_count : index
      %lane = arith.remui %t, %lanes : index
      %warp = arith.divui %t, %lanes : index
      %leads = arith.cmpi eq, %lane, %c0 : index
      %workgroup_i32 = arith.index_castui %workgroup : index to i32
      %group_i32 = arith.index_castui %group : index to i32
      %first = arith.muli %workgroup_i32, %groups_i32 : i32
      %stride = arith.muli %p_i32, %groups_i32 : i32
      %last = arith.subi %m_i32, %one_i32 : i32

      %dy_bytes = memref.alloc() : !dy_bytes
      %dy_staged = memref.view %dy_bytes[%c0][] : !dy_bytes to !dy_staged
      %x_staged = memref.alloc() : !x_staged
      %gamma_staged = memref.alloc() : !gamma_staged
      %exchange = memref.alloc() : !exchange

      // A chunk past the end of the row is all zeros and is never stored.
      // Each chunk
      %k_0 = arith.constant 0 : index
      %chunk_0 = arith.muli %k_0, %t_count : index
      %mine_0 = arith.addi %chunk_0, %t : index
      %col_0 = arith.muli %mine_0, %v : index
      %inside_0 = arith.cmpi ult, %col_0, %n : index
      %gamma_read_0 = scf.if %inside_0 -> !gamma_chunk {
        %gamma_here_0 = vector.load %gamma[%col_0] : !gamma_row, !gamma_chunk
        scf.yield %gamma_here_0 : !gamma_chunk
      } else {
        scf.yield %zero_gamma : !gamma_chunk
      }
      // End

      // The weight is the same for all groups: the first one stages it.
      %stages = arith.cmpi eq, %group, %c0 : index
      scf.if %stages {
        // Each chunk
        vector.store %gamma_read_0, %gamma_staged[%col_0] : !gamma_staged, !gamma_chunk
        // End
      }
      gpu.barrier

      // Never taken. Without a store LLVM finds the statistics to be read-only, and ptxas moves their
      // loads, which are made a step ahead, behind the barrier that they are to overlap with.
      %never = arith.cmpi slt, %m_i32, %one_i32 : i32
      scf.if %never {
        memref.store %zero, %mean[%c0] : !acc_column
        memref.store %zero, %rstd[%c0] : !acc_column
      }

      // Step i starts the copy of a row and uses the row whose copy step i - ahead started; the first
      // steps only copy. All groups of a workgroup take the same steps: they meet at a barrier in each.
      %stride_ahead = arith.muli %ahead_i32, %stride : i32
      %start = arith.subi %first, %stride_ahead : i32
      %row_first = arith.addi %first, %group_i32 : i32
      %row_first_in = arith.minsi %row_first, %last : i32
      %row_first_index = arith.index_castui %row_first_in : i32 to index
      %mean_first = memref.load %mean[%row_first_index] : !acc_column
      %rstd_first = memref.load %rstd[%row_first_index] : !acc_column
      %sums:6 = scf.for %base = %start to %m_i32 step %stride
          iter_args(%dgamma_0 = %zeros, %dbeta_0 = %zeros, %mean_loaded = %mean_first, %rstd_loaded = %rstd_first,
                    %fill = %c0, %half = %c0)
          -> (!share, !share, !acc, !acc, index, index) : i32 {
        %row = arith.addi %base, %group_i32 : i32
        %fill_after = arith.addi %fill, %c1 : index
        %wraps = arith.cmpi ugt, %fill_after, %ahead : index
        %slot = arith.select %wraps, %c0, %fill_after : index

        // Past the end of the columns or of the rows nothing is read, and the chunk becomes zeros.
        %row_ahead = arith.addi %row, %stride_ahead : i32
        %row_ahead_live = arith.cmpi sle, %row_ahead, %last : i32
        %row_ahead_in = arith.minsi %row_ahead, %last : i32
        %row_ahead_index = arith.index_castui %row_ahead_in : i32 to index
        // Each chunk
        %keep_ahead_0 = arith.andi %inside_0, %row_ahead_live : i1
        %size_0 = arith.select %keep_ahead_0, %v, %c0 : index
        %dy_copy_0 = "nvgpu.device_async_copy"(%dy_staged, %fill, %group, %col_0, %dy, %row_ahead_index, %col_0, %size_0)
            <{bypassL1, dstElements = #vector, operandSegmentSizes = array<i32: 1, 3, 1, 2, 1>}>
            : (!dy_staged, index, index, index, !dy_rows, index, index, index) -> !nvgpu.device.async.token
        %x_copy_0 = "nvgpu.device_async_copy"(%x_staged, %fill, %group, %col_0, %x, %row_ahead_index, %col_0, %size_0)
            <{bypassL1, dstElements = #vector, operandSegmentSizes = array<i32: 1, 3, 1, 2, 1>}>
            : (!x_staged, index, index, index, !x_rows, index, index, index) -> !nvgpu.device.async.token
        // End
        %copies = nvgpu.device_async_create_group
        "nvvm.cp.async.wait.group"() <{n = #ahead_i32}> : () -> ()

        %begun = arith.cmpi sge, %base, %first : i32
        %after:6 = scf.if %begun -> (!share, !share, !acc, !acc, index, index) {
          %row_live = arith.cmpi sle, %row, %last : i32
          %row_index = arith.index_castui %row : i32 to index
          // A row past the end has been copied as zeros; with these it counts for nothing.
          %mean_row = arith.select %row_live, %mean_loaded, %zero : !acc
          %rstd_row = arith.select %row_live, %rstd_loaded, %zero : !acc
          %mean_v = vector.broadcast %mean_row : !acc to !chunk
          %rstd_v = vector.broadcast %rstd_row : !acc to !chunk

          %row_next = arith.addi %row, %stride : i32
          %row_next_in = arith.minsi %row_next, %last : i32
          %row_next_index = arith.index_castui %row_next_in : i32 to index
          %mean_next = memref.load %mean[%row_next_index] : !acc_column
          %rstd_next = memref.load %rstd[%row_next_index] : !acc_column

          // Row sums of this thread's chunks: h and h * xhat.
          // -0.0 changes no number that it is added to.
          %sum_h_0 = arith.constant dense<-0.0> : !chunk
          %sum_hx_0 = arith.constant dense<-0.0> : !chunk
          // Each chunk
          %dy_0 = vector.load %dy_staged[%slot, %group, %col_0] : !dy_staged, !dy_chunk
          %x_0 = vector.load %x_staged[%slot, %group, %col_0] : !x_staged, !x_chunk
          %gamma_0 = vector.load %gamma_staged[%col_0] : !gamma_staged, !gamma_chunk
          %dya_0 = arith.extf %dy_0 : !dy_chunk to !chunk
          %xa_0 = arith.extf %x_0 : !x_chunk to !chunk
          %ga_0 = arith.extf %gamma_0 : !gamma_chunk to !chunk
          %centred_0 = arith.subf %xa_0, %mean_v : !chunk
          %xhat_0 = arith.mulf %centred_0, %rstd_v : !chunk
          %h_0 = arith.mulf %dya_0, %ga_0 : !chunk
          %sum_h_1 = arith.addf %sum_h_0, %h_0 : !chunk
          %sum_hx_1 = math.fma %h_0, %xhat_0, %sum_hx_0 : !chunk
          // End
          // Any order of these additions will do, as long as it is always the same one.
          %thread_h = vector.reduction <add>, %sum_h_1 fastmath<reassoc> : !chunk into !acc
          %thread_hx = vector.reduction <add>, %sum_hx_1 fastmath<reassoc> : !chunk into !acc
          %warp_h = gpu.subgroup_reduce add %thread_h cluster(size = 32) : (!acc) -> !acc
          %warp_hx = gpu.subgroup_reduce add %thread_hx cluster(size = 32) : (!acc) -> !acc

          // Across warps: through one of two buffers in turn, so that one barrier a row is enough.
          %warp_pair = vector.from_elements %warp_h, %warp_hx : !pair
          scf.if %leads {
            vector.store %warp_pair, %exchange[%half, %group, %warp, %c0] : !exchange, !pair
          }
          gpu.barrier
          %pairs = vector.transfer_read %exchange[%half, %group, %c0, %c0], %zero {in_bounds = [true, true]} : !exchange, !warp_sums
          %pair = vector.multi_reduction <add>, %pairs, %zero_pair [0] : !warp_sums to !pair
          %row_h = vector.extract %pair[0] : !acc from !pair
          %row_hx = vector.extract %pair[1] : !acc from !pair
          // End

          // dx = rstd * h - rstd * mean_N(h) - xhat * rstd * mean_N(h * xhat)
          %scale = arith.mulf %rstd_row, %inv_n : !acc
          %minus_scale = arith.negf %scale : !acc
          %shift_h = arith.mulf %row_h, %minus_scale : !acc
          %shift_hx = arith.mulf %row_hx, %minus_scale : !acc
          %shift_h_v = vector.broadcast %shift_h : !acc to !chunk
          %shift_hx_v = vector.broadcast %shift_hx : !acc to !chunk
          %all_lanes = arith.constant -1 : i32
          // Each chunk
          nvvm.bar.warp.sync %all_lanes : i32  // again: keeps ptxas from loading all chunks first
          %dy_again_0 = vector.load %dy_staged[%slot, %group, %col_0] : !dy_staged, !dy_chunk
          %x_again_0 = vector.load %x_staged[%slot, %group, %col_0] : !x_staged, !x_chunk
          %gamma_again_0 = vector.load %gamma_staged[%col_0] : !gamma_staged, !gamma_chunk
          %dyb_0 = arith.extf %dy_again_0 : !dy_chunk to !chunk
          %xb_0 = arith.extf %x_again_0 : !x_chunk to !chunk
          %gb_0 = arith.extf %gamma_again_0 : !gamma_chunk to !chunk
          %centred_again_0 = arith.subf %xb_0, %mean_v : !chunk
          %xhat_again_0 = arith.mulf %centred_again_0, %rstd_v : !chunk
          %h_again_0 = arith.mulf %dyb_0, %gb_0 : !chunk
          %shifted_0 = math.fma %h_again_0, %rstd_v, %shift_h_v : !chunk
          %dxa_0 = math.fma %xhat_again_0, %shift_hx_v, %shifted_0 : !chunk
          %dx_0 = llvm.fptrunc %dxa_0 : !chunk to !x_chunk
          %keep_0 = arith.andi %inside_0, %row_live : i1
          scf.if %keep_0 {
            vector.store %dx_0, %dx[%row_index, %col_0] : !x_rows, !x_chunk
          }
          %dgamma_old_0 = vector.extract %dgamma_0[0] : !chunk from !share
          %dgamma_new_0 = math.fma %dyb_0, %xhat_again_0, %dgamma_old_0 : !chunk
          %dgamma_1 = vector.insert %dgamma_new_0, %dgamma_0[0] : !chunk into !share
          %dbeta_old_0 = vector.extract %dbeta_0[0] : !chunk from !share
          %dbeta_new_0 = arith.addf %dbeta_old_0, %dyb_0 : !chunk
          %dbeta_1 = vector.insert %dbeta_new_0, %dbeta_0[0] : !chunk into !share
          // End

          %half_next = arith.xori %half, %c1 : index
          scf.yield %dgamma_1, %dbeta_1, %mean_next, %rstd_next, %slot, %half_next : !share, !share, !acc, !acc, index, index
        } else {
          scf.yield %dgamma_0, %dbeta_0, %mean_loaded, %rstd_loaded, %slot, %half : !share, !share, !acc, !acc, index, index
        }
        scf.yield %after#0, %after#1, %after#2, %after#3, %after#4, %after#5 : !share, !share, !acc, !acc, index, index
      }
      nvvm.cp.async.wait.group 0

      // The groups' sums become one partial row, in the memory that the rows have left.
      %group_sums = memref.view %dy_bytes[%c0][] : !dy_bytes to !group_sums
      %workgroup_threads = arith.muli %t_count, %groups : index
      gpu.barrier
      // Each chunk
      %dgamma_sum_0 = vector.extract %sums#0[0] : !chunk from !share
      vector.store %dgamma_sum_0, %group_sums[%group, %col_0] : !group_sums, !chunk
      // End
      gpu.barrier
      scf.for %column = %thread to %n step %workgroup_threads {
        %total = scf.for %g = %c0 to %groups step %c1 iter_args(%sum = %zero) -> (!acc) {
          %group_sum = memref.load %group_sums[%g, %column] : !group_sums
          %more = arith.addf %sum, %group_sum : !acc
          scf.yield %more : !acc
        }
        memref.store %total, %dgamma_partials[%workgroup, %column] : !acc_rows
      }
      gpu.barrier
      // Each chunk
      %dbeta_sum_0 = vector.extract %sums#1[0] : !chunk from !share
      vector.store %dbeta_sum_0, %group_sums[%group, %col_0] : !group_sums, !chunk
      // End
      gpu.barrier
      scf.for %column = %thread to %n step %workgroup_threads {
        %total = scf.for %g = %c0 to %groups step %c1 iter_args(%sum = %zero) -> (!acc) {
          %group_sum = memref.load %group_sums[%g, %column] : !group_sums
          %more = arith.addf %sum, %group_sum : !acc
          scf.yield %more : !acc
        }
        memref.store %total, %dbeta_partials[%workgroup, %column] : !acc_rows
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
  %dx, %dgamma_partials, %dbeta_partials = flow.dispatch @rows::@rows[%m](%m_i32, %dy, %x, %mean, %rstd, %gamma)
      : (i32, !dy_mn{%m}, !x_mn{%m}, !acc_m{%m}, !acc_m{%m}, !gamma_n) -> (!x_mn{%m}, !partials_pn, !partials_pn)
  %dgamma, %dbeta = flow.dispatch @finalize::@finalize(%p_i32, %dgamma_partials, %dbeta_partials)
      : (i32, !partials_pn, !partials_pn) -> (!gamma_n, !beta_n)
  return %dx, %dgamma, %dbeta : !x_mn, !gamma_n, !beta_n
}
