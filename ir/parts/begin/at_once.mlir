// What a thread keeps of its columns, all of it at once: rows begin anywhere in an access, or are copied in bulk.

// What a NormSpec and a Schedule decide.
!gamma = bf16
!beta = bf16
!acc = f32
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!gamma_chunk = vector<8x!gamma>
!beta_chunk = vector<8x!beta>
!chunk = vector<8x!acc>
!gamma_held = memref<1x!gamma_chunk, #gpu.address_space<private>>
!thread = vector<9xindex>
!weight_room = memref<1x4096x!gamma, #gpu.address_space<workgroup>>
!bias_room = memref<1x!beta_chunk, #gpu.address_space<private>>
!inverse_room = memref<1x4096x!acc, #gpu.address_space<workgroup>>

func.func private @my_part(!thread) -> index
func.func private @my_shift(!thread) -> index
func.func private @column(index, !thread) -> (index, i1)
func.func private @columns_at_of_gamma(!gamma_row, index, index, index, i1, index) -> !gamma_chunk
func.func private @widen_of_gamma(!gamma_chunk) -> !chunk
func.func private @weight(!chunk) -> !chunk
func.func private @keep_weight(index, !thread, !gamma_chunk, !chunk, !weight_room)
func.func private @keep_bias(index, !thread, !beta_row, !bias_room)
func.func private @keep_inverse(index, !thread, !chunk, !inverse_room)
// End of what is replaced.

// Chunk k of the weight, the bias and 1 / g.
func.func private @begin_chunk(%k: index, %thread: !thread, %gamma: !gamma_row, %beta: !beta_row, %early: !gamma_held, %weight: !weight_room, %bias: !bias_room, %inverse: !inverse_room) {
  %part = func.call @my_part(%thread) : (!thread) -> index
  %shift = func.call @my_shift(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %gamma_k = func.call @columns_at_of_gamma(%gamma, %k, %part, %col, %inside, %shift)
      : (!gamma_row, index, index, index, i1, index) -> !gamma_chunk
  %wide = func.call @widen_of_gamma(%gamma_k) : (!gamma_chunk) -> !chunk
  %g = func.call @weight(%wide) : (!chunk) -> !chunk
  func.call @keep_weight(%k, %thread, %gamma_k, %g, %weight) : (index, !thread, !gamma_chunk, !chunk, !weight_room) -> ()
  func.call @keep_bias(%k, %thread, %beta, %bias) : (index, !thread, !beta_row, !bias_room) -> ()
  func.call @keep_inverse(%k, %thread, %g, %inverse) : (index, !thread, !chunk, !inverse_room) -> ()
  return
}

// Nothing is left.
func.func private @complete_chunk(%k: index, %thread: !thread, %gamma: !gamma_row, %beta: !beta_row, %early: !gamma_held, %weight: !weight_room, %bias: !bias_room, %inverse: !inverse_room) {
  return
}
