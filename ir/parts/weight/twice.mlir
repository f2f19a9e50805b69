// The weight of a thread's columns where it is, in memory: it is read with each row, twice. No register keeps it. Rows are
// of whole chunks.

// What a NormSpec and a Schedule decide.
!gamma = bf16
!acc = f32
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!gamma_chunk = vector<8x!gamma>
!chunk = vector<8x!acc>
!gamma_held = memref<1x!gamma_chunk, #gpu.address_space<private>>
!thread = vector<9xindex>
!weight_room = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>

func.func private @my_part(!thread) -> index
func.func private @column(index, !thread) -> (index, i1)
func.func private @load_again_of_gamma(!weight_room, index) -> !gamma_chunk
func.func private @widen_of_gamma(!gamma_chunk) -> !chunk
func.func private @weight(!chunk) -> !chunk
// End of what is replaced.

// Its room: memory.
func.func private @room_for_weight(%early: !gamma_held, %gamma: !gamma_row) -> !weight_room {
  return %gamma : !weight_room
}

// Nothing: it is not kept.
func.func private @begin_weight(%k: index, %thread: !thread, %gamma: !gamma_row, %early: !gamma_held, %weight: !weight_room) {
  return
}

func.func private @complete_weight(%k: index, %thread: !thread, %early: !gamma_held, %weight: !weight_room) {
  return
}

func.func private @keep_weight(%k: index, %thread: !thread, %gamma: !gamma_chunk, %g: !chunk, %weight: !weight_room) {
  return
}

// g of chunk k, with a weight of zeros past the row.
func.func private @chunk_weight(%k: index, %thread: !thread, %weight: !weight_room) -> !chunk {
  %c0 = arith.constant 0 : index
  %zeros = arith.constant dense<0.0> : !gamma_chunk
  %part = func.call @my_part(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %col_in = arith.select %inside, %col, %c0 : index
  %at = arith.addi %part, %col_in : index
  %read = func.call @load_again_of_gamma(%weight, %at) : (!weight_room, index) -> !gamma_chunk
  %narrow = arith.select %inside, %read, %zeros : !gamma_chunk
  %wide = func.call @widen_of_gamma(%narrow) : (!gamma_chunk) -> !chunk
  %g = func.call @weight(%wide) : (!chunk) -> !chunk
  return %g : !chunk
}

// Whether the compiler is kept from computing 1 / g before the first row: it cannot.
func.func private @divides_again() -> i1 {
  %no = arith.constant false
  return %no : i1
}
