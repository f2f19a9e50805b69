// No bias is read: rows are the input, or an output without one.

// What a NormSpec and a Schedule decide.
!beta = bf16
!acc = f32
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!beta_chunk = vector<8x!beta>
!chunk = vector<8x!acc>
!thread = vector<9xindex>
!bias_room = memref<1x!beta_chunk, #gpu.address_space<private>>
// End of what is replaced.

func.func private @room_for_bias(%beta: !beta_row) -> !bias_room {
  %room = memref.alloca() : !bias_room
  return %room : !bias_room
}

func.func private @keep_bias(%k: index, %thread: !thread, %beta: !beta_row, %bias: !bias_room) {
  return
}

// Zeros in its place.
func.func private @chunk_bias(%k: index, %thread: !thread, %bias: !bias_room) -> !chunk {
  %zeros = arith.constant dense<0.0> : !chunk
  return %zeros : !chunk
}
