// The weights of a thread's chunks: from memory to registers, or from there to shared memory and back.

// What a NormSpec and a Schedule decide.
!gamma = bf16
!beta = bf16
#scales = true
#adds_bias = true
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!forward_gamma = vector<8x!gamma>
!forward_beta = vector<8x!beta>
!forward_gamma_held = memref<2x!forward_gamma, #gpu.address_space<private>>
!forward_beta_held = memref<2x!forward_beta, #gpu.address_space<private>>
!forward_gamma_staged = memref<2x256x8x!gamma, #gpu.address_space<workgroup>>
!forward_beta_staged = memref<2x256x8x!beta, #gpu.address_space<workgroup>>
!forward_thread = vector<8xindex>

func.func private @my_id(!forward_thread) -> index
func.func private @my_part(!forward_thread) -> index
func.func private @my_row(!forward_thread) -> index
func.func private @column(index, index, !forward_thread) -> (index, i1)
func.func private @has_access(index, index, index, i1) -> i1
func.func private @columns_at_of_gamma(!forward_gamma, !gamma_row, index, index, index) -> !forward_gamma
func.func private @columns_at_of_beta(!forward_beta, !beta_row, index, index, index) -> !forward_beta
// End of what is replaced.

// Loads the weights of a thread's chunk k of a step.
func.func private @load_weights(%gamma: !gamma_row, %beta: !beta_row, %thread: !forward_thread, %step: index, %k: index, %gamma_held: !forward_gamma_held, %beta_held: !forward_beta_held) {
  %part = func.call @my_part(%thread) : (!forward_thread) -> index
  %c0 = arith.constant 0 : index
  %no_gamma = arith.constant dense<0.0> : !forward_gamma
  %no_beta = arith.constant dense<0.0> : !forward_beta
  %scales = arith.constant #scales
  %adds_bias = arith.constant #adds_bias
  %col, %inside = func.call @column(%step, %k, %thread) : (index, index, !forward_thread) -> (index, i1)
  %row = func.call @my_row(%thread) : (!forward_thread) -> index
  %at = arith.addi %part, %col : index
  %has_access = func.call @has_access(%row, %col, %at, %inside) : (index, index, index, i1) -> i1
  %col_in = arith.select %has_access, %col, %c0 : index
  %at_in = arith.addi %part, %col_in : index
  scf.if %scales {
    %gamma_k = func.call @columns_at_of_gamma(%no_gamma, %gamma, %row, %k, %at_in) : (!forward_gamma, !gamma_row, index, index, index) -> !forward_gamma
    memref.store %gamma_k, %gamma_held[%k] : !forward_gamma_held
  }
  scf.if %adds_bias {
    %beta_k = func.call @columns_at_of_beta(%no_beta, %beta, %row, %k, %at_in) : (!forward_beta, !beta_row, index, index, index) -> !forward_beta
    memref.store %beta_k, %beta_held[%k] : !forward_beta_held
  }
  return
}

// Those of chunk k wait in shared memory, as they are: a thread reads what it has put there itself. So nobody waits for
// another.
func.func private @stage_weights(%gamma_staged: !forward_gamma_staged, %beta_staged: !forward_beta_staged, %thread: !forward_thread, %k: index, %gamma_held: !forward_gamma_held, %beta_held: !forward_beta_held) {
  %c0 = arith.constant 0 : index
  %scales = arith.constant #scales
  %adds_bias = arith.constant #adds_bias
  %id = func.call @my_id(%thread) : (!forward_thread) -> index
  scf.if %scales {
    %gamma_k = memref.load %gamma_held[%k] : !forward_gamma_held
    vector.store %gamma_k, %gamma_staged[%k, %id, %c0] : !forward_gamma_staged, !forward_gamma
  }
  scf.if %adds_bias {
    %beta_k = memref.load %beta_held[%k] : !forward_beta_held
    vector.store %beta_k, %beta_staged[%k, %id, %c0] : !forward_beta_staged, !forward_beta
  }
  return
}

// The same, back in registers.
func.func private @staged_weights(%gamma_staged: !forward_gamma_staged, %beta_staged: !forward_beta_staged, %thread: !forward_thread, %k: index, %gamma_held: !forward_gamma_held, %beta_held: !forward_beta_held) {
  %c0 = arith.constant 0 : index
  %scales = arith.constant #scales
  %adds_bias = arith.constant #adds_bias
  %id = func.call @my_id(%thread) : (!forward_thread) -> index
  scf.if %scales {
    %gamma_k = vector.load %gamma_staged[%k, %id, %c0] : !forward_gamma_staged, !forward_gamma
    memref.store %gamma_k, %gamma_held[%k] : !forward_gamma_held
  }
  scf.if %adds_bias {
    %beta_k = vector.load %beta_staged[%k, %id, %c0] : !forward_beta_staged, !forward_beta
    memref.store %beta_k, %beta_held[%k] : !forward_beta_held
  }
  return
}
