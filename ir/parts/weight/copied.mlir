// The weight of a thread's columns in shared memory, as it came. cp.async copies it there, where rows begin with an access.

// What a NormSpec and a Schedule decide.
!gamma = bf16
!acc = f32
#vector = 8 : index
#gamma_copied = 8 : index
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!gamma_chunk = vector<8x!gamma>
!chunk = vector<8x!acc>
!gamma_held = memref<1x!gamma_chunk, #gpu.address_space<private>>
!thread = vector<9xindex>
!weight_room = memref<1x4096x!gamma, #gpu.address_space<workgroup>>

func.func private @my_group(!thread) -> index
func.func private @my_part(!thread) -> index
func.func private @column(index, !thread) -> (index, i1)
func.func private @widen_of_gamma(!gamma_chunk) -> !chunk
func.func private @weight(!chunk) -> !chunk
// End of what is replaced.

// Its room: [groups, columns of T threads].
func.func private @room_for_weight(%early: !gamma_held, %gamma: !gamma_row) -> !weight_room {
  %room = memref.alloc() : !weight_room
  return %room : !weight_room
}

// The weight of chunk k, which is copied before anything else where rows begin with an access.
func.func private @begin_weight(%k: index, %thread: !thread, %gamma: !gamma_row, %early: !gamma_held, %weight: !weight_room) {
  %c0 = arith.constant 0 : index
  %v = arith.constant #vector
  %group = func.call @my_group(%thread) : (!thread) -> index
  %part = func.call @my_part(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %at = arith.addi %part, %col : index
  %size = arith.select %inside, %v, %c0 : index
  %copy = "nvgpu.device_async_copy"(%weight, %group, %col, %gamma, %at, %size)
      <{dstElements = #gamma_copied, operandSegmentSizes = array<i32: 1, 2, 1, 1, 1>}>
      : (!weight_room, index, index, !gamma_row, index, index) -> !nvgpu.device.async.token
  return
}

// Nothing more to do.
func.func private @complete_weight(%k: index, %thread: !thread, %early: !gamma_held, %weight: !weight_room) {
  return
}

// The weight of chunk k and g, its sum with the offset, where both are known.
func.func private @keep_weight(%k: index, %thread: !thread, %gamma: !gamma_chunk, %g: !chunk, %weight: !weight_room) {
  %group = func.call @my_group(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  vector.store %gamma, %weight[%group, %col] : !weight_room, !gamma_chunk
  return
}

// g of chunk k, from where it is kept.
func.func private @chunk_weight(%k: index, %thread: !thread, %weight: !weight_room) -> !chunk {
  %group = func.call @my_group(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %narrow = vector.load %weight[%group, %col] : !weight_room, !gamma_chunk
  %wide = func.call @widen_of_gamma(%narrow) : (!gamma_chunk) -> !chunk
  %g = func.call @weight(%wide) : (!chunk) -> !chunk
  return %g : !chunk
}

// Whether the compiler is kept from computing 1 / g before the first row: it cannot, with a weight in shared memory.
func.func private @divides_again() -> i1 {
  %no = arith.constant false
  return %no : i1
}
