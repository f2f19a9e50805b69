// Layer and RMS normalization, forward, in one pass over memory: how the algorithms run on a CPU. The same
// kernel, without an output, recomputes the statistics for row_blocks.mlir.
//
// x has M rows of N columns. Each of P workgroups has a share of neighbouring rows, and one thread takes
// them one at a time. A row is read from memory once. It is still in the cache when its centred squares are
// added up, and when y is computed from it. With a residual, the row that is normalized is s, as it was
// rounded and stored. A row's results do not depend on other rows: the bits are the same for any number of
// rows and of threads.
//
// A row is divided into chunks of V neighbouring columns. Where V does not divide N, the last chunk begins
// V columns before the end. The columns that it shares with the chunk before count for nothing in sums, and
// are stored twice with the same values. (No output overlaps an input.)
//
// No sum is long, because rounding errors of the same sign, such as those of equal numbers, grow with the
// number of terms. So a wide row is summed by spans of columns.
//
// While one row's y is computed, the next row comes from memory; so do the lines of y, while the variance
// is computed (#fetches_ahead). Otherwise memory would wait for arithmetic, and arithmetic for memory.
//
// RMS normalization does not centre (#centres = false): it has no mean and no beta. A spec without some
// operand gives another one in its place, which the kernel does not use.
//
// Elements of the caller's memory are aligned to their own size. Nothing more is assumed, so bindings have
// no alignment(...). IREE's threads flush subnormal numbers to zero; a kernel sets IEEE's rules instead,
// and restores theirs at its end.

// What a NormSpec and a Schedule decide. These lines are replaced; the rest changes only by the rules
// of README.md.
!x = bf16
!y = bf16
!gamma = bf16
!beta = bf16
!residual = bf16
!z = bf16
!acc = f32
!x_mn = tensor<?x4096x!x>
!y_mn = tensor<?x4096x!y>
!residual_mn = tensor<?x4096x!residual>
!acc_m = tensor<?x!acc>
!gamma_n = tensor<4096x!gamma>
!beta_n = tensor<4096x!beta>
#inv_n = 2.44140625e-4 : !acc
#eps = 1.0e-5 : !acc
#centres = true              // the op subtracts the mean
#takes_residual = false      // s is normalized, not x
#scales = true               // there is a gamma
#adds_bias = true            // beta is added
#writes_output = true        // not the statistics of x alone
#fetches_ahead = true        // the next row is fetched into the cache
#columns = 4096 : index      // N
#vector = 64 : index         // V
#x_line = 32 : index         // elements of a cache line
#y_line = 32 : index
#residual_line = 32 : index
#z_line = 32 : index
#gates_first = false         // the gate is before the norm
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
#span = 8192 : index         // columns of a row that are summed at a time
!x_rows = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!y_rows = memref<?x4096x!y, #hal.descriptor_type<storage_buffer>>
!residual_rows = memref<?x4096x!residual, #hal.descriptor_type<storage_buffer>>
!z_rows = memref<?x4096x!z, #hal.descriptor_type<storage_buffer>>
!acc_column = memref<?x!acc, #hal.descriptor_type<storage_buffer>>
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!x_chunk = vector<64x!x>
!y_chunk = vector<64x!y>
!residual_chunk = vector<64x!residual>
!z_chunk = vector<64x!z>
!gamma_chunk = vector<64x!gamma>
!beta_chunk = vector<64x!beta>
!chunk = vector<64x!acc>
!lanes = vector<64xi1>
// The launch, as iree_lnbwd/vmfb/launches.py states it: the bindings, and the P workgroups, each of which has a share
// of neighbouring rows.
#normalize_layout = #hal.pipeline.layout<constants = 2, bindings = [
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // x [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // residual [M, N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // gamma [N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // beta [N]
  #hal.pipeline.binding<storage_buffer, ReadOnly>,  // z [M, N]
  #hal.pipeline.binding<storage_buffer>,            // y [M, N]
  #hal.pipeline.binding<storage_buffer>,            // mean [M]
  #hal.pipeline.binding<storage_buffer>,            // rstd [M]
  #hal.pipeline.binding<storage_buffer>             // s [M, N]
]>
#normalize_x = affine_map<()[p] -> (p)>
// End of what is replaced.

#forward_worker = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline>

