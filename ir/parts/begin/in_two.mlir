// What a thread keeps of its columns: the weight is on its way while the first rows are fetched, and the rest follows.

// What a NormSpec and a Schedule decide.
!gamma = bf16
!beta = bf16
!acc = f32
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!gamma_chunk = vector<8x!gamma>
!beta_chunk = vector<8x!beta>
!gamma_held = memref<1x!gamma_chunk, #gpu.address_space<private>>
!thread = vector<9xindex>
!weight_room = memref<1x4096x!gamma, #gpu.address_space<workgroup>>
!bias_room = memref<1x!beta_chunk, #gpu.address_space<private>>
!inverse_room = memref<1x4096x!acc, #gpu.address_space<workgroup>>

func.func private @begin_weight(index, !thread, !gamma_row, !gamma_held, !weight_room)
func.func private @complete_weight(index, !thread, !gamma_held, !weight_room)
func.func private @keep_bias(index, !thread, !beta_row, !bias_room)
func.func private @complete_inverse(index, !thread, index, !gamma_row, !inverse_room)
func.func private @my_part(!thread) -> index
func.func private @column(index, !thread) -> (index, i1)
// End of what is replaced.

// Chunk k of the weight.
func.func private @begin_chunk(%k: index, %thread: !thread, %gamma: !gamma_row, %beta: !beta_row, %early: !gamma_held, %weight: !weight_room, %bias: !bias_room, %inverse: !inverse_room) {
  func.call @begin_weight(%k, %thread, %gamma, %early, %weight) : (index, !thread, !gamma_row, !gamma_held, !weight_room) -> ()
  return
}

// Chunk k of the bias and 1 / g.
func.func private @complete_chunk(%k: index, %thread: !thread, %gamma: !gamma_row, %beta: !beta_row, %early: !gamma_held, %weight: !weight_room, %bias: !bias_room, %inverse: !inverse_room) {
  %c0 = arith.constant 0 : index
  %part = func.call @my_part(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %col_in = arith.select %inside, %col, %c0 : index
  %at = arith.addi %part, %col_in : index
  func.call @complete_weight(%k, %thread, %early, %weight) : (index, !thread, !gamma_held, !weight_room) -> ()
  func.call @keep_bias(%k, %thread, %beta, %bias) : (index, !thread, !beta_row, !bias_room) -> ()
  func.call @complete_inverse(%k, %thread, %at, %gamma, %inverse) : (index, !thread, index, !gamma_row, !inverse_room) -> ()
  return
}
