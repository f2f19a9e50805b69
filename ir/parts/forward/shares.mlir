// A thread's share of a row's sums.

// What a NormSpec and a Schedule decide.
!x = bf16
!residual = bf16
!acc = f32
#forward_chunks = 2 : index
#forward_steps = 1 : index
#forward_span = 1 : index
!forward_x_rows = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!forward_residual_rows = memref<?x4096x!residual, #hal.descriptor_type<storage_buffer>>
!forward_x_kept = memref<1x4096x!x, #gpu.address_space<workgroup>>
!forward_residual_kept = memref<1x4096x!residual, #gpu.address_space<workgroup>>
!forward_chunk = vector<8x!acc>
!forward_held = memref<2x!forward_chunk, #gpu.address_space<private>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
#rolled = #llvm.loop_annotation<unroll = <disable = true>>
!forward_thread = vector<8xindex>

func.func private @reread(!forward_x_rows, !forward_residual_rows, !forward_residual_rows, !forward_x_kept, !forward_residual_kept, !forward_thread, i1, index, i1, !forward_held)
func.func private @my_part(!forward_thread) -> index
func.func private @column(index, index, !forward_thread) -> (index, i1)
func.func private @counted(!forward_chunk, !forward_chunk, index, index, i1) -> !forward_chunk
// End of what is replaced.

// A thread's share of a row's sum: of the values without %centre, or of the squares of those.
func.func private @share(%squares: i1, %centre: !acc, %x: !forward_x_rows, %residual: !forward_residual_rows, %s: !forward_residual_rows, %x_kept: !forward_x_kept, %residual_kept: !forward_residual_kept, %thread: !forward_thread, %exists: i1, %again: i1, %values: !forward_held) -> !acc {
  %part = func.call @my_part(%thread) : (!forward_thread) -> index
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %chunks = arith.constant #forward_chunks
  %steps = arith.constant #forward_steps
  %span = arith.constant #forward_span
  %minus_zeros = arith.constant dense<-0.0> : !forward_chunk  // adding -0.0 changes no number
  %centre_v = vector.broadcast %centre : !acc to !forward_chunk
  %sum = scf.for %span_first = %c0 to %steps step %span iter_args(%spans_before = %minus_zeros) -> (!forward_chunk) {
    %span_after = arith.addi %span_first, %span : index
    %span_end = arith.minui %span_after, %steps : index
    %span_sum = scf.for %step = %span_first to %span_end step %c1 iter_args(%steps_before = %minus_zeros) -> (!forward_chunk) {
      func.call @reread(%x, %residual, %s, %x_kept, %residual_kept, %thread, %exists, %step, %again, %values)
          : (!forward_x_rows, !forward_residual_rows, !forward_residual_rows, !forward_x_kept, !forward_residual_kept, !forward_thread, i1, index, i1, !forward_held) -> ()
      %step_sum = scf.for %k = %c0 to %chunks step %c1 iter_args(%before = %steps_before) -> (!forward_chunk) {
        %col, %inside = func.call @column(%step, %k, %thread) : (index, index, !forward_thread) -> (index, i1)
        %value = memref.load %values[%k] : !forward_held
        %more = scf.if %squares -> !forward_chunk {
          %centred = arith.subf %value, %centre_v : !forward_chunk
          %with_square = math.fma %centred, %centred, %before : !forward_chunk
          scf.yield %with_square : !forward_chunk
        } else {
          %centred = arith.subf %value, %centre_v : !forward_chunk
          %with_value = arith.addf %before, %centred : !forward_chunk
          scf.yield %with_value : !forward_chunk
        }
        %at = arith.addi %part, %col : index
        %after = func.call @counted(%more, %before, %k, %at, %inside) : (!forward_chunk, !forward_chunk, index, index, i1) -> !forward_chunk
        scf.yield %after : !forward_chunk
      } {llvm.loop_annotation = #unrolled}
      scf.yield %step_sum : !forward_chunk
    } {llvm.loop_annotation = #rolled}
    %spans = arith.addf %spans_before, %span_sum : !forward_chunk
    scf.yield %spans : !forward_chunk
  } {llvm.loop_annotation = #rolled}
  // Any order of these additions will do, as long as it is always the same order.
  %thread_sum = vector.reduction <add>, %sum fastmath<reassoc> : !forward_chunk into !acc
  return %thread_sum : !acc
}
