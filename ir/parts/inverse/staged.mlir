// 1 / g, which xhat is computed with from an output, in shared memory.

// What a NormSpec and a Schedule decide.
!gamma = bf16
!acc = f32
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!gamma_chunk = vector<8x!gamma>
!chunk = vector<8x!acc>
!thread = vector<9xindex>
!inverse_room = memref<1x4096x!acc, #gpu.address_space<workgroup>>

func.func private @my_group(!thread) -> index
func.func private @column(index, !thread) -> (index, i1)
func.func private @away_from_zero(!chunk) -> !chunk
func.func private @reciprocal(!chunk) -> !chunk
func.func private @widen_of_gamma(!gamma_chunk) -> !chunk
func.func private @weight(!chunk) -> !chunk
// End of what is replaced.

// Its room: [groups, columns of T threads].
func.func private @room_for_inverse() -> !inverse_room {
  %room = memref.alloc() : !inverse_room
  return %room : !inverse_room
}

// 1 / g of chunk k.
func.func private @keep_inverse(%k: index, %thread: !thread, %g: !chunk, %inverse: !inverse_room) {
  %group = func.call @my_group(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %divisor = func.call @away_from_zero(%g) : (!chunk) -> !chunk
  %one = func.call @reciprocal(%divisor) : (!chunk) -> !chunk
  vector.store %one, %inverse[%group, %col] : !inverse_room, !chunk
  return
}

// 1 / g of chunk k, of a weight that is read once more, from a column on.
func.func private @complete_inverse(%k: index, %thread: !thread, %at: index, %gamma: !gamma_row, %inverse: !inverse_room) {
  %gamma_k = vector.load %gamma[%at] : !gamma_row, !gamma_chunk
  %wide = func.call @widen_of_gamma(%gamma_k) : (!gamma_chunk) -> !chunk
  %g = func.call @weight(%wide) : (!chunk) -> !chunk
  func.call @keep_inverse(%k, %thread, %g, %inverse) : (index, !thread, !chunk, !inverse_room) -> ()
  return
}

// 1 / g of chunk k, from where it is kept.
func.func private @chunk_inverse(%k: index, %thread: !thread, %g: !chunk, %row_zero: !acc, %inverse: !inverse_room) -> !chunk {
  %group = func.call @my_group(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %shared = vector.load %inverse[%group, %col] : !inverse_room, !chunk
  return %shared : !chunk
}
