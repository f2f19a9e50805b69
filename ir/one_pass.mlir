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
// A row is fetched a few steps ahead of its use, so that memory is busy while threads wait for each
// other: by cp.async into shared memory (NVIDIA since sm_80), or by loads into registers (any GPU). A
// Schedule says which, by constants; the compiler folds the branches that are not taken.

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
#copied = 8 : index          // V, where chunks are copied
#threads = 512 : index       // T
#threads_i32 = 512 : i32
#subgroup = 32 : index
#subgroup_i32 = 32 : i32
#groups = 1 : index
#groups_i32 = 1 : i32
#workgroups_i32 = 132 : i32
#workgroups = affine_map<()[m] -> (m ceildiv 1, 132)>
#resident = 1 : i32          // workgroups that shall fit a multiprocessor at once
#ahead_i32 = 2 : i32         // steps between a row's fetch and its use
#at_once = false             // none
#stages = true               // fetched by cp.async into shared memory
#slots = 3 : index           // rows of a group that shared memory holds
#in_place = false            // as many as are ahead: a chunk's slot is refilled once its dx is stored
#pending_i32 = 2 : i32       // copies that may be under way while a row is used
#rereads = false             // rows are taken from shared memory again for dx
#copies_weight = true        // the weight is kept in shared memory, where cp.async copies it to
#widens_weight = false       // it is kept there as an !acc
#gamma_copied = 8 : index    // V, where the weight is copied
#wants_dx = true             // the caller asks for it
#one_group = true
#one_warp = false
#rows_kernel = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline workgroup_size = [512, 1, 1] subgroup_size = 32>
!partials_pn = tensor<132x4096x!acc>
!dy_rows = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>
!x_rows = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
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
!exchange = memref<2x1x16x2x!acc, #gpu.address_space<workgroup>>
!warp_sums = vector<16x2x!acc>
!group_sums = memref<1x4096x!acc, #gpu.address_space<workgroup>>
!dy_chunk = vector<8x!dy>
!x_chunk = vector<8x!x>
!gamma_chunk = vector<8x!gamma>
!chunk = vector<8x!acc>
!dy_share = vector<1x8x!dy>  // a thread's chunks of a row
!x_share = vector<1x8x!x>
!share = vector<1x8x!acc>
// End of what is replaced.

!pair = vector<2x!acc>

