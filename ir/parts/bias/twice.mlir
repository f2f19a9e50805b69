// The bias of a thread's columns, which is in rows of an output, where it is: in memory. It is read with each row, twice.

// What a NormSpec and a Schedule decide.
!beta = bf16
!acc = f32
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!beta_chunk = vector<8x!beta>
!chunk = vector<8x!acc>
!thread = vector<9xindex>
!bias_room = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>

func.func private @my_part(!thread) -> index
func.func private @column(index, !thread) -> (index, i1)
func.func private @load_again_of_beta(!bias_room, index) -> !beta_chunk
func.func private @widen_of_beta(!beta_chunk) -> !chunk
// End of what is replaced.

// Its room: memory.
func.func private @room_for_bias(%beta: !beta_row) -> !bias_room {
  return %beta : !bias_room
}

// Nothing: it is not kept.
func.func private @keep_bias(%k: index, %thread: !thread, %beta: !beta_row, %bias: !bias_room) {
  return
}

// The bias of chunk k, and zeros past the row.
func.func private @chunk_bias(%k: index, %thread: !thread, %bias: !bias_room) -> !chunk {
  %c0 = arith.constant 0 : index
  %zeros = arith.constant dense<0.0> : !beta_chunk
  %part = func.call @my_part(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %col_in = arith.select %inside, %col, %c0 : index
  %at = arith.addi %part, %col_in : index
  %read = func.call @load_again_of_beta(%bias, %at) : (!bias_room, index) -> !beta_chunk
  %narrow = arith.select %inside, %read, %zeros : !beta_chunk
  %wide = func.call @widen_of_beta(%narrow) : (!beta_chunk) -> !chunk
  return %wide : !chunk
}
