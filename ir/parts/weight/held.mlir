// The weight of a thread's columns in registers.

// What a NormSpec and a Schedule decide.
!gamma = bf16
!acc = f32
#from_output = false
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!gamma_chunk = vector<8x!gamma>
!chunk = vector<8x!acc>
!gamma_held = memref<1x!gamma_chunk, #gpu.address_space<private>>
!thread = vector<9xindex>
!weight_room = memref<1x!gamma_chunk, #gpu.address_space<private>>

func.func private @load_weight(index, !thread, !gamma_row, !gamma_held)
func.func private @widen_of_gamma(!gamma_chunk) -> !chunk
func.func private @weight(!chunk) -> !chunk
// End of what is replaced.

// Its room: the registers that it is read into.
func.func private @room_for_weight(%early: !gamma_held, %gamma: !gamma_row) -> !weight_room {
  return %early : !weight_room
}

// The weight of chunk k, which is read before anything else where rows begin with an access.
func.func private @begin_weight(%k: index, %thread: !thread, %gamma: !gamma_row, %early: !gamma_held, %weight: !weight_room) {
  func.call @load_weight(%k, %thread, %gamma, %early) : (index, !thread, !gamma_row, !gamma_held) -> ()
  return
}

// Nothing more to do.
func.func private @complete_weight(%k: index, %thread: !thread, %early: !gamma_held, %weight: !weight_room) {
  return
}

// The weight of chunk k and g, its sum with the offset, where both are known.
func.func private @keep_weight(%k: index, %thread: !thread, %gamma: !gamma_chunk, %g: !chunk, %weight: !weight_room) {
  memref.store %gamma, %weight[%k] : !weight_room
  return
}

// g of chunk k, from where it is kept.
func.func private @chunk_weight(%k: index, %thread: !thread, %weight: !weight_room) -> !chunk {
  %narrow = memref.load %weight[%k] : !weight_room
  %wide = func.call @widen_of_gamma(%narrow) : (!gamma_chunk) -> !chunk
  %g = func.call @weight(%wide) : (!chunk) -> !chunk
  return %g : !chunk
}

// Whether the compiler is kept from computing 1 / g before the first row.
func.func private @divides_again() -> i1 {
  %from_output = arith.constant #from_output
  return %from_output : i1
}