#rows_layout = #hal.pipeline.layout<constants = 1, bindings = [
  #hal.pipeline.binding<storage_buffer>,            // dy
  #hal.pipeline.binding<storage_buffer>,            // x
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
      %groups_i32 = arith.constant #groups_i32
      %threads_i32 = arith.constant #threads_i32
      %p_i32 = arith.constant #workgroups_i32
      %slots = arith.constant #slots
      %ahead_i32 = arith.constant #ahead_i32
      %at_once = arith.constant #at_once
      %stages = arith.constant #stages
      %in_place = arith.constant #in_place
      %rereads = arith.constant #rereads
      %copies_weight = arith.constant #copies_weight
      %widens_weight = arith.constant #widens_weight
      %wants_dx = arith.constant #wants_dx
      %one_group = arith.constant #one_group
      %one_warp = arith.constant #one_warp
      %zero_i32 = arith.constant 0 : i32
      %lanes_i32 = arith.constant #subgroup_i32
      %one_i32 = arith.constant 1 : i32
      %all_lanes = arith.constant -1 : i32
      %zero = arith.constant 0.0 : !acc
      %zero_pair = arith.constant dense<0.0> : !pair
      %zeros = arith.constant dense<0.0> : !share
      %inv_n = arith.constant #inv_n
      %zero_dy = arith.constant dense<0.0> : !dy_chunk
      %zero_x = arith.constant dense<0.0> : !x_chunk
      %zero_gamma = arith.constant dense<0.0> : !gamma_chunk

      %m_i32 = hal.interface.constant.load layout(#rows_layout) ordinal(0) : i32
      %m = arith.index_castui %m_i32 : i32 to index
      %dy = hal.interface.binding.subspan layout(#rows_layout) binding(0) alignment(64) offset(%c0) : !dy_rows{%m}
      %x = hal.interface.binding.subspan layout(#rows_layout) binding(1) alignment(64) offset(%c0) : !x_rows{%m}
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
      // All lanes of a subgroup are in the same group. The shuffle tells ptxas so: then it knows that
      // they stay together.
      %group_i32 = scf.if %one_group -> i32 {
        scf.yield %zero_i32 : i32
      } else {
        %group_mine = arith.index_castui %group : index to i32
        %group_first, %there = gpu.shuffle idx %group_mine, %zero_i32, %lanes_i32 : i32
        scf.yield %group_first : i32
      }
      %workgroup_first = arith.muli %workgroup_i32, %groups_i32 : i32
      %first = arith.addi %workgroup_first, %group_i32 : i32
      %stride = arith.muli %p_i32, %groups_i32 : i32
      %last = arith.subi %m_i32, %one_i32 : i32

      // Every thread reads back only what it has stored or copied itself, so that no barrier is needed.
      %dy_bytes = memref.alloc() : !dy_bytes
      %x_bytes = memref.alloc() : !x_bytes
      %dy_staged = memref.view %dy_bytes[%c0][] : !dy_bytes to !dy_staged
      %x_staged = memref.view %x_bytes[%c0][] : !x_bytes to !x_staged
      %gamma_staged = memref.alloc() : !gamma_staged
      %wide_staged = memref.alloc() : !wide_staged
      %exchange = memref.alloc() : !exchange

      // A chunk past the end of the row is all zeros and is never stored.
      // Each chunk
      %k_0 = arith.constant 0 : index
      %chunk_0 = arith.muli %k_0, %t_count : index
      %mine_0 = arith.addi %chunk_0, %t : index
      %col_0 = arith.muli %mine_0, %v : index
      %inside_0 = arith.cmpi ult, %col_0, %n : index
      %col_in_0 = arith.select %inside_0, %col_0, %c0 : index
      %gamma_0 = scf.if %copies_weight -> !gamma_chunk {
        %gamma_size_0 = arith.select %inside_0, %v, %c0 : index
        %gamma_copy_0 = "nvgpu.device_async_copy"(%gamma_staged, %group, %col_0, %gamma, %col_0, %gamma_size_0)
            <{bypassL1, dstElements = #gamma_copied, operandSegmentSizes = array<i32: 1, 2, 1, 1, 1>}>
            : (!gamma_staged, index, index, !gamma_row, index, index) -> !nvgpu.device.async.token
        scf.yield %zero_gamma : !gamma_chunk
      } else {
        %gamma_read_0 = vector.load %gamma[%col_in_0] : !gamma_row, !gamma_chunk
        %gamma_in_0 = arith.select %inside_0, %gamma_read_0, %zero_gamma : !gamma_chunk
        scf.yield %gamma_in_0 : !gamma_chunk
      }
      // End

      // The first rows are fetched before anything else. A copy past the end of the columns or of the
      // rows reads nothing and writes zeros. Copies of less than 16 bytes pass through the L1 cache. It
      // has the memory that shared memory leaves, so more slots may slow such copies down.
      %first_in = arith.minsi %first, %last : i32
      %first_index = arith.index_castui %first_in : i32 to index
      scf.if %stages {
        scf.for %step = %zero_i32 to %ahead_i32 step %one_i32 : i32 {
          %slot_early = arith.index_castui %step : i32 to index
          %rows_on = arith.muli %step, %stride : i32
          %row_early = arith.addi %first, %rows_on : i32
          %row_early_live = arith.cmpi sle, %row_early, %last : i32
          %row_early_in = arith.minsi %row_early, %last : i32
          %row_early_index = arith.index_castui %row_early_in : i32 to index
          // Each chunk
          %keep_early_0 = arith.andi %inside_0, %row_early_live : i1
          %size_early_0 = arith.select %keep_early_0, %v, %c0 : index
          %dy_early_0 = "nvgpu.device_async_copy"(%dy_staged, %slot_early, %group, %col_0, %dy, %row_early_index, %col_0, %size_early_0)
              <{bypassL1, dstElements = #copied, operandSegmentSizes = array<i32: 1, 3, 1, 2, 1>}>
              : (!dy_staged, index, index, index, !dy_rows, index, index, index) -> !nvgpu.device.async.token
          %x_early_0 = "nvgpu.device_async_copy"(%x_staged, %slot_early, %group, %col_0, %x, %row_early_index, %col_0, %size_early_0)
              <{bypassL1, dstElements = #copied, operandSegmentSizes = array<i32: 1, 3, 1, 2, 1>}>
              : (!x_staged, index, index, index, !x_rows, index, index, index) -> !nvgpu.device.async.token
          // End
          %copies_early = nvgpu.device_async_create_group
        }
      }
      %mean_first = memref.load %mean[%first_index] : !acc_column
      %rstd_first = memref.load %rstd[%first_index] : !acc_column
      %dy_first_0 = arith.constant dense<0.0> : !dy_share
      %x_first_0 = arith.constant dense<0.0> : !x_share
      // Each chunk
      %fetched_first_0:2 = scf.if %stages -> (!dy_chunk, !x_chunk) {
        scf.yield %zero_dy, %zero_x : !dy_chunk, !x_chunk
      } else {
        %dy_load_0 = vector.load %dy[%first_index, %col_in_0] : !dy_rows, !dy_chunk
        %x_load_0 = vector.load %x[%first_index, %col_in_0] : !x_rows, !x_chunk
        scf.yield %dy_load_0, %x_load_0 : !dy_chunk, !x_chunk
      }
      %dy_first_1 = vector.insert %fetched_first_0#0, %dy_first_0[0] : !dy_chunk into !dy_share
      %x_first_1 = vector.insert %fetched_first_0#1, %x_first_0[0] : !x_chunk into !x_share
      scf.if %widens_weight {
        %gamma_wide_0 = arith.extf %gamma_0 : !gamma_chunk to !chunk
        vector.store %gamma_wide_0, %wide_staged[%group, %col_0] : !wide_staged, !chunk
      }
      // End

      // Each step uses a row and fetches another, so many rows ahead. Groups walk by themselves: each
      // waits at a barrier of its own.
      %stride_ahead = arith.muli %ahead_i32, %stride : i32
      %ahead = arith.index_castui %ahead_i32 : i32 to index
      %fill_first = arith.select %in_place, %c0, %ahead : index
      %sums:8 = scf.for %row = %first to %m_i32 step %stride
          iter_args(%dgamma_0 = %zeros, %dbeta_0 = %zeros, %mean_row = %mean_first, %rstd_row = %rstd_first,
                    %dy_ahead = %dy_first_1, %x_ahead = %x_first_1, %fill = %fill_first, %half = %c0)
          -> (!share, !share, !acc, !acc, !dy_share, !x_share, index, index) : i32 {
        %fill_after = arith.addi %fill, %c1 : index
        %wraps = arith.cmpi eq, %fill_after, %slots : index
        %fill_next = arith.select %wraps, %c0, %fill_after : index
        %slot = arith.select %in_place, %fill, %fill_next : index

        // Statistics of the row after this one: asked for a whole step ahead of their use.
        %row_next = arith.addi %row, %stride : i32
        %row_next_in = arith.minsi %row_next, %last : i32
        %row_next_index = arith.index_castui %row_next_in : i32 to index
        %mean_next = memref.load %mean[%row_next_index] : !acc_column
        %rstd_next = memref.load %rstd[%row_next_index] : !acc_column

        // In place, copies wait for the dx of the row that they overwrite.
        %row_ahead = arith.addi %row, %stride_ahead : i32
        %row_ahead_live = arith.cmpi sle, %row_ahead, %last : i32
        %row_ahead_in = arith.minsi %row_ahead, %last : i32
        %row_ahead_index = arith.index_castui %row_ahead_in : i32 to index
        %dy_next_0 = arith.constant dense<0.0> : !dy_share
        %x_next_0 = arith.constant dense<0.0> : !x_share
        // Each chunk
        %keep_ahead_0 = arith.andi %inside_0, %row_ahead_live : i1
        %size_0 = arith.select %keep_ahead_0, %v, %c0 : index
        %fetched_0:2 = scf.if %stages -> (!dy_chunk, !x_chunk) {
          scf.if %in_place {
          } else {
            %dy_copy_0 = "nvgpu.device_async_copy"(%dy_staged, %fill, %group, %col_0, %dy, %row_ahead_index, %col_0, %size_0)
                <{bypassL1, dstElements = #copied, operandSegmentSizes = array<i32: 1, 3, 1, 2, 1>}>
                : (!dy_staged, index, index, index, !dy_rows, index, index, index) -> !nvgpu.device.async.token
            %x_copy_0 = "nvgpu.device_async_copy"(%x_staged, %fill, %group, %col_0, %x, %row_ahead_index, %col_0, %size_0)
                <{bypassL1, dstElements = #copied, operandSegmentSizes = array<i32: 1, 3, 1, 2, 1>}>
                : (!x_staged, index, index, index, !x_rows, index, index, index) -> !nvgpu.device.async.token
          }
          scf.yield %zero_dy, %zero_x : !dy_chunk, !x_chunk
        } else {
          %dy_read_0 = vector.load %dy[%row_ahead_index, %col_in_0] : !dy_rows, !dy_chunk
          %x_read_0 = vector.load %x[%row_ahead_index, %col_in_0] : !x_rows, !x_chunk
          scf.yield %dy_read_0, %x_read_0 : !dy_chunk, !x_chunk
        }
        %dy_next_1 = vector.insert %fetched_0#0, %dy_next_0[0] : !dy_chunk into !dy_share
        %x_next_1 = vector.insert %fetched_0#1, %x_next_0[0] : !x_chunk into !x_share
        // End
        scf.if %stages {
          scf.if %in_place {
          } else {
            %copies = nvgpu.device_async_create_group
          }
          "nvvm.cp.async.wait.group"() <{n = #pending_i32}> : () -> ()
        }

        %row_index = arith.index_castui %row : i32 to index
        %mean_v = vector.broadcast %mean_row : !acc to !chunk
        %rstd_v = vector.broadcast %rstd_row : !acc to !chunk

        // Row sums of this thread's chunks: h and h * xhat.
        // -0.0 changes no number that it is added to.
        %sum_h_0 = arith.constant dense<-0.0> : !chunk
        %sum_hx_0 = arith.constant dense<-0.0> : !chunk
        // Each chunk
        scf.if %rereads {
          nvvm.bar.warp.sync %all_lanes : i32  // keeps ptxas from loading all chunks first
        }
        %taken_0:2 = scf.if %stages -> (!dy_chunk, !x_chunk) {
          %dy_copied_0 = vector.load %dy_staged[%slot, %group, %col_0] : !dy_staged, !dy_chunk
          %x_copied_0 = vector.load %x_staged[%slot, %group, %col_0] : !x_staged, !x_chunk
          scf.yield %dy_copied_0, %x_copied_0 : !dy_chunk, !x_chunk
        } else {
          %dy_held = arith.select %at_once, %dy_next_1, %dy_ahead : !dy_share
          %x_held = arith.select %at_once, %x_next_1, %x_ahead : !x_share
          %dy_mine_0 = vector.extract %dy_held[0] : !dy_chunk from !dy_share
          %x_mine_0 = vector.extract %x_held[0] : !x_chunk from !x_share
          %dy_in_0 = arith.select %inside_0, %dy_mine_0, %zero_dy : !dy_chunk
          %x_in_0 = arith.select %inside_0, %x_mine_0, %zero_x : !x_chunk
          scf.yield %dy_in_0, %x_in_0 : !dy_chunk, !x_chunk
        }
        %ga_0 = scf.if %widens_weight -> !chunk {
          %wide_0 = vector.load %wide_staged[%group, %col_0] : !wide_staged, !chunk
          scf.yield %wide_0 : !chunk
        } else {
          %weight_0 = scf.if %copies_weight -> !gamma_chunk {
            %gamma_copied_0 = vector.load %gamma_staged[%group, %col_0] : !gamma_staged, !gamma_chunk
            scf.yield %gamma_copied_0 : !gamma_chunk
          } else {
            scf.yield %gamma_0 : !gamma_chunk
          }
          %widened_0 = arith.extf %weight_0 : !gamma_chunk to !chunk
          scf.yield %widened_0 : !chunk
        }
        %dya_0 = arith.extf %taken_0#0 : !dy_chunk to !chunk
        %xa_0 = arith.extf %taken_0#1 : !x_chunk to !chunk
        %centred_0 = arith.subf %xa_0, %mean_v : !chunk
        %xhat_0 = arith.mulf %centred_0, %rstd_v : !chunk
        %h_0 = arith.mulf %dya_0, %ga_0 : !chunk
        %sum_h_1 = arith.addf %sum_h_0, %h_0 : !chunk
        %sum_hx_1 = math.fma %h_0, %xhat_0, %sum_hx_0 : !chunk
        // End
        %row_sums:2 = scf.if %wants_dx -> (!acc, !acc) {
          // Any order of these additions will do, as long as it is always the same one.
          %thread_h = vector.reduction <add>, %sum_h_1 fastmath<reassoc> : !chunk into !acc
          %thread_hx = vector.reduction <add>, %sum_hx_1 fastmath<reassoc> : !chunk into !acc
          %warp_h = gpu.subgroup_reduce add %thread_h cluster(size = 32) : (!acc) -> !acc
          %warp_hx = gpu.subgroup_reduce add %thread_hx cluster(size = 32) : (!acc) -> !acc

          // Across warps: through one of two buffers in turn, so that one barrier a row is enough.
          %group_sums:2 = scf.if %one_warp -> (!acc, !acc) {
            scf.yield %warp_h, %warp_hx : !acc, !acc
          } else {
            %warp_pair = vector.from_elements %warp_h, %warp_hx : !pair
            scf.if %leads {
              vector.store %warp_pair, %exchange[%half, %group, %warp, %c0] : !exchange, !pair
            }
            scf.if %one_group {
              gpu.barrier
            } else {
              %group_barrier = arith.addi %group_i32, %one_i32 : i32  // the workgroup's is 0
              nvvm.barrier id = %group_barrier number_of_threads = %threads_i32
            }
            %pairs = vector.transfer_read %exchange[%half, %group, %c0, %c0], %zero {in_bounds = [true, true]} : !exchange, !warp_sums
            %pair = vector.multi_reduction <add>, %pairs, %zero_pair [0] : !warp_sums to !pair
            %group_h = vector.extract %pair[0] : !acc from !pair
            %group_hx = vector.extract %pair[1] : !acc from !pair
            scf.yield %group_h, %group_hx : !acc, !acc
          }
          scf.yield %group_sums#0, %group_sums#1 : !acc, !acc
        } else {
          scf.yield %zero, %zero : !acc, !acc
        }

        // dx = rstd * h - rstd * mean_N(h) - xhat * rstd * mean_N(h * xhat)
        %scale = arith.mulf %rstd_row, %inv_n : !acc
        %minus_scale = arith.negf %scale : !acc
        %shift_h = arith.mulf %row_sums#0, %minus_scale : !acc
        %shift_hx = arith.mulf %row_sums#1, %minus_scale : !acc
        %shift_h_v = vector.broadcast %shift_h : !acc to !chunk
        %shift_hx_v = vector.broadcast %shift_hx : !acc to !chunk
        // Each chunk
        %again_0:3 = scf.if %rereads -> (!chunk, !chunk, !chunk) {
          nvvm.bar.warp.sync %all_lanes : i32
          %dy_again_0 = vector.load %dy_staged[%slot, %group, %col_0] : !dy_staged, !dy_chunk
          %x_again_0 = vector.load %x_staged[%slot, %group, %col_0] : !x_staged, !x_chunk
          %ga_again_0 = scf.if %widens_weight -> !chunk {
            %wide_again_0 = vector.load %wide_staged[%group, %col_0] : !wide_staged, !chunk
            scf.yield %wide_again_0 : !chunk
          } else {
            %weight_again_0 = scf.if %copies_weight -> !gamma_chunk {
              %gamma_again_0 = vector.load %gamma_staged[%group, %col_0] : !gamma_staged, !gamma_chunk
              scf.yield %gamma_again_0 : !gamma_chunk
            } else {
              scf.yield %gamma_0 : !gamma_chunk
            }
            %widened_again_0 = arith.extf %weight_again_0 : !gamma_chunk to !chunk
            scf.yield %widened_again_0 : !chunk
          }
          %dyb_0 = arith.extf %dy_again_0 : !dy_chunk to !chunk
          %xb_0 = arith.extf %x_again_0 : !x_chunk to !chunk
          %centred_again_0 = arith.subf %xb_0, %mean_v : !chunk
          %xhat_again_0 = arith.mulf %centred_again_0, %rstd_v : !chunk
          %h_again_0 = arith.mulf %dyb_0, %ga_again_0 : !chunk
          scf.yield %dyb_0, %xhat_again_0, %h_again_0 : !chunk, !chunk, !chunk
        } else {
          scf.yield %dya_0, %xhat_0, %h_0 : !chunk, !chunk, !chunk
        }
        %shifted_0 = math.fma %again_0#2, %rstd_v, %shift_h_v : !chunk
        %dxa_0 = math.fma %again_0#1, %shift_hx_v, %shifted_0 : !chunk
        %dx_0 = llvm.fptrunc %dxa_0 : !chunk to !x_chunk
        %store_0 = arith.andi %inside_0, %wants_dx : i1
        scf.if %store_0 {
          vector.store %dx_0, %dx[%row_index, %col_0] : !x_rows, !x_chunk
        }
        scf.if %in_place {
          %dy_refill_0 = "nvgpu.device_async_copy"(%dy_staged, %fill, %group, %col_0, %dy, %row_ahead_index, %col_0, %size_0)
              <{bypassL1, dstElements = #copied, operandSegmentSizes = array<i32: 1, 3, 1, 2, 1>}>
              : (!dy_staged, index, index, index, !dy_rows, index, index, index) -> !nvgpu.device.async.token
          %x_refill_0 = "nvgpu.device_async_copy"(%x_staged, %fill, %group, %col_0, %x, %row_ahead_index, %col_0, %size_0)
              <{bypassL1, dstElements = #copied, operandSegmentSizes = array<i32: 1, 3, 1, 2, 1>}>
              : (!x_staged, index, index, index, !x_rows, index, index, index) -> !nvgpu.device.async.token
        }
        %dgamma_old_0 = vector.extract %dgamma_0[0] : !chunk from !share
        %dgamma_new_0 = math.fma %again_0#0, %again_0#1, %dgamma_old_0 : !chunk
        %dgamma_1 = vector.insert %dgamma_new_0, %dgamma_0[0] : !chunk into !share
        %dbeta_old_0 = vector.extract %dbeta_0[0] : !chunk from !share
        %dbeta_new_0 = arith.addf %dbeta_old_0, %again_0#0 : !chunk
        %dbeta_1 = vector.insert %dbeta_new_0, %dbeta_0[0] : !chunk into !share
        // End

        scf.if %in_place {
          %refills = nvgpu.device_async_create_group
        }
        %half_next = arith.xori %half, %c1 : index
        scf.yield %dgamma_1, %dbeta_1, %mean_next, %rstd_next, %dy_next_1, %x_next_1, %fill_next, %half_next
            : !share, !share, !acc, !acc, !dy_share, !x_share, index, index
      }
      scf.if %stages {
        nvvm.cp.async.wait.group 0
      }

      scf.if %one_group {
        // Each chunk
        %dgamma_mine_0 = vector.extract %sums#0[0] : !chunk from !share
        %dbeta_mine_0 = vector.extract %sums#1[0] : !chunk from !share
        scf.if %inside_0 {
          vector.store %dgamma_mine_0, %dgamma_partials[%workgroup, %col_0] : !acc_rows, !chunk
          vector.store %dbeta_mine_0, %dbeta_partials[%workgroup, %col_0] : !acc_rows, !chunk
        }
        // End
      } else {
        // The groups' sums become one partial row, dgamma's and then dbeta's, in the memory that rows of
        // dy have left.
        %group_sums = memref.view %dy_bytes[%c0][] : !dy_bytes to !group_sums
        %workgroup_threads = arith.muli %t_count, %groups : index
        %column_first = arith.muli %thread, %v : index
        %column_step = arith.muli %workgroup_threads, %v : index
        %zero_sums = arith.constant dense<0.0> : !chunk
        %c2 = arith.constant 2 : index
        scf.for %which = %c0 to %c2 step %c1 {
          %is_dgamma = arith.cmpi eq, %which, %c0 : index
          %share = arith.select %is_dgamma, %sums#0, %sums#1 : !share
          gpu.barrier
          // Each chunk
          %share_0 = vector.extract %share[0] : !chunk from !share
          vector.store %share_0, %group_sums[%group, %col_0] : !group_sums, !chunk
          // End
          gpu.barrier
          scf.for %column = %column_first to %n step %column_step {
            %total = scf.for %g = %c0 to %groups step %c1 iter_args(%sum = %zero_sums) -> (!chunk) {
              %group_sum = vector.load %group_sums[%g, %column] : !group_sums, !chunk
              %more = arith.addf %sum, %group_sum : !chunk
              scf.yield %more : !chunk
            }
            scf.if %is_dgamma {
              vector.store %total, %dgamma_partials[%workgroup, %column] : !acc_rows, !chunk
            } else {
              vector.store %total, %dbeta_partials[%workgroup, %column] : !acc_rows, !chunk
            }
          }
        }
      }

      // Never taken. Without a store LLVM finds these to be read-only, and ptxas moves their loads, which
      // are made ahead of their use, behind the barrier that they are to overlap with.
      %never = arith.cmpi slt, %m_i32, %one_i32 : i32
      scf.if %never {
        vector.store %zero_dy, %dy[%c0, %c0] : !dy_rows, !dy_chunk
        vector.store %zero_x, %x[%c0, %c0] : !x_rows, !x_chunk
        memref.store %zero, %mean[%c0] : !acc_column
        memref.store %zero, %rstd[%c0] : !acc_column
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
  %dx, %dgamma_partials, %dbeta_partials = flow.dispatch @rows::@rows[%m](%m_i32, %dy, %x, %mean, %rstd, %gamma)
      : (i32, !dy_mn{%m}, !x_mn{%m}, !acc_m{%m}, !acc_m{%m}, !gamma_n) -> (!x_mn{%dx_m}, !partials_pn, !partials_pn)
  %dgamma, %dbeta = flow.dispatch @finalize::@finalize(%p_i32, %dgamma_partials, %dbeta_partials)
      : (i32, !partials_pn, !partials_pn) -> (!gamma_n, !beta_n)
  return %dx, %dgamma, %dbeta : !x_mn, !gamma_n, !beta_n
}
