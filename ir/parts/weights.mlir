// How a thread reads the weight and the bias of its columns, and how what it keeps of them begins.

// What a NormSpec and a Schedule decide.
!gamma = bf16
!beta = bf16
!acc = f32
#chunks = 1 : index
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!gamma_chunk = vector<8x!gamma>
!beta_chunk = vector<8x!beta>
!chunk = vector<8x!acc>
!gamma_held = memref<1x!gamma_chunk, #gpu.address_space<private>>
!held = memref<1x!chunk, #gpu.address_space<private>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
!thread = vector<9xindex>
!weight_room = memref<1x4096x!gamma, #gpu.address_space<workgroup>>
!bias_room = memref<1x!beta_chunk, #gpu.address_space<private>>
!inverse_room = memref<1x4096x!acc, #gpu.address_space<workgroup>>

func.func private @my_part(!thread) -> index
func.func private @my_shift(!thread) -> index
func.func private @column(index, !thread) -> (index, i1)
func.func private @columns_at_of_gamma(!gamma_row, index, index, index, i1, index) -> !gamma_chunk
func.func private @columns_at_of_beta(!beta_row, index, index, index, i1, index) -> !beta_chunk
func.func private @begin_chunk(index, !thread, !gamma_row, !beta_row, !gamma_held, !weight_room, !bias_room, !inverse_room)
// End of what is replaced.

// The weight of chunk k, into registers.
func.func private @load_weight(%k: index, %thread: !thread, %gamma: !gamma_row, %early: !gamma_held) {
  %part = func.call @my_part(%thread) : (!thread) -> index
  %shift = func.call @my_shift(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %gamma_k = func.call @columns_at_of_gamma(%gamma, %k, %part, %col, %inside, %shift)
      : (!gamma_row, index, index, index, i1, index) -> !gamma_chunk
  memref.store %gamma_k, %early[%k] : !gamma_held
  return
}

// The bias of chunk k.
func.func private @load_bias(%k: index, %thread: !thread, %beta: !beta_row) -> !beta_chunk {
  %part = func.call @my_part(%thread) : (!thread) -> index
  %shift = func.call @my_shift(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %beta_k = func.call @columns_at_of_beta(%beta, %k, %part, %col, %inside, %shift)
      : (!beta_row, index, index, index, i1, index) -> !beta_chunk
  return %beta_k : !beta_chunk
}

// What a thread keeps of its columns, as far as it is read before the first rows; and zeros for their sums. A chunk past
// the end of the row is all zeros and is never stored.
func.func private @begin_columns(%thread: !thread, %gamma: !gamma_row, %beta: !beta_row, %early: !gamma_held, %weight: !weight_room, %bias: !bias_room, %inverse: !inverse_room, %dgamma_sums: !held, %dbeta_sums: !held) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %chunks = arith.constant #chunks
  %zeros = arith.constant dense<0.0> : !chunk
  scf.for %k = %c0 to %chunks step %c1 {
    func.call @begin_chunk(%k, %thread, %gamma, %beta, %early, %weight, %bias, %inverse)
        : (index, !thread, !gamma_row, !beta_row, !gamma_held, !weight_room, !bias_room, !inverse_room) -> ()
    memref.store %zeros, %dgamma_sums[%k] : !held
    memref.store %zeros, %dbeta_sums[%k] : !held
  } {llvm.loop_annotation = #unrolled}
  return
}
