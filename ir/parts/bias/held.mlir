// The bias of a thread's columns, which is in rows of an output, in registers.

// What a NormSpec and a Schedule decide.
!beta = bf16
!acc = f32
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!beta_chunk = vector<8x!beta>
!chunk = vector<8x!acc>
!thread = vector<9xindex>
!bias_room = memref<1x!beta_chunk, #gpu.address_space<private>>

func.func private @load_bias(index, !thread, !beta_row) -> !beta_chunk
func.func private @widen_of_beta(!beta_chunk) -> !chunk
// End of what is replaced.

func.func private @room_for_bias(%beta: !beta_row) -> !bias_room {
  %room = memref.alloca() : !bias_room
  return %room : !bias_room
}

// The bias of chunk k.
func.func private @keep_bias(%k: index, %thread: !thread, %beta: !beta_row, %bias: !bias_room) {
  %beta_k = func.call @load_bias(%k, %thread, %beta) : (index, !thread, !beta_row) -> !beta_chunk
  memref.store %beta_k, %bias[%k] : !bias_room
  return
}

// The bias of chunk k, from where it is kept.
func.func private @chunk_bias(%k: index, %thread: !thread, %bias: !bias_room) -> !chunk {
  %narrow = memref.load %bias[%k] : !bias_room
  %wide = func.call @widen_of_beta(%narrow) : (!beta_chunk) -> !chunk
  return %wide : !chunk
}
