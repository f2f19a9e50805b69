// What a thread keeps of its columns: the weight and, from the output, the bias and 1 / g.

// What a NormSpec and a Schedule decide.
!gamma = bf16
!beta = bf16
!acc = f32
#chunks = 1 : index
#copies_weight = true
#widens_weight = false
#adds_bias = false
#stages_bias = false
#stages_inverse = false
!gamma_row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!beta_row = memref<4096x!beta, #hal.descriptor_type<storage_buffer>>
!gamma_staged = memref<1x4096x!gamma, #gpu.address_space<workgroup>>
!wide_staged = memref<1x4096x!acc, #gpu.address_space<workgroup>>
!beta_staged = memref<1x4096x!beta, #gpu.address_space<workgroup>>
!inverse_staged = memref<1x4096x!acc, #gpu.address_space<workgroup>>
!gamma_chunk = vector<8x!gamma>
!beta_chunk = vector<8x!beta>
!chunk = vector<8x!acc>
!gamma_held = memref<1x!gamma_chunk, #gpu.address_space<private>>
!beta_held = memref<1x!beta_chunk, #gpu.address_space<private>>
!held = memref<1x!chunk, #gpu.address_space<private>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>

func.func private @columns_at_of_beta(!beta_row, index, index, index, i1, index) -> !beta_chunk
func.func private @away_from_zero(!chunk) -> !chunk
func.func private @reciprocal(!chunk) -> !chunk
func.func private @column(index, index, index, index) -> (index, i1)
func.func private @columns_at_of_gamma(!gamma_row, index, index, index, i1, index) -> !gamma_chunk
func.func private @widen_of_gamma(!gamma_chunk) -> !chunk
func.func private @weight(!chunk) -> !chunk
func.func private @divides_again() -> i1
func.func private @widen_of_beta(!beta_chunk) -> !chunk
// End of what is replaced.

// The bias of chunk k, to where the schedule keeps it.
func.func private @keep_bias(%beta: !beta_row, %k: index, %part: index, %col: index, %inside: i1, %shift: index, %group: index, %held: !beta_held, %staged: !beta_staged) {
  %stages_bias = arith.constant #stages_bias
  %beta_k = func.call @columns_at_of_beta(%beta, %k, %part, %col, %inside, %shift)
      : (!beta_row, index, index, index, i1, index) -> !beta_chunk
  scf.if %stages_bias {
    vector.store %beta_k, %staged[%group, %col] : !beta_staged, !beta_chunk
  } else {
    memref.store %beta_k, %held[%k] : !beta_held
  }
  return
}

// 1 / g to shared memory.
func.func private @keep_inverse(%g: !chunk, %group: index, %col: index, %staged: !inverse_staged) {
  %divisor = func.call @away_from_zero(%g) : (!chunk) -> !chunk
  %inverse = func.call @reciprocal(%divisor) : (!chunk) -> !chunk
  vector.store %inverse, %staged[%group, %col] : !inverse_staged, !chunk
  return
}

// What a thread keeps for chunk k of rows that begin anywhere: the weight, and what a backward from the
// output takes.
func.func private @keep_columns(%k: index, %t: index, %group: index, %part: index, %shift: index, %gamma: !gamma_row, %beta: !beta_row, %gamma_held: !gamma_held, %gamma_staged: !gamma_staged, %wide_staged: !wide_staged, %beta_held: !beta_held, %beta_staged: !beta_staged, %inverse_staged: !inverse_staged) {
  %copies_weight = arith.constant #copies_weight
  %widens_weight = arith.constant #widens_weight
  %adds_bias = arith.constant #adds_bias
  %stages_inverse = arith.constant #stages_inverse
  %col, %inside = func.call @column(%k, %t, %part, %shift) : (index, index, index, index) -> (index, i1)
  %gamma_k = func.call @columns_at_of_gamma(%gamma, %k, %part, %col, %inside, %shift)
      : (!gamma_row, index, index, index, i1, index) -> !gamma_chunk
  %gamma_wide = func.call @widen_of_gamma(%gamma_k) : (!gamma_chunk) -> !chunk
  %g = func.call @weight(%gamma_wide) : (!chunk) -> !chunk
  scf.if %copies_weight {
    vector.store %gamma_k, %gamma_staged[%group, %col] : !gamma_staged, !gamma_chunk
  } else {
    memref.store %gamma_k, %gamma_held[%k] : !gamma_held
  }
  scf.if %widens_weight {
    vector.store %g, %wide_staged[%group, %col] : !wide_staged, !chunk
  }
  scf.if %adds_bias {
    func.call @keep_bias(%beta, %k, %part, %col, %inside, %shift, %group, %beta_held, %beta_staged)
        : (!beta_row, index, index, index, i1, index, index, !beta_held, !beta_staged) -> ()
  }
  scf.if %stages_inverse {
    func.call @keep_inverse(%g, %group, %col, %inverse_staged) : (!chunk, index, index, !inverse_staged) -> ()
  }
  return
}

