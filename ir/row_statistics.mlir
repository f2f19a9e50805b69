// mean and rstd = 1 / sqrt(var + eps) of every row on a GPU, for a caller that has none. This kernel runs
// before the kernels that read them. The variance is biased and is computed from centred values: the mean
// of squares minus the square of the mean would cancel.
//
// x has M rows of N columns. A group of threads has a row, and reads it twice, the second time from the
// cache. Where rows are narrow, a workgroup has several groups. Several chunks of a row are loaded at
// once: the loops over them are unrolled.

// What a NormSpec and a Schedule decide. These lines are replaced; the rest changes only by the rules
// of README.md.
!x = bf16
!acc = f32
#inv_n = 2.44140625e-4 : !acc
#eps = 1.0e-5 : !acc
#columns = 4096 : index           // N
#subgroup = 32 : index
#statistics_vector = 8 : index    // neighbours that a thread handles together
#statistics_threads = 256 : index // of a row
#statistics_rows = 1 : index      // of a workgroup
#statistics_chunks = 2 : index    // that a thread reads at once
#statistics_alone = false         // one subgroup has a row
#statistics_kernel = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline workgroup_size = [256, 1, 1] subgroup_size = 32>
!x_rows = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!acc_column = memref<?x!acc, #hal.descriptor_type<storage_buffer>>
!statistics_x = vector<8x!x>
!statistics_chunk = vector<8x!acc>
!statistics_exchange = memref<2x1x8x!acc, #gpu.address_space<workgroup>>
!statistics_warps = vector<8x!acc>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
// The launch, as iree_lnbwd/launches.py states it: the bindings, and the workgroups for M rows, the least
// number of a list.
#row_statistics_layout = #hal.pipeline.layout<constants = 1, bindings = [
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // x [M, N]
  #hal.pipeline.binding<storage_buffer>,            // mean [M]
  #hal.pipeline.binding<storage_buffer>             // rstd [M]
]>
#row_statistics_x = affine_map<()[m] -> (m ceildiv 1)>
// End of what is replaced.

