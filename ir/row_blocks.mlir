// Layer and RMS normalization, backward, in one pass over memory: how the algorithms run on a CPU.
//
// x and dy have M rows of N columns. Each of P workgroups has a share of neighbouring rows, and one thread
// takes them in blocks of a few rows. A block is read from memory once, for the two sums of its rows. When
// dx, dgamma and dbeta are computed, the block is still in the cache. dgamma and dbeta accumulate in the
// workgroup's partial rows, which stay in the cache too; @finalize adds up the partial rows. M alone
// decides how rows are shared out, and the number of threads does not matter: the bits are the same every
// time.
//
// While dx is computed from one block, the next one comes from memory (#fetches_ahead). Otherwise memory
// would wait for arithmetic, and arithmetic for memory. The lines of dx are fetched while its row is summed.
//
// A row is divided into chunks of V neighbouring columns. Where V does not divide N, the last chunk begins
// V columns before the end. The columns that it shares with the chunk before count for nothing in sums.
//
// No sum is long, because rounding errors of the same sign, such as those of equal numbers, grow with the
// number of terms. So more workgroups share many rows, and a wide row is summed by spans of columns.
//
// RMS normalization does not centre (#centres = false): it has no mean, no sum of h and no dbeta. A spec
// without some operand gives another one in its place, which the kernels do not use.
//
// From the forward's output (#from_output), %x is that output. Then there is no mean either, and 1 / g is
// computed for each chunk where g is.
//
// with sets: // Where the weight has sets, a workgroup has rows of one set: workgroups share out the rows of each. They
// with sets: // count rows as the k-th of their set (math/sets.mlir). Their partial rows follow each other, set by set,
// with sets: // and a workgroup of @finalize adds up those of one set.
// with sets: //
// Elements of the caller's memory are aligned to their own size. Nothing more is assumed, so bindings have
// no alignment(...). IREE's threads flush subnormal numbers to zero; a kernel sets IEEE's rules instead,
// and restores theirs at its end.

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
!dy_mn = tensor<?x4096x!dy>
!x_mn = tensor<?x4096x!x>
!residual_mn = tensor<?x4096x!residual>
!acc_m = tensor<?x!acc>
!gamma_n = tensor<4096x!gamma>
!beta_n = tensor<4096x!beta>
#inv_n = 2.44140625e-4 : !acc
#centres = true              // the op subtracts the mean
#sums_dbeta = true           // the op has dbeta
#scales = true               // there is a gamma
#adds_residual = false       // dresidual is added to dx
#has_dy2 = false             // the output has a second gradient, which is added to dy
#has_dy3 = false
#has_dy4 = false
#from_output = false         // x is the forward's output
#adds_bias = false           // it has a beta in it
#least_weight = 1.0e-5 : !acc
#fetches_ahead = true        // the next block is fetched into the cache
#columns = 4096 : index      // N
#vector = 64 : index         // V
#dy_line = 32 : index        // elements of a cache line
#x_line = 32 : index
#residual_line = 32 : index
#z_line = 32 : index
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
#span = 8192 : index         // columns of a row that are summed at a time
#block = 4 : index           // rows that are in the cache at once
#tile = 256 : index          // columns of a workgroup of @finalize
#wants_dx = true             // the caller asks for dx
#wants_dz = true             // the caller asks for dz
#gates_first = false         // the gate is before the norm
!acc_pn = tensor<?x4096x!acc>
!dy_rows = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>
!x_rows = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!residual_rows = memref<?x4096x!residual, #hal.descriptor_type<storage_buffer>>
!z_rows = memref<?x4096x!z, #hal.descriptor_type<storage_buffer>>
!acc_rows = memref<?x4096x!acc, #hal.descriptor_type<storage_buffer>>
!acc_column = memref<?x!acc, #hal.descriptor_type<storage_buffer>>
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!means = memref<4x2x!acc>
!dy_chunk = vector<64x!dy>
!dy_sum_chunk = vector<64x!dy_sum>
!x_chunk = vector<64x!x>
!residual_chunk = vector<64x!residual>
!z_chunk = vector<64x!z>
!gamma_chunk = vector<64x!gamma>
!beta_chunk = vector<64x!beta>
!chunk = vector<64x!acc>
!lanes = vector<64xi1>
// The launches, as iree_lnbwd/vmfb/launches.py states them: the bindings, and the workgroups. Of @rows there are P,
// and each has a share of neighbouring rows.
#rows_layout = #hal.pipeline.layout<constants = 2, bindings = [
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
  #hal.pipeline.binding<storage_buffer>,            // partial dgamma [P, N]
  #hal.pipeline.binding<storage_buffer>,            // partial dbeta [P, N]
  #hal.pipeline.binding<storage_buffer>,            // dz [M, N]
  #hal.pipeline.binding<storage_buffer>,            // copy of dx [M, N]
  #hal.pipeline.binding<storage_buffer>             // partial sum of dx over rows [P, N]
]>
#rows_x = affine_map<()[p] -> (p)>
#finalize_layout = #hal.pipeline.layout<constants = 1, bindings = [
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // partial dgamma [P, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // partial dbeta [P, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // partial sum of dx over rows [P, N]
  #hal.pipeline.binding<storage_buffer>,            // dgamma [N]
  #hal.pipeline.binding<storage_buffer>,            // dbeta [N]
  #hal.pipeline.binding<storage_buffer>             // sum of dx over rows [N]
]>
#finalize_x = affine_map<()[m] -> (16)>
// End of what is replaced.

