// The other gradients of the output, which are added to dy. more.mlir says when they are loaded.

// What a NormSpec and a Schedule decide.
!dy = bf16
!acc = f32
!dy_sum = bf16
#has_dy2 = false
#has_dy3 = false
#has_dy4 = false
!dy_lines = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>
!more_lines = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>
!dy_chunk = vector<8x!dy>
!dy_sum_chunk = vector<8x!dy_sum>
!chunk = vector<8x!acc>
!more_dy_held = memref<3x1x!dy_chunk, #gpu.address_space<private>>
!thread = vector<9xindex>

func.func private @load_cells_of_dy(!dy_lines, index, index, index, index, i1, index) -> !dy_chunk
func.func private @my_part(!thread) -> index
func.func private @my_shift(!thread) -> index
func.func private @column(index, !thread) -> (index, i1)
func.func private @widen_of_dy(!dy_chunk) -> !chunk
func.func private @round_apart_of_dy_sum(!chunk) -> !dy_sum_chunk
func.func private @widen_of_dy_sum(!dy_sum_chunk) -> !chunk
// End of what is replaced.

// A row's chunk of one of them. What is not of the row is zeros.
func.func private @load_dy(%more: !dy_lines, %row: index, %k: index, %part: index, %col: index, %exists: i1, %shift: index) -> !dy_chunk {
  %zeros = arith.constant dense<0.0> : !dy_chunk
  %read = func.call @load_cells_of_dy(%more, %row, %k, %part, %col, %exists, %shift)
      : (!dy_lines, index, index, index, index, i1, index) -> !dy_chunk
  %own = arith.select %exists, %read, %zeros : !dy_chunk
  return %own : !dy_chunk
}

// Chunk k of a row of all of them.
func.func private @load_more_chunk(%dy2: !more_lines, %dy3: !dy_lines, %dy4: !dy_lines, %row: index, %has_row: i1, %k: index, %thread: !thread, %more_held: !more_dy_held) {
  %part = func.call @my_part(%thread) : (!thread) -> index
  %shift = func.call @my_shift(%thread) : (!thread) -> index
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  %has_dy2 = arith.constant #has_dy2
  %has_dy3 = arith.constant #has_dy3
  %has_dy4 = arith.constant #has_dy4
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %exists = arith.andi %inside, %has_row : i1
  scf.if %has_dy2 {
    %dy2_k = func.call @load_dy(%dy2, %row, %k, %part, %col, %exists, %shift)
        : (!dy_lines, index, index, index, index, i1, index) -> !dy_chunk
    memref.store %dy2_k, %more_held[%c0, %k] : !more_dy_held
  }
  scf.if %has_dy3 {
    %dy3_k = func.call @load_dy(%dy3, %row, %k, %part, %col, %exists, %shift)
        : (!dy_lines, index, index, index, index, i1, index) -> !dy_chunk
    memref.store %dy3_k, %more_held[%c1, %k] : !more_dy_held
  }
  scf.if %has_dy4 {
    %dy4_k = func.call @load_dy(%dy4, %row, %k, %part, %col, %exists, %shift)
        : (!dy_lines, index, index, index, index, i1, index) -> !dy_chunk
    memref.store %dy4_k, %more_held[%c2, %k] : !more_dy_held
  }
  return
}

// A sum of gradients of the output and one more, rounded as an addition rounds it.
func.func private @plus_dy(%sum: !chunk, %more: !dy_chunk, %counts: i1) -> !chunk {
  %after = scf.if %counts -> !chunk {
    %wide = func.call @widen_of_dy(%more) : (!dy_chunk) -> !chunk
    %exact = arith.addf %sum, %wide : !chunk
    %rounded = func.call @round_apart_of_dy_sum(%exact) : (!chunk) -> !dy_sum_chunk
    %both = func.call @widen_of_dy_sum(%rounded) : (!dy_sum_chunk) -> !chunk
    scf.yield %both : !chunk
  } else {
    scf.yield %sum : !chunk
  }
  return %after : !chunk
}

// The sum of a chunk's gradients of the output.
func.func private @summed_dy(%dy: !dy_chunk, %more_held: !more_dy_held, %k: index) -> !chunk {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  %has_dy2 = arith.constant #has_dy2
  %has_dy3 = arith.constant #has_dy3
  %has_dy4 = arith.constant #has_dy4
  %dya_1 = func.call @widen_of_dy(%dy) : (!dy_chunk) -> !chunk
  %dy2 = memref.load %more_held[%c0, %k] : !more_dy_held
  %dya_2 = func.call @plus_dy(%dya_1, %dy2, %has_dy2) : (!chunk, !dy_chunk, i1) -> !chunk
  %dy3 = memref.load %more_held[%c1, %k] : !more_dy_held
  %dya_3 = func.call @plus_dy(%dya_2, %dy3, %has_dy3) : (!chunk, !dy_chunk, i1) -> !chunk
  %dy4 = memref.load %more_held[%c2, %k] : !more_dy_held
  %dya_4 = func.call @plus_dy(%dya_3, %dy4, %has_dy4) : (!chunk, !dy_chunk, i1) -> !chunk
  return %dya_4 : !chunk
}