hal.executable.source private @normalize {
  hal.executable.export public @normalize ordinal(0) layout(#normalize_layout)
      count(%device: !hal.device, %p: index) -> (index, index, index) {
    %x = affine.min #normalize_x()[%p]
    %one = arith.constant 1 : index
    hal.return %x, %one, %one : index, index, index
  }
  builtin.module {
    // From ir/math/.
    func.func private @set_ieee_rules() -> i256
    func.func private @restore_rules(i256)
    // with sets: func.func private @row_set(index, index, index) -> index
    // with strides: func.func private @row_of_x(!x_rows, index) -> !x_rows
    // with strides: func.func private @row_of_residual(!residual_rows, index) -> !residual_rows
    // with strides: func.func private @row_of_y(!y_rows, index) -> !y_rows
    func.func private @widen_of_x(!x_chunk) -> !chunk
    func.func private @widen_of_residual(!residual_chunk) -> !chunk
    func.func private @widen_of_gamma(!gamma_chunk) -> !chunk
    func.func private @weight(!chunk) -> !chunk
    func.func private @widen_of_beta(!beta_chunk) -> !chunk
    func.func private @xhat(!chunk, !acc, !acc) -> !chunk
    func.func private @y_on_cpu(!chunk, !chunk, !chunk) -> !chunk
    func.func private @round_of_y(!chunk) -> !y_chunk
    func.func private @round_of_residual(!chunk) -> !residual_chunk
    // With a gate:
    // with strides: func.func private @row_of_z(!z_rows, index) -> !z_rows
    func.func private @widen_of_z(!z_chunk) -> !chunk
    func.func private @silu_of_z(!chunk) -> (!chunk, !chunk)
    func.func private @gated_input(!chunk, !chunk) -> !chunk
    func.func private @gated_output(!chunk, !chunk) -> !chunk
    // End of the gate.

    // Asks for the cache lines of a chunk ahead of their use. A processor that finds by itself what is
    // read next does not look beyond a page, and a row is about as long as one.
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

    // For lines that are stored to: they become this processor's own.
    func.func private @fetch_y(%rows: !y_rows, %row: index, %col: index) {
      // with strides: %rows_strided = func.call @row_of_y(%rows, %row) : (!y_rows, index) -> !y_rows
      %c0 = arith.constant 0 : index
      %v = arith.constant #vector
      %line = arith.constant #y_line
      scf.for %first = %c0 to %v step %line {
        %at = arith.addi %col, %first : index
        memref.prefetch %rows[%row, %at], write, locality<2>, data : !y_rows
      } {llvm.loop_annotation = #unrolled}
      return
    }

    func.func @normalize() attributes {translation_info = #forward_worker} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %n = arith.constant #columns
      %v = arith.constant #vector
      %last_chunk = arith.subi %n, %v : index
      %one = arith.constant 1.0 : !acc
      %zeros = arith.constant dense<0.0> : !chunk
      // Ones that are multiplied by, so that results have the same bits as with a weight of ones.
      %known_ones = arith.constant dense<1.0> : !chunk
      %ones = llvm.call_intrinsic "llvm.arithmetic.fence"(%known_ones) : (!chunk) -> !chunk
      %nothing = arith.constant dense<-0.0> : !chunk  // adding it changes no number
      %span = arith.constant #span
      %inv_n = arith.constant #inv_n
      %eps = arith.constant #eps
      %centres = arith.constant #centres
      %scales = arith.constant #scales
      %adds_bias = arith.constant #adds_bias
      %writes_output = arith.constant #writes_output
      %has_residual = arith.constant #takes_residual
      %adds_residual = arith.andi %has_residual, %writes_output : i1  // the statistics alone are those of x
      %fetches_ahead = arith.constant #fetches_ahead
      %fetches_y = arith.andi %fetches_ahead, %writes_output : i1
      %fetches_residual = arith.andi %fetches_ahead, %adds_residual : i1
      %rules = func.call @set_ieee_rules() : () -> i256

      %m_i32 = hal.interface.constant.load layout(#normalize_layout) ordinal(0) : i32
      %m = arith.index_castui %m_i32 : i32 to index
      %share_i32 = hal.interface.constant.load layout(#normalize_layout) ordinal(1) : i32
      %share = arith.index_castui %share_i32 : i32 to index
      // with sets: %sets_i32 = hal.interface.constant.load layout(#normalize_layout) ordinal(2) : i32
      // with sets: %sets = arith.index_castui %sets_i32 : i32 to index
      // with sets: %rows_per_set_i32 = hal.interface.constant.load layout(#normalize_layout) ordinal(3) : i32
      // with sets: %rows_per_set = arith.index_castui %rows_per_set_i32 : i32 to index
      %x = hal.interface.binding.subspan layout(#normalize_layout) binding(0) offset(%c0) flags(ReadOnly) : !x_rows{%m}
      %residual = hal.interface.binding.subspan layout(#normalize_layout) binding(1) offset(%c0) flags(ReadOnly) : !residual_rows{%m}
      %gamma = hal.interface.binding.subspan layout(#normalize_layout) binding(2) offset(%c0) flags(ReadOnly) : !gamma_row  // without sets
      // with sets: %gamma = hal.interface.binding.subspan layout(#normalize_layout) binding(2) offset(%c0) flags(ReadOnly) : !gamma_sets{%sets}
      %beta = hal.interface.binding.subspan layout(#normalize_layout) binding(3) offset(%c0) flags(ReadOnly) : !beta_row  // without sets
      // with sets: %beta = hal.interface.binding.subspan layout(#normalize_layout) binding(3) offset(%c0) flags(ReadOnly) : !beta_sets{%sets}
      // With a gate:
      %z = hal.interface.binding.subspan layout(#normalize_layout) binding(4) offset(%c0) flags(ReadOnly) : !z_rows{%m}
      // End of the gate.
      %y = hal.interface.binding.subspan layout(#normalize_layout) binding(5) offset(%c0) : !y_rows{%m}
      %mean = hal.interface.binding.subspan layout(#normalize_layout) binding(6) offset(%c0) : !acc_column{%m}
      %rstd = hal.interface.binding.subspan layout(#normalize_layout) binding(7) offset(%c0) : !acc_column{%m}
      %s = hal.interface.binding.subspan layout(#normalize_layout) binding(8) offset(%c0) : !residual_rows{%m}

      %workgroup = hal.interface.workgroup.id[0] : index
      %first = arith.muli %workgroup, %share : index
      %first_after = arith.addi %first, %share : index
      %end = arith.minui %first_after, %m : index
      %last_row = arith.subi %m, %c1 : index
      scf.for %row = %first to %end step %c1 {
        %row_after = arith.addi %row, %c1 : index
        %next_row = arith.minui %row_after, %last_row : index
        // The row's mean, or its mean of squares where nothing is centred. s is stored on the way.
        %sum = scf.for %span_first = %c0 to %n step %span iter_args(%before = %zeros) -> (!chunk) {
          %span_after = arith.addi %span_first, %span : index
          %span_end = arith.minui %span_after, %n : index
          %span_sum = scf.for %chunk = %span_first to %span_end step %v iter_args(%sum_ = %zeros) -> (!chunk) {
            %col = arith.minui %chunk, %last_chunk : index
            %seen = arith.subi %chunk, %col : index
            %again = vector.create_mask %seen : !lanes
            // with strides: %x_strided = func.call @row_of_x(%x, %row) : (!x_rows, index) -> !x_rows
            // with strides: %residual_strided = func.call @row_of_residual(%residual, %row) : (!residual_rows, index) -> !residual_rows
            // with strides: %s_strided = func.call @row_of_residual(%s, %row) : (!residual_rows, index) -> !residual_rows
            %x_ = vector.load %x[%row, %col] : !x_rows, !x_chunk
            %xa = func.call @widen_of_x(%x_) : (!x_chunk) -> !chunk
            %sa = scf.if %adds_residual -> !chunk {
              %residual_ = vector.load %residual[%row, %col] : !residual_rows, !residual_chunk
              %ra = func.call @widen_of_residual(%residual_) : (!residual_chunk) -> !chunk
              %exact = arith.addf %xa, %ra : !chunk
              %s_ = func.call @round_of_residual(%exact) : (!chunk) -> !residual_chunk
              vector.store %s_, %s[%row, %col] : !residual_rows, !residual_chunk
              // Read back, because IREE undoes a rounding to bf16 that is widened at once.
              %stored = vector.load %s[%row, %col] : !residual_rows, !residual_chunk
              %rounded = func.call @widen_of_residual(%stored) : (!residual_chunk) -> !chunk
              scf.yield %rounded : !chunk
            } else {
              scf.yield %xa : !chunk
            }
            // With a gate:
            // with strides: %z_strided = func.call @row_of_z(%z, %row) : (!z_rows, index) -> !z_rows
            %z_ = vector.load %z[%row, %col] : !z_rows, !z_chunk
            %za = func.call @widen_of_z(%z_) : (!z_chunk) -> !chunk
            %silu, %slope = func.call @silu_of_z(%za) : (!chunk) -> (!chunk, !chunk)
            %sa_gated = func.call @gated_input(%sa, %silu) : (!chunk, !chunk) -> !chunk
            // End of the gate.
            %s_new = arith.select %again, %zeros, %sa : !lanes, !chunk
            %square = arith.mulf %s_new, %s_new : !chunk
            %term = arith.select %centres, %s_new, %square : !chunk
            %sum1 = arith.addf %sum_, %term : !chunk
            scf.yield %sum1 : !chunk
          }
          %after = arith.addf %before, %span_sum : !chunk
          scf.yield %after : !chunk
        }
        // Any order of these additions will do, as long as it is always the same order.
        %unfenced = vector.reduction <add>, %sum fastmath<reassoc> : !chunk into !acc
        // With a single column the sum is a square, which LLVM would round or not, as the code around it has it.
        %row_sum = llvm.call_intrinsic "llvm.arithmetic.fence"(%unfenced) : (!acc) -> !acc
        %first_mean = arith.mulf %row_sum, %inv_n : !acc

        // The mean of squares: of centred values, if the op centres. Then it is the biased variance.
        %mean_square = scf.if %centres -> !acc {
          %mean_v = vector.broadcast %first_mean : !acc to !chunk
          %sum_squares = scf.for %span_first = %c0 to %n step %span iter_args(%before = %zeros) -> (!chunk) {
            %span_after = arith.addi %span_first, %span : index
            %span_end = arith.minui %span_after, %n : index
            %span_sum = scf.for %chunk = %span_first to %span_end step %v iter_args(%sum_ = %zeros) -> (!chunk) {
              %col = arith.minui %chunk, %last_chunk : index
              %seen = arith.subi %chunk, %col : index
              %again = vector.create_mask %seen : !lanes
              scf.if %fetches_y {
                func.call @fetch_y(%y, %row, %col) : (!y_rows, index, index) -> ()
              }
              // with strides: %x_strided = func.call @row_of_x(%x, %row) : (!x_rows, index) -> !x_rows
              // with strides: %s_strided = func.call @row_of_residual(%s, %row) : (!residual_rows, index) -> !residual_rows
              %sa = scf.if %adds_residual -> !chunk {
                %s_ = vector.load %s[%row, %col] : !residual_rows, !residual_chunk
                %rounded = func.call @widen_of_residual(%s_) : (!residual_chunk) -> !chunk
                scf.yield %rounded : !chunk
              } else {
                %x_ = vector.load %x[%row, %col] : !x_rows, !x_chunk
                %xa = func.call @widen_of_x(%x_) : (!x_chunk) -> !chunk
                scf.yield %xa : !chunk
              }
              // With a gate:
              // with strides: %z_strided = func.call @row_of_z(%z, %row) : (!z_rows, index) -> !z_rows
              %z_ = vector.load %z[%row, %col] : !z_rows, !z_chunk
              %za = func.call @widen_of_z(%z_) : (!z_chunk) -> !chunk
              %silu, %slope = func.call @silu_of_z(%za) : (!chunk) -> (!chunk, !chunk)
              %sa_gated = func.call @gated_input(%sa, %silu) : (!chunk, !chunk) -> !chunk
              // End of the gate.
              %centred = arith.subf %sa, %mean_v : !chunk
              %centred_new = arith.select %again, %zeros, %centred : !lanes, !chunk
              %square = arith.mulf %centred_new, %centred_new : !chunk
              %sum1 = arith.addf %sum_, %square : !chunk
              scf.yield %sum1 : !chunk
            }
            %after = arith.addf %before, %span_sum : !chunk
            scf.yield %after : !chunk
          }
          %row_squares = vector.reduction <add>, %sum_squares fastmath<reassoc> : !chunk into !acc
          %var = arith.mulf %row_squares, %inv_n : !acc
          memref.store %first_mean, %mean[%row] : !acc_column
          scf.yield %var : !acc
        } else {
          scf.yield %first_mean : !acc
        }
        %with_eps = arith.addf %mean_square, %eps : !acc
        %root = math.sqrt %with_eps : !acc
        %rstd_row = arith.divf %one, %root : !acc
        memref.store %rstd_row, %rstd[%row] : !acc_column

        scf.if %writes_output {
          // with sets: %set = func.call @row_set(%row, %sets, %rows_per_set) : (index, index, index) -> index
          scf.for %chunk = %c0 to %n step %v {
            %col = arith.minui %chunk, %last_chunk : index
            scf.if %fetches_ahead {
              func.call @fetch_x(%x, %next_row, %col) : (!x_rows, index, index) -> ()
            }
            // With a gate:
            scf.if %fetches_ahead {
              func.call @fetch_z(%z, %next_row, %col) : (!z_rows, index, index) -> ()
            }
            // End of the gate.
            scf.if %fetches_residual {
              func.call @fetch_residual(%residual, %next_row, %col) : (!residual_rows, index, index) -> ()
            }
            // with strides: %x_strided = func.call @row_of_x(%x, %row) : (!x_rows, index) -> !x_rows
            // with strides: %s_strided = func.call @row_of_residual(%s, %row) : (!residual_rows, index) -> !residual_rows
            // with strides: %y_strided = func.call @row_of_y(%y, %row) : (!y_rows, index) -> !y_rows
            %sa = scf.if %adds_residual -> !chunk {
              %s_ = vector.load %s[%row, %col] : !residual_rows, !residual_chunk
              %rounded = func.call @widen_of_residual(%s_) : (!residual_chunk) -> !chunk
              scf.yield %rounded : !chunk
            } else {
              %x_ = vector.load %x[%row, %col] : !x_rows, !x_chunk
              %xa = func.call @widen_of_x(%x_) : (!x_chunk) -> !chunk
              scf.yield %xa : !chunk
            }
            // With a gate:
            // with strides: %z_strided = func.call @row_of_z(%z, %row) : (!z_rows, index) -> !z_rows
            %z_ = vector.load %z[%row, %col] : !z_rows, !z_chunk
            %za = func.call @widen_of_z(%z_) : (!z_chunk) -> !chunk
            %silu, %slope = func.call @silu_of_z(%za) : (!chunk) -> (!chunk, !chunk)
            %sa_gated = func.call @gated_input(%sa, %silu) : (!chunk, !chunk) -> !chunk
            // End of the gate.
            %xhat = func.call @xhat(%sa, %first_mean, %rstd_row) : (!chunk, !acc, !acc) -> !chunk
            %g = scf.if %scales -> !chunk {
              %gamma_ = vector.load %gamma[%col] : !gamma_row, !gamma_chunk  // without sets
              // with sets: %gamma_ = vector.load %gamma[%set, %col] : !gamma_sets, !gamma_chunk
              %ga = func.call @widen_of_gamma(%gamma_) : (!gamma_chunk) -> !chunk
              %with_offset = func.call @weight(%ga) : (!chunk) -> !chunk
              scf.yield %with_offset : !chunk
            } else {
              scf.yield %ones : !chunk
            }
            %ba = scf.if %adds_bias -> !chunk {
              %beta_ = vector.load %beta[%col] : !beta_row, !beta_chunk  // without sets
              // with sets: %beta_ = vector.load %beta[%set, %col] : !beta_sets, !beta_chunk
              %wide = func.call @widen_of_beta(%beta_) : (!beta_chunk) -> !chunk
              scf.yield %wide : !chunk
            } else {
              scf.yield %nothing : !chunk
            }
            %ya = func.call @y_on_cpu(%xhat, %g, %ba) : (!chunk, !chunk, !chunk) -> !chunk
            // With a gate:
            %ya_gated = func.call @gated_output(%ya, %silu) : (!chunk, !chunk) -> !chunk
            // End of the gate.
            %y_ = func.call @round_of_y(%ya) : (!chunk) -> !y_chunk
            vector.store %y_, %y[%row, %col] : !y_rows, !y_chunk
          }
        }
      }
      func.call @restore_rules(%rules) : (i256) -> ()
      return
    }
  }
}