// What a thread keeps of its columns, and zeros for their sums. A chunk past the end of the row is all zeros and is
// never stored.
func.func private @begin_columns(%t: index, %group: index, %part: index, %shift: index, %gamma: !gamma_row, %beta: !beta_row, %gamma_held: !gamma_held, %gamma_staged: !gamma_staged, %wide_staged: !wide_staged, %beta_held: !beta_held, %beta_staged: !beta_staged, %inverse_staged: !inverse_staged, %dgamma_sums: !held, %dbeta_sums: !held) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %chunks = arith.constant #chunks
  %zeros = arith.constant dense<0.0> : !chunk
  scf.for %k = %c0 to %chunks step %c1 {
    func.call @keep_columns(%k, %t, %group, %part, %shift, %gamma, %beta, %gamma_held, %gamma_staged, %wide_staged, %beta_held, %beta_staged, %inverse_staged)
        : (index, index, index, index, index, !gamma_row, !beta_row, !gamma_held, !gamma_staged, !wide_staged, !beta_held, !beta_staged, !inverse_staged) -> ()
    memref.store %zeros, %dgamma_sums[%k] : !held
    memref.store %zeros, %dbeta_sums[%k] : !held
  } {llvm.loop_annotation = #unrolled}
  return
}

// The weight of chunk k, from where the schedule keeps it.
func.func private @chunk_weight(%held: !gamma_held, %copied: !gamma_staged, %widened: !wide_staged, %group: index, %k: index, %col: index) -> !chunk {
  %copies_weight = arith.constant #copies_weight
  %widens_weight = arith.constant #widens_weight
  %weight = scf.if %widens_weight -> !chunk {
    %wide = vector.load %widened[%group, %col] : !wide_staged, !chunk
    scf.yield %wide : !chunk
  } else {
    %narrow = scf.if %copies_weight -> !gamma_chunk {
      %shared = vector.load %copied[%group, %col] : !gamma_staged, !gamma_chunk
      scf.yield %shared : !gamma_chunk
    } else {
      %own = memref.load %held[%k] : !gamma_held
      scf.yield %own : !gamma_chunk
    }
    %gamma_wide = func.call @widen_of_gamma(%narrow) : (!gamma_chunk) -> !chunk
    %wide = func.call @weight(%gamma_wide) : (!chunk) -> !chunk
    scf.yield %wide : !chunk
  }
  return %weight : !chunk
}

// 1 / g, from where it is kept. Without a place for it, it is computed for each row: a weight that is in
// registers gets -0.0 added, which changes no number, so that 1 / g seems to depend on the row.
func.func private @chunk_inverse(%staged: !inverse_staged, %group: index, %col: index, %g: !chunk, %row_zero: !acc) -> !chunk {
  %stages_inverse = arith.constant #stages_inverse
  %divides_again = func.call @divides_again() : () -> i1
  %inverse = scf.if %stages_inverse -> !chunk {
    %shared = vector.load %staged[%group, %col] : !inverse_staged, !chunk
    scf.yield %shared : !chunk
  } else {
    %row_zeros = vector.broadcast %row_zero : !acc to !chunk
    %row_g = arith.addf %g, %row_zeros : !chunk
    %g_here = arith.select %divides_again, %row_g, %g : !chunk
    %divisor = func.call @away_from_zero(%g_here) : (!chunk) -> !chunk
    %own = func.call @reciprocal(%divisor) : (!chunk) -> !chunk
    scf.yield %own : !chunk
  }
  return %inverse : !chunk
}

// The bias of chunk k, from where it is kept.
func.func private @chunk_bias(%held: !beta_held, %staged: !beta_staged, %group: index, %k: index, %col: index) -> !chunk {
  %adds_bias = arith.constant #adds_bias
  %stages_bias = arith.constant #stages_bias
  %zeros = arith.constant dense<0.0> : !chunk
  %bias = scf.if %adds_bias -> !chunk {
    %narrow = scf.if %stages_bias -> !beta_chunk {
      %shared = vector.load %staged[%group, %col] : !beta_staged, !beta_chunk
      scf.yield %shared : !beta_chunk
    } else {
      %own = memref.load %held[%k] : !beta_held
      scf.yield %own : !beta_chunk
    }
    %wide = func.call @widen_of_beta(%narrow) : (!beta_chunk) -> !chunk
    scf.yield %wide : !chunk
  } else {
    scf.yield %zeros : !chunk
  }
  return %bias : !chunk
}
