// The weight of a thread's columns in shared memory, with the offset added and in the type of sums.

// What a NormSpec and a Schedule decide.
!gamma = bf16
!acc = f32
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!gamma_chunk = vector<8x!gamma>
!chunk = vector<8x!acc>
!gamma_held = memref<1x!gamma_chunk, #gpu.address_space<private>>
!thread = vector<9xindex>
!weight_room = memref<1x4096x!acc, #gpu.address_space<workgroup>>

func.func private @load_weight(index, !thread, !gamma_row, !gamma_held)
func.func private @widen_of_gamma(!gamma_chunk) -> !chunk
func.func private @weight(!chunk) -> !chunk
func.func private @my_group(!thread) -> index
func.func private @column(index, !thread) -> (index, i1)
// End of what is replaced.

// Its room: [groups, columns of T threads].
func.func private @room_for_weight(%early: !gamma_held, %gamma: !gamma_row) -> !weight_room {
  %room = memref.alloc() : !weight_room
  return %room : !weight_room
}

// The weight of chunk k, which is read before anything else where rows begin with an access, and widened later.
func.func private @begin_weight(%k: index, %thread: !thread, %gamma: !gamma_row, %early: !gamma_held, %weight: !weight_room) {
  func.call @load_weight(%k, %thread, %gamma, %early) : (index, !thread, !gamma_row, !gamma_held) -> ()
  return
}

// Widens what was read.
func.func private @complete_weight(%k: index, %thread: !thread, %early: !gamma_held, %weight: !weight_room) {
  %narrow = memref.load %early[%k] : !gamma_held
  %wide = func.call @widen_of_gamma(%narrow) : (!gamma_chunk) -> !chunk
  %g = func.call @weight(%wide) : (!chunk) -> !chunk
  func.call @keep_weight(%k, %thread, %narrow, %g, %weight) : (index, !thread, !gamma_chunk, !chunk, !weight_room) -> ()
  return
}

// The weight of chunk k and g, its sum with the offset, where both are known.
func.func private @keep_weight(%k: index, %thread: !thread, %gamma: !gamma_chunk, %g: !chunk, %weight: !weight_room) {
  %group = func.call @my_group(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  vector.store %g, %weight[%group, %col] : !weight_room, !chunk
  return
}

// g of chunk k, from where it is kept.
func.func private @chunk_weight(%k: index, %thread: !thread, %weight: !weight_room) -> !chunk {
  %group = func.call @my_group(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %g = vector.load %weight[%group, %col] : !weight_room, !chunk
  return %g : !chunk
}

// Whether the compiler is kept from computing 1 / g before the first row: it cannot, with a weight in shared memory.
func.func private @divides_again() -> i1 {
  %no = arith.constant false
  return %no : i1
}