#worker = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline>

hal.executable.source private @rows {
  hal.executable.export public @rows ordinal(0) layout(#rows_layout)
      count(%device: !hal.device, %p: index) -> (index, index, index) {
    %x = affine.min #rows_x()[%p]
    %one = arith.constant 1 : index
    hal.return %x, %one, %one : index, index, index
  }
  builtin.module {
    // From ir/math/.
    func.func private @set_ieee_rules() -> i256
    func.func private @restore_rules(i256)
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
    func.func private @widen_of_residual(!residual_chunk) -> !chunk
    func.func private @plus_residual(!chunk, !chunk) -> !chunk
    func.func private @xhat(!chunk, !acc, !acc) -> !chunk
    func.func private @away_from_zero(!chunk) -> !chunk
    func.func private @reciprocal(!chunk) -> !chunk
    func.func private @xhat_from_output(!chunk, !chunk, !chunk) -> !chunk
    func.func private @dx_from_means(!chunk, !chunk, !acc, !acc, !acc) -> !chunk
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
    func.func private @dz(!chunk, !chunk, !chunk) -> !chunk
    func.func private @y_on_cpu(!chunk, !chunk, !chunk) -> !chunk
    func.func private @round_of_z(!chunk) -> !z_chunk
    // End of the gate.

    // The weight with its offset, or ones.
    func.func private @gamma(%gamma: !gamma_row, %col: index) -> !chunk {
      %scales = arith.constant #scales
      // Ones that are multiplied by, so that results have the same bits as with a weight of ones.
      %known_ones = arith.constant dense<1.0> : !chunk
      %ones = llvm.call_intrinsic "llvm.arithmetic.fence"(%known_ones) : (!chunk) -> !chunk
      %g = scf.if %scales -> !chunk {
        %gamma_ = vector.load %gamma[%col] : !gamma_row, !gamma_chunk
        %ga = func.call @widen_of_gamma(%gamma_) : (!gamma_chunk) -> !chunk
        %with_offset = func.call @weight(%ga) : (!chunk) -> !chunk
        scf.yield %with_offset : !chunk
      } else {
        scf.yield %ones : !chunk
      }
      return %g : !chunk
    }

    // The beta that is in the output.
    func.func private @bias(%beta: !beta_row, %col: index) -> !chunk {
      %adds_bias = arith.constant #adds_bias
      %zeros = arith.constant dense<0.0> : !chunk
      %bias = scf.if %adds_bias -> !chunk {
        %beta_ = vector.load %beta[%col] : !beta_row, !beta_chunk
        %ba = func.call @widen_of_beta(%beta_) : (!beta_chunk) -> !chunk
        scf.yield %ba : !chunk
      } else {
        scf.yield %zeros : !chunk
      }
      return %bias : !chunk
    }

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

    // The sum of a chunk's gradients of the output.
    func.func private @sum_of_dy(%dy: !dy_rows, %dy2: !dy_rows, %dy3: !dy_rows, %dy4: !dy_rows, %row: index, %col: index) -> !chunk {
      %has_dy2 = arith.constant #has_dy2
      %has_dy3 = arith.constant #has_dy3
      %has_dy4 = arith.constant #has_dy4
      // with strides: %dy_strided = func.call @row_of_dy(%dy, %row) : (!dy_rows, index) -> !dy_rows
      // with strides: %dy2_strided = func.call @row_of_dy(%dy2, %row) : (!dy_rows, index) -> !dy_rows
      // with strides: %dy3_strided = func.call @row_of_dy(%dy3, %row) : (!dy_rows, index) -> !dy_rows
      // with strides: %dy4_strided = func.call @row_of_dy(%dy4, %row) : (!dy_rows, index) -> !dy_rows
      %dy_1 = vector.load %dy[%row, %col] : !dy_rows, !dy_chunk
      %dya_1 = func.call @widen_of_dy(%dy_1) : (!dy_chunk) -> !chunk
      %dy_2 = vector.load %dy2[%row, %col] : !dy_rows, !dy_chunk
      %dya_2 = func.call @plus_dy(%dya_1, %dy_2, %has_dy2) : (!chunk, !dy_chunk, i1) -> !chunk
      %dy_3 = vector.load %dy3[%row, %col] : !dy_rows, !dy_chunk
      %dya_3 = func.call @plus_dy(%dya_2, %dy_3, %has_dy3) : (!chunk, !dy_chunk, i1) -> !chunk
      %dy_4 = vector.load %dy4[%row, %col] : !dy_rows, !dy_chunk
      %dya_4 = func.call @plus_dy(%dya_3, %dy_4, %has_dy4) : (!chunk, !dy_chunk, i1) -> !chunk
      return %dya_4 : !chunk
    }

    // Asks for the cache lines of a chunk ahead of their use. A processor that finds by itself what is
    // read next does not look beyond a page, and a row is about as long as one.
    func.func private @fetch_dy(%rows: !dy_rows, %row: index, %col: index) {
      // with strides: %rows_strided = func.call @row_of_dy(%rows, %row) : (!dy_rows, index) -> !dy_rows
      %c0 = arith.constant 0 : index
      %v = arith.constant #vector
      %line = arith.constant #dy_line
      scf.for %first = %c0 to %v step %line {
        %at = arith.addi %col, %first : index
        memref.prefetch %rows[%row, %at], read, locality<2>, data : !dy_rows
      } {llvm.loop_annotation = #unrolled}
      return
    }

    func.func private @fetch_x(%rows: !x_rows, %row: index, %col: index) {
      // with strides: %rows_strided = func.call @row_of_x(%rows, %row) : (!x_rows, index) -> !x_rows
      %c0 = arith.constant 0 : index
      %v = arith.constant #vector
      %line = arith.constant #x_line
      scf.for %first = %c0 to %v step %line {
        %at = arith.addi %col, %first : index
        memref.prefetch %rows[%row, %at], read, locality<2>, data : !x_rows
      } {llvm.loop_annotation = #unrolled}
      return
    }

    // For lines that are stored to: they become this processor's own.
    func.func private @fetch_dx(%rows: !x_rows, %row: index, %col: index) {
      // with strides: %rows_strided = func.call @row_of_x(%rows, %row) : (!x_rows, index) -> !x_rows
      %c0 = arith.constant 0 : index
      %v = arith.constant #vector
      %line = arith.constant #x_line
      scf.for %first = %c0 to %v step %line {
        %at = arith.addi %col, %first : index
        memref.prefetch %rows[%row, %at], write, locality<2>, data : !x_rows
      } {llvm.loop_annotation = #unrolled}
      return
    }

    func.func private @fetch_residual(%rows: !residual_rows, %row: index, %col: index) {
      // with strides: %rows_strided = func.call @row_of_residual(%rows, %row) : (!residual_rows, index) -> !residual_rows
      %c0 = arith.constant 0 : index
      %v = arith.constant #vector
      %line = arith.constant #residual_line
      scf.for %first = %c0 to %v step %line {
        %at = arith.addi %col, %first : index
        memref.prefetch %rows[%row, %at], read, locality<2>, data : !residual_rows
      } {llvm.loop_annotation = #unrolled}
      return
    }

    // With a gate:
    func.func private @fetch_z(%rows: !z_rows, %row: index, %col: index) {
      // with strides: %rows_strided = func.call @row_of_z(%rows, %row) : (!z_rows, index) -> !z_rows
      %c0 = arith.constant 0 : index
      %v = arith.constant #vector
      %line = arith.constant #z_line
      scf.for %first = %c0 to %v step %line {
        %at = arith.addi %col, %first : index
        memref.prefetch %rows[%row, %at], read, locality<2>, data : !z_rows
      } {llvm.loop_annotation = #unrolled}
      return
    }
    // End of the gate.

    func.func @rows() attributes {translation_info = #worker} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %n = arith.constant #columns
      %v = arith.constant #vector
      %block = arith.constant #block
      %last_chunk = arith.subi %n, %v : index
      %zeros = arith.constant dense<0.0> : !chunk
      %span = arith.constant #span
      %inv_n = arith.constant #inv_n
      %centres = arith.constant #centres
      %sums_dbeta = arith.constant #sums_dbeta
      %adds_residual = arith.constant #adds_residual
      %has_dy2 = arith.constant #has_dy2
      %has_dy3 = arith.constant #has_dy3
      %has_dy4 = arith.constant #has_dy4
      %from_output = arith.constant #from_output
      %wants_dx = arith.constant #wants_dx
      %fetches_ahead = arith.constant #fetches_ahead
      %fetches_residual = arith.andi %fetches_ahead, %adds_residual : i1
      %rules = func.call @set_ieee_rules() : () -> i256

      %m_i32 = hal.interface.constant.load layout(#rows_layout) ordinal(0) : i32
      %m = arith.index_castui %m_i32 : i32 to index
      %share_i32 = hal.interface.constant.load layout(#rows_layout) ordinal(1) : i32
      %share = arith.index_castui %share_i32 : i32 to index
      // with sets: %sets_i32 = hal.interface.constant.load layout(#rows_layout) ordinal(2) : i32
      // with sets: %sets = arith.index_castui %sets_i32 : i32 to index
      // with sets: %rows_per_set_i32 = hal.interface.constant.load layout(#rows_layout) ordinal(3) : i32
      // with sets: %rows_per_set = arith.index_castui %rows_per_set_i32 : i32 to index
      // with sets: %all_workgroups = hal.interface.workgroup.count[0] : index
      // with sets: %set_workgroups = arith.divui %all_workgroups, %sets : index
      // with sets: %id = hal.interface.workgroup.id[0] : index
      // with sets: %set = arith.divui %id, %set_workgroups : index
      // with sets: %own_id = arith.remui %id, %set_workgroups : index
      // with sets: %set_rows = func.call @count_set_rows(%m, %set, %sets, %rows_per_set) : (index, index, index, index) -> index
      // with sets: %gamma_bytes = arith.constant #gamma_bytes
      // with sets: %gamma_at = arith.muli %set, %gamma_bytes : index
      // with sets: %beta_bytes = arith.constant #beta_bytes
      // with sets: %beta_at = arith.muli %set, %beta_bytes : index
      %dy = hal.interface.binding.subspan layout(#rows_layout) binding(0) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      %x = hal.interface.binding.subspan layout(#rows_layout) binding(1) offset(%c0) flags(ReadOnly) : !x_rows{%m}
      %mean = hal.interface.binding.subspan layout(#rows_layout) binding(2) offset(%c0) flags(ReadOnly) : !acc_column{%m}
      %rstd = hal.interface.binding.subspan layout(#rows_layout) binding(3) offset(%c0) flags(ReadOnly) : !acc_column{%m}
      %gamma = hal.interface.binding.subspan layout(#rows_layout) binding(4) offset(%c0) flags(ReadOnly) : !gamma_row  // without sets
      // with sets: %gamma = hal.interface.binding.subspan layout(#rows_layout) binding(4) offset(%gamma_at) flags(ReadOnly) : !gamma_row
      %dresidual = hal.interface.binding.subspan layout(#rows_layout) binding(5) offset(%c0) flags(ReadOnly) : !residual_rows{%m}
      %beta = hal.interface.binding.subspan layout(#rows_layout) binding(6) offset(%c0) flags(ReadOnly) : !beta_row  // without sets
      // with sets: %beta = hal.interface.binding.subspan layout(#rows_layout) binding(6) offset(%beta_at) flags(ReadOnly) : !beta_row
      %dy2 = hal.interface.binding.subspan layout(#rows_layout) binding(7) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      %dy3 = hal.interface.binding.subspan layout(#rows_layout) binding(8) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      %dy4 = hal.interface.binding.subspan layout(#rows_layout) binding(9) offset(%c0) flags(ReadOnly) : !dy_rows{%m}
      // With a gate:
      %z = hal.interface.binding.subspan layout(#rows_layout) binding(10) offset(%c0) flags(ReadOnly) : !z_rows{%m}
      %dz = hal.interface.binding.subspan layout(#rows_layout) binding(14) offset(%c0) : !z_rows{%m}
      %gates_first = arith.constant #gates_first
      %wants_dz = arith.constant #wants_dz
      // End of the gate.
      %dx = hal.interface.binding.subspan layout(#rows_layout) binding(11) offset(%c0) : !x_rows{%m}
      // with copies: %dx_copy = hal.interface.binding.subspan layout(#rows_layout) binding(15) offset(%c0) : !copy_rows{%m}
      %p = hal.interface.workgroup.count[0] : index
      %dgamma_partials = hal.interface.binding.subspan layout(#rows_layout) binding(12) offset(%c0) : !acc_rows{%p}
      %dbeta_partials = hal.interface.binding.subspan layout(#rows_layout) binding(13) offset(%c0) : !acc_rows{%p}
      // with totals: %dx_partials = hal.interface.binding.subspan layout(#rows_layout) binding(16) offset(%c0) : !acc_rows{%p}

      %workgroup = hal.interface.workgroup.id[0] : index
      %first = arith.muli %workgroup, %share : index  // without sets
      // with sets: %first = arith.muli %own_id, %share : index
      %first_after = arith.addi %first, %share : index
      %end = arith.minui %first_after, %m : index  // without sets
      // with sets: %end = arith.minui %first_after, %set_rows : index
      %last_row = arith.subi %m, %c1 : index
      %means = memref.alloca() : !means  // mean_N(h) and mean_N(h * xhat) of the block's rows

      scf.for %chunk = %c0 to %n step %v {
        %col = arith.minui %chunk, %last_chunk : index
        vector.store %zeros, %dgamma_partials[%workgroup, %col] : !acc_rows, !chunk
        // with totals: vector.store %zeros, %dx_partials[%workgroup, %col] : !acc_rows, !chunk
        scf.if %sums_dbeta {
          vector.store %zeros, %dbeta_partials[%workgroup, %col] : !acc_rows, !chunk
        }
      }

      scf.for %block_row = %first to %end step %block {
        %left = arith.subi %end, %block_row : index
        %rows = arith.minui %left, %block : index

        // The row sums of h and of h * xhat, for one row at a time.
        scf.if %wants_dx {
          scf.for %i = %c0 to %rows step %c1 {
            %row = arith.addi %block_row, %i : index  // without sets
            // with sets: %k = arith.addi %block_row, %i : index
            // with sets: %row = func.call @set_row(%k, %set, %sets, %rows_per_set) : (index, index, index, index) -> index
            %mean_row = memref.load %mean[%row] : !acc_column
            %rstd_row = memref.load %rstd[%row] : !acc_column
            %sum_h, %sum_hx = scf.for %span_first = %c0 to %n step %span
                iter_args(%h_before = %zeros, %hx_before = %zeros) -> (!chunk, !chunk) {
              %span_after = arith.addi %span_first, %span : index
              %span_end = arith.minui %span_after, %n : index
              %span_h, %span_hx = scf.for %chunk = %span_first to %span_end step %v
                  iter_args(%h_ = %zeros, %hx_ = %zeros) -> (!chunk, !chunk) {
                %col = arith.minui %chunk, %last_chunk : index
                %seen = arith.subi %chunk, %col : index
                %again = vector.create_mask %seen : !lanes
                scf.if %fetches_ahead {
                  func.call @fetch_dx(%dx, %row, %col) : (!x_rows, index, index) -> ()
                }
                // with strides: %x_strided = func.call @row_of_x(%x, %row) : (!x_rows, index) -> !x_rows
                %x_ = vector.load %x[%row, %col] : !x_rows, !x_chunk
                %dya = func.call @sum_of_dy(%dy, %dy2, %dy3, %dy4, %row, %col) : (!dy_rows, !dy_rows, !dy_rows, !dy_rows, index, index) -> !chunk
                %xa = func.call @widen_of_x(%x_) : (!x_chunk) -> !chunk
                // With a gate:
                // with strides: %z_strided = func.call @row_of_z(%z, %row) : (!z_rows, index) -> !z_rows
                %z_ = vector.load %z[%row, %col] : !z_rows, !z_chunk
                %za = func.call @widen_of_z(%z_) : (!z_chunk) -> !chunk
                %silu, %slope = func.call @silu_of_z(%za) : (!chunk) -> (!chunk, !chunk)
                %xa_gated = func.call @gated_input(%xa, %silu) : (!chunk, !chunk) -> !chunk
                %dya_gated = func.call @gated_gradient(%dya, %silu) : (!chunk, !chunk) -> !chunk
                // End of the gate.
                %g = func.call @gamma(%gamma, %col) : (!gamma_row, index) -> !chunk
                %dy_new = arith.select %again, %zeros, %dya : !lanes, !chunk
                %bias = func.call @bias(%beta, %col) : (!beta_row, index) -> !chunk
                %divisor = func.call @away_from_zero(%g) : (!chunk) -> !chunk
                %inverse = func.call @reciprocal(%divisor) : (!chunk) -> !chunk
                %of_y = func.call @xhat_from_output(%xa, %bias, %inverse) : (!chunk, !chunk, !chunk) -> !chunk
                %of_x = func.call @xhat(%xa, %mean_row, %rstd_row) : (!chunk, !acc, !acc) -> !chunk
                %xhat = arith.select %from_output, %of_y, %of_x : !chunk
                %h = arith.mulf %dy_new, %g : !chunk
                %hx = arith.mulf %h, %xhat : !chunk
                %h1 = arith.addf %h_, %h : !chunk
                %hx1 = arith.addf %hx_, %hx : !chunk
                %h_next = arith.select %centres, %h1, %h_ : !chunk
                scf.yield %h_next, %hx1 : !chunk, !chunk
              }
              %h_after = arith.addf %h_before, %span_h : !chunk
              %hx_after = arith.addf %hx_before, %span_hx : !chunk
              %h_after_next = arith.select %centres, %h_after, %h_before : !chunk
              scf.yield %h_after_next, %hx_after : !chunk, !chunk
            }
            // Any order of these additions will do, as long as it is always the same order.
            %row_h = vector.reduction <add>, %sum_h fastmath<reassoc> : !chunk into !acc
            %row_hx = vector.reduction <add>, %sum_hx fastmath<reassoc> : !chunk into !acc
            %mean_h = arith.mulf %row_h, %inv_n : !acc
            %mean_hx = arith.mulf %row_hx, %inv_n : !acc
            memref.store %mean_h, %means[%i, %c0] : !means
            memref.store %mean_hx, %means[%i, %c1] : !means
          }
        }

        // dx and the column sums, for one chunk of columns at a time, over all rows of the block.
        scf.for %chunk = %c0 to %n step %v {
          %col = arith.minui %chunk, %last_chunk : index
          %seen = arith.subi %chunk, %col : index
          %again = vector.create_mask %seen : !lanes
          %g = func.call @gamma(%gamma, %col) : (!gamma_row, index) -> !chunk
          %bias = func.call @bias(%beta, %col) : (!beta_row, index) -> !chunk
          %divisor = func.call @away_from_zero(%g) : (!chunk) -> !chunk
          %inverse = func.call @reciprocal(%divisor) : (!chunk) -> !chunk
          %dgamma_sum = vector.load %dgamma_partials[%workgroup, %col] : !acc_rows, !chunk
          %dbeta_sum = scf.if %sums_dbeta -> !chunk {
            %dbeta_ = vector.load %dbeta_partials[%workgroup, %col] : !acc_rows, !chunk
            scf.yield %dbeta_ : !chunk
          } else {
            scf.yield %zeros : !chunk
          }
          %dgamma, %dbeta = scf.for %i = %c0 to %rows step %c1
              iter_args(%dgamma_ = %dgamma_sum, %dbeta_ = %dbeta_sum) -> (!chunk, !chunk) {
            %row = arith.addi %block_row, %i : index  // without sets
            %row_after = arith.addi %row, %block : index  // without sets
            // with sets: %k = arith.addi %block_row, %i : index
            // with sets: %row = func.call @set_row(%k, %set, %sets, %rows_per_set) : (index, index, index, index) -> index
            // with sets: %k_after = arith.addi %k, %block : index
            // with sets: %row_after = func.call @set_row(%k_after, %set, %sets, %rows_per_set) : (index, index, index, index) -> index
            %next_row = arith.minui %row_after, %last_row : index
            scf.if %fetches_ahead {
              func.call @fetch_dy(%dy, %next_row, %col) : (!dy_rows, index, index) -> ()
              func.call @fetch_x(%x, %next_row, %col) : (!x_rows, index, index) -> ()
              scf.if %has_dy2 {
                func.call @fetch_dy(%dy2, %next_row, %col) : (!dy_rows, index, index) -> ()
              }
              scf.if %has_dy3 {
                func.call @fetch_dy(%dy3, %next_row, %col) : (!dy_rows, index, index) -> ()
              }
              scf.if %has_dy4 {
                func.call @fetch_dy(%dy4, %next_row, %col) : (!dy_rows, index, index) -> ()
              }
            }
            // With a gate:
            scf.if %fetches_ahead {
              func.call @fetch_z(%z, %next_row, %col) : (!z_rows, index, index) -> ()
            }
            // End of the gate.
            scf.if %fetches_residual {
              func.call @fetch_residual(%dresidual, %next_row, %col) : (!residual_rows, index, index) -> ()
            }
            // with strides: %x_strided = func.call @row_of_x(%x, %row) : (!x_rows, index) -> !x_rows
            // with strides: %dresidual_strided = func.call @row_of_residual(%dresidual, %row) : (!residual_rows, index) -> !residual_rows
            // with strides: %dx_strided = func.call @row_of_x(%dx, %row) : (!x_rows, index) -> !x_rows
            // with copies: // with strides: %dx_copy_strided = func.call @row_of_copy(%dx_copy, %row) : (!copy_rows, index) -> !copy_rows
            %mean_row = memref.load %mean[%row] : !acc_column
            %rstd_row = memref.load %rstd[%row] : !acc_column
            %x_ = vector.load %x[%row, %col] : !x_rows, !x_chunk
            %dya = func.call @sum_of_dy(%dy, %dy2, %dy3, %dy4, %row, %col) : (!dy_rows, !dy_rows, !dy_rows, !dy_rows, index, index) -> !chunk
            %xa = func.call @widen_of_x(%x_) : (!x_chunk) -> !chunk
            // With a gate:
            // with strides: %z_strided = func.call @row_of_z(%z, %row) : (!z_rows, index) -> !z_rows
            // with strides: %dz_strided = func.call @row_of_z(%dz, %row) : (!z_rows, index) -> !z_rows
            %z_ = vector.load %z[%row, %col] : !z_rows, !z_chunk
            %za = func.call @widen_of_z(%z_) : (!z_chunk) -> !chunk
            %silu, %slope = func.call @silu_of_z(%za) : (!chunk) -> (!chunk, !chunk)
            %dy_or_x = arith.select %gates_first, %xa, %dya : !chunk
            %xa_gated = func.call @gated_input(%xa, %silu) : (!chunk, !chunk) -> !chunk
            %dya_gated = func.call @gated_gradient(%dya, %silu) : (!chunk, !chunk) -> !chunk
            // End of the gate.
            %of_y = func.call @xhat_from_output(%xa, %bias, %inverse) : (!chunk, !chunk, !chunk) -> !chunk
            %of_x = func.call @xhat(%xa, %mean_row, %rstd_row) : (!chunk, !acc, !acc) -> !chunk
            %xhat = arith.select %from_output, %of_y, %of_x : !chunk
            scf.if %wants_dx {
              %mean_h = memref.load %means[%i, %c0] : !means
              %mean_hx = memref.load %means[%i, %c1] : !means
              %h = arith.mulf %dya, %g : !chunk
              %dxa = func.call @dx_from_means(%h, %xhat, %rstd_row, %mean_h, %mean_hx) : (!chunk, !chunk, !acc, !acc, !acc) -> !chunk
              %dx_sum = scf.if %adds_residual -> !chunk {
                %dresidual_ = vector.load %dresidual[%row, %col] : !residual_rows, !residual_chunk
                %dra = func.call @widen_of_residual(%dresidual_) : (!residual_chunk) -> !chunk
                %both = func.call @plus_residual(%dxa, %dra) : (!chunk, !chunk) -> !chunk
                scf.yield %both : !chunk
              } else {
                scf.yield %dxa : !chunk
              }
              // With a gate:
              %dx_sum_gated = func.call @gated_dx(%dx_sum, %silu) : (!chunk, !chunk) -> !chunk
              %has_dz = arith.andi %wants_dz, %gates_first : i1
              scf.if %has_dz {
                %dza = func.call @dz(%dy_or_x, %slope, %dx_sum) : (!chunk, !chunk, !chunk) -> !chunk
                %dz_ = func.call @round_of_z(%dza) : (!chunk) -> !z_chunk
                vector.store %dz_, %dz[%row, %col] : !z_rows, !z_chunk
              }
              // End of the gate.
              %dx_ = func.call @round_of_x(%dx_sum) : (!chunk) -> !x_chunk
              vector.store %dx_, %dx[%row, %col] : !x_rows, !x_chunk
              // with copies: %copy = func.call @round_of_copy(%dx_sum) : (!chunk) -> !copy_chunk
              // with copies: vector.store %copy, %dx_copy[%row, %col] : !copy_rows, !copy_chunk
              // with totals: %dx_before = vector.load %dx_partials[%workgroup, %col] : !acc_rows, !chunk
              // with totals: %dx_new = arith.select %again, %zeros, %dx_sum : !lanes, !chunk
              // with totals: %dx_after = arith.addf %dx_before, %dx_new : !chunk
              // with totals: vector.store %dx_after, %dx_partials[%workgroup, %col] : !acc_rows, !chunk
            }
            // With a gate:
            %is_after = arith.cmpi ult, %gates_first, %wants_dz : i1
            scf.if %is_after {
              %n_ = func.call @y_on_cpu(%xhat, %g, %bias) : (!chunk, !chunk, !chunk) -> !chunk
              %dza = func.call @dz(%dy_or_x, %slope, %n_) : (!chunk, !chunk, !chunk) -> !chunk
              %dz_ = func.call @round_of_z(%dza) : (!chunk) -> !z_chunk
              vector.store %dz_, %dz[%row, %col] : !z_rows, !z_chunk
            }
            // End of the gate.
            %dy_new = arith.select %again, %zeros, %dya : !lanes, !chunk
            %dg = arith.mulf %dy_new, %xhat : !chunk
            %dgamma1 = arith.addf %dgamma_, %dg : !chunk
            %dbeta1 = arith.addf %dbeta_, %dy_new : !chunk
            %dbeta_next = arith.select %sums_dbeta, %dbeta1, %dbeta_ : !chunk
            scf.yield %dgamma1, %dbeta_next : !chunk, !chunk
          }
          vector.store %dgamma, %dgamma_partials[%workgroup, %col] : !acc_rows, !chunk
          scf.if %sums_dbeta {
            vector.store %dbeta, %dbeta_partials[%workgroup, %col] : !acc_rows, !chunk
          }
        }
      }
      func.call @restore_rules(%rules) : (i256) -> ()
      return
    }
  }
}

// A workgroup adds up the partial rows of some chunks of columns, and rounds the sums once to the types of
// the caller's parameters.
hal.executable.source private @finalize {
  hal.executable.export public @finalize ordinal(0) layout(#finalize_layout)
      count(%device: !hal.device, %m: index) -> (index, index, index) {
    %x = affine.min #finalize_x()[%m]
    %one = arith.constant 1 : index
    hal.return %x, %one, %one : index, index, index
  }
  builtin.module {
    // From ir/math/.
    func.func private @set_ieee_rules() -> i256
    func.func private @restore_rules(i256)
    func.func private @round_of_gamma(!chunk) -> !gamma_chunk
    func.func private @round_of_beta(!chunk) -> !beta_chunk
    // with totals: func.func private @round_of_total(!chunk) -> !total_chunk

    func.func @finalize() attributes {translation_info = #worker} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %n = arith.constant #columns
      %v = arith.constant #vector
      %last_chunk = arith.subi %n, %v : index
      %zeros = arith.constant dense<0.0> : !chunk
      %sums_dbeta = arith.constant #sums_dbeta
      %rules = func.call @set_ieee_rules() : () -> i256

      %p_i32 = hal.interface.constant.load layout(#finalize_layout) ordinal(0) : i32
      %p = arith.index_castui %p_i32 : i32 to index
      // with sets: %set_width = arith.constant #tile
      // with sets: %tiles = arith.ceildivui %n, %set_width : index
      // with sets: %id = hal.interface.workgroup.id[0] : index
      // with sets: %set = arith.divui %id, %tiles : index
      // with sets: %gamma_bytes = arith.constant #gamma_bytes
      // with sets: %gamma_at = arith.muli %set, %gamma_bytes : index
      // with sets: %beta_bytes = arith.constant #beta_bytes
      // with sets: %beta_at = arith.muli %set, %beta_bytes : index
      // with sets: %partial_bytes = arith.constant #acc_bytes
      // with sets: %set_bytes = arith.muli %p, %partial_bytes : index
      // with sets: %partials_at = arith.muli %set, %set_bytes : index
      %dgamma_partials = hal.interface.binding.subspan layout(#finalize_layout) binding(0) offset(%c0) flags(ReadOnly) : !acc_rows{%p}  // without sets
      // with sets: %dgamma_partials = hal.interface.binding.subspan layout(#finalize_layout) binding(0) offset(%partials_at) flags(ReadOnly) : !acc_rows{%p}
      %dbeta_partials = hal.interface.binding.subspan layout(#finalize_layout) binding(1) offset(%c0) flags(ReadOnly) : !acc_rows{%p}  // without sets
      // with sets: %dbeta_partials = hal.interface.binding.subspan layout(#finalize_layout) binding(1) offset(%partials_at) flags(ReadOnly) : !acc_rows{%p}
      %dgamma = hal.interface.binding.subspan layout(#finalize_layout) binding(3) offset(%c0) : !gamma_row  // without sets
      // with sets: %dgamma = hal.interface.binding.subspan layout(#finalize_layout) binding(3) offset(%gamma_at) : !gamma_row
      %dbeta = hal.interface.binding.subspan layout(#finalize_layout) binding(4) offset(%c0) : !beta_row  // without sets
      // with sets: %dbeta = hal.interface.binding.subspan layout(#finalize_layout) binding(4) offset(%beta_at) : !beta_row

      %workgroup = hal.interface.workgroup.id[0] : index  // without sets
      // with sets: %workgroup = arith.remui %id, %tiles : index
      // with totals: %dx_partials = hal.interface.binding.subspan layout(#finalize_layout) binding(2) offset(%c0) flags(ReadOnly) : !acc_rows{%p}
      // with totals: %dx_total = hal.interface.binding.subspan layout(#finalize_layout) binding(5) offset(%c0) : !total_row
      %tile = arith.constant #tile
      %first = arith.muli %workgroup, %tile : index
      %first_after = arith.addi %first, %tile : index
      %end = arith.minui %first_after, %n : index
      scf.for %chunk = %first to %end step %v {
        %col = arith.minui %chunk, %last_chunk : index
        %dgamma_sum, %dbeta_sum = scf.for %i = %c0 to %p step %c1
            iter_args(%dgamma_ = %zeros, %dbeta_ = %zeros) -> (!chunk, !chunk) {
          %dgamma_i = vector.load %dgamma_partials[%i, %col] : !acc_rows, !chunk
          %dgamma1 = arith.addf %dgamma_, %dgamma_i : !chunk
          %dbeta1 = scf.if %sums_dbeta -> !chunk {
            %dbeta_i = vector.load %dbeta_partials[%i, %col] : !acc_rows, !chunk
            %dbeta_more = arith.addf %dbeta_, %dbeta_i : !chunk
            scf.yield %dbeta_more : !chunk
          } else {
            scf.yield %dbeta_ : !chunk
          }
          scf.yield %dgamma1, %dbeta1 : !chunk, !chunk
        }
        // with totals: %dx_sum = scf.for %i = %c0 to %p step %c1 iter_args(%dx_ = %zeros) -> (!chunk) {
        // with totals:   %dx_i = vector.load %dx_partials[%i, %col] : !acc_rows, !chunk
        // with totals:   %dx_more = arith.addf %dx_, %dx_i : !chunk
        // with totals:   scf.yield %dx_more : !chunk
        // with totals: }
        // with totals: %total = func.call @round_of_total(%dx_sum) : (!chunk) -> !total_chunk
        // with totals: vector.store %total, %dx_total[%col] : !total_row, !total_chunk
        %dgamma_total = func.call @round_of_gamma(%dgamma_sum) : (!chunk) -> !gamma_chunk
        vector.store %dgamma_total, %dgamma[%col] : !gamma_row, !gamma_chunk
        scf.if %sums_dbeta {
          %dbeta_total = func.call @round_of_beta(%dbeta_sum) : (!chunk) -> !beta_chunk
          vector.store %dbeta_total, %dbeta[%col] : !beta_row, !beta_chunk
        }
      }
      func.call @restore_rules(%rules) : (i256) -> ()
      return
    }
  }
}