hal.executable.source private @row_statistics {
  hal.executable.export public @row_statistics ordinal(0) layout(#row_statistics_layout)
      count(%device: !hal.device, %m: index) -> (index, index, index) {
    %x = affine.min #row_statistics_x()[%m]
    %one = arith.constant 1 : index
    hal.return %x, %one, %one : index, index, index
  }
  builtin.module {
    // From ir/math/.
    func.func private @widen(!statistics_x) -> !statistics_chunk

    func.func @row_statistics() attributes {translation_info = #statistics_kernel} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %n = arith.constant #columns
      %v = arith.constant #statistics_vector
      %t_count = arith.constant #statistics_threads
      %rows = arith.constant #statistics_rows
      %chunks_at_once = arith.constant #statistics_chunks
      %alone = arith.constant #statistics_alone
      %lanes = arith.constant #subgroup
      %zero = arith.constant 0.0 : !acc
      %one = arith.constant 1.0 : !acc
      %zeros = arith.constant dense<0.0> : !statistics_chunk
      %inv_n = arith.constant #inv_n
      %eps = arith.constant #eps

      %m_i32 = hal.interface.constant.load layout(#row_statistics_layout) ordinal(0) : i32
      %m = arith.index_castui %m_i32 : i32 to index
      %x = hal.interface.binding.subspan layout(#row_statistics_layout) binding(0) alignment(64) offset(%c0) flags(ReadOnly) : !x_rows{%m}
      %mean = hal.interface.binding.subspan layout(#row_statistics_layout) binding(1) alignment(64) offset(%c0) : !acc_column{%m}
      %rstd = hal.interface.binding.subspan layout(#row_statistics_layout) binding(2) alignment(64) offset(%c0) : !acc_column{%m}

      // Groups past the last row read the last row, and store nothing.
      %workgroup = hal.interface.workgroup.id[0] : index
      %thread = gpu.thread_id x
      %group = arith.divui %thread, %t_count : index
      %t = arith.remui %thread, %t_count : index
      %first_row = arith.muli %workgroup, %rows : index
      %my_row = arith.addi %first_row, %group : index
      %last_row = arith.subi %m, %c1 : index
      %exists = arith.cmpi ule, %my_row, %last_row : index
      %row = arith.minui %my_row, %last_row : index
      %lane = arith.remui %t, %lanes : index
      %warp = arith.divui %t, %lanes : index
      %leads = arith.cmpi eq, %lane, %c0 : index
      %exchange = memref.alloc() : !statistics_exchange  // [(x, squares), groups, warps]

      // For a chunk past the end of the row, the row's first chunk is read, and is not added.
      %first = arith.muli %t, %v : index
      %neighbours = arith.muli %t_count, %v : index
      %stride = arith.muli %neighbours, %chunks_at_once : index
      %sum_x = scf.for %col_first = %first to %n step %stride iter_args(%sum = %zeros) -> (!statistics_chunk) {
        %step = scf.for %k = %c0 to %chunks_at_once step %c1 iter_args(%before = %sum) -> (!statistics_chunk) {
          %skipped = arith.muli %k, %neighbours : index
          %col = arith.addi %col_first, %skipped : index
          %inside = arith.cmpi ult, %col, %n : index
          %col_in = arith.select %inside, %col, %c0 : index
          %x_k = vector.load %x[%row, %col_in] : !x_rows, !statistics_x
          %xa = func.call @widen(%x_k) : (!statistics_x) -> !statistics_chunk
          %more = arith.addf %before, %xa : !statistics_chunk
          %after = arith.select %inside, %more, %before : !statistics_chunk
          scf.yield %after : !statistics_chunk
        } {llvm.loop_annotation = #unrolled}
        scf.yield %step : !statistics_chunk
      }
      // Any order of these additions will do, as long as it is always the same order.
      %thread_x = vector.reduction <add>, %sum_x fastmath<reassoc> : !statistics_chunk into !acc
      %warp_x = gpu.subgroup_reduce add %thread_x cluster(size = 32) : (!acc) -> !acc
      %row_x = scf.if %alone -> !acc {
        scf.yield %warp_x : !acc
      } else {
        scf.if %leads {
          memref.store %warp_x, %exchange[%c0, %group, %warp] : !statistics_exchange
        }
        gpu.barrier
        %warps_x = vector.transfer_read %exchange[%c0, %group, %c0], %zero {in_bounds = [true]} : !statistics_exchange, !statistics_warps
        %of_warps = vector.reduction <add>, %warps_x : !statistics_warps into !acc
        scf.yield %of_warps : !acc
      }
      %mean_row = arith.mulf %row_x, %inv_n : !acc
      %mean_v = vector.broadcast %mean_row : !acc to !statistics_chunk

      %sum_xx = scf.for %col_first = %first to %n step %stride iter_args(%sum = %zeros) -> (!statistics_chunk) {
        %step = scf.for %k = %c0 to %chunks_at_once step %c1 iter_args(%before = %sum) -> (!statistics_chunk) {
          %skipped = arith.muli %k, %neighbours : index
          %col = arith.addi %col_first, %skipped : index
          %inside = arith.cmpi ult, %col, %n : index
          %col_in = arith.select %inside, %col, %c0 : index
          %x_k = vector.load %x[%row, %col_in] : !x_rows, !statistics_x
          %xa = func.call @widen(%x_k) : (!statistics_x) -> !statistics_chunk
          %centred = arith.subf %xa, %mean_v : !statistics_chunk
          %more = math.fma %centred, %centred, %before : !statistics_chunk
          %after = arith.select %inside, %more, %before : !statistics_chunk
          scf.yield %after : !statistics_chunk
        } {llvm.loop_annotation = #unrolled}
        scf.yield %step : !statistics_chunk
      }
      %thread_xx = vector.reduction <add>, %sum_xx fastmath<reassoc> : !statistics_chunk into !acc
      %warp_xx = gpu.subgroup_reduce add %thread_xx cluster(size = 32) : (!acc) -> !acc
      %row_xx = scf.if %alone -> !acc {
        scf.yield %warp_xx : !acc
      } else {
        scf.if %leads {
          memref.store %warp_xx, %exchange[%c1, %group, %warp] : !statistics_exchange
        }
        gpu.barrier
        %warps_xx = vector.transfer_read %exchange[%c1, %group, %c0], %zero {in_bounds = [true]} : !statistics_exchange, !statistics_warps
        %of_warps = vector.reduction <add>, %warps_xx : !statistics_warps into !acc
        scf.yield %of_warps : !acc
      }
      %var = arith.mulf %row_xx, %inv_n : !acc
      %var_eps = arith.addf %var, %eps : !acc
      // The compiler would turn math.sqrt and a division into an approximate rsqrt.
      %std = llvm.call_intrinsic "llvm.sqrt"(%var_eps) : (!acc) -> !acc
      %rstd_row = arith.divf %one, %std : !acc
      %is_first = arith.cmpi eq, %t, %c0 : index
      %stores = arith.andi %is_first, %exists : i1
      scf.if %stores {
        memref.store %mean_row, %mean[%row] : !acc_column
        memref.store %rstd_row, %rstd[%row] : !acc_column
      }
      return
    }
  }
}
