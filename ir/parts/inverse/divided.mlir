// 1 / g, which xhat is computed with from an output: without room for it, it is computed for each row.

// What a NormSpec and a Schedule decide.
!gamma = bf16
!acc = f32
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!chunk = vector<8x!acc>
!thread = vector<9xindex>
!inverse_room = memref<1x!chunk, #gpu.address_space<private>>

func.func private @divides_again() -> i1
func.func private @away_from_zero(!chunk) -> !chunk
func.func private @reciprocal(!chunk) -> !chunk
// End of what is replaced.

func.func private @room_for_inverse() -> !inverse_room {
  %room = memref.alloca() : !inverse_room
  return %room : !inverse_room
}

func.func private @keep_inverse(%k: index, %thread: !thread, %g: !chunk, %inverse: !inverse_room) {
  return
}

func.func private @complete_inverse(%k: index, %thread: !thread, %at: index, %gamma: !gamma_row, %inverse: !inverse_room) {
  return
}

// 1 / g of chunk k. A weight that is in registers gets -0.0 added, which changes no number, so that 1 / g seems to
// depend on the row.
func.func private @chunk_inverse(%k: index, %thread: !thread, %g: !chunk, %row_zero: !acc, %inverse: !inverse_room) -> !chunk {
  %divides_again = func.call @divides_again() : () -> i1
  %row_zeros = vector.broadcast %row_zero : !acc to !chunk
  %row_g = arith.addf %g, %row_zeros : !chunk
  %g_here = arith.select %divides_again, %row_g, %g : !chunk
  %divisor = func.call @away_from_zero(%g_here) : (!chunk) -> !chunk
  %own = func.call @reciprocal(%divisor) : (!chunk) -> !chunk
  return %own : !chunk
}
