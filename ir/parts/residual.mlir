// The gradient that came to the residual's sum past the norm. It is added to dx.

// What a NormSpec and a Schedule decide.
!residual = bf16
!residual_lines = memref<?x4096x!residual, #hal.descriptor_type<storage_buffer>>
!residual_chunk = vector<8x!residual>
!residual_held = memref<1x!residual_chunk, #gpu.address_space<private>>
!thread = vector<9xindex>

func.func private @my_part(!thread) -> index
func.func private @my_shift(!thread) -> index
func.func private @shifted() -> i1
func.func private @column(index, !thread) -> (index, i1)
func.func private @load_cells_of_residual(!residual_lines, index, index, index, index, i1, index) -> !residual_chunk
// End of what is replaced.

// Chunk k of a row of it, into registers.
func.func private @load_residual(%k: index, %thread: !thread, %row: index, %has_row: i1, %dresidual: !residual_lines, %residual_held: !residual_held) {
  %part = func.call @my_part(%thread) : (!thread) -> index
  %shift = func.call @my_shift(%thread) : (!thread) -> index
  %shifted = func.call @shifted() : () -> i1
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %exists = arith.andi %inside, %has_row : i1
  %reads = arith.select %shifted, %exists, %inside : i1
  %chunk = func.call @load_cells_of_residual(%dresidual, %row, %k, %part, %col, %reads, %shift)
      : (!residual_lines, index, index, index, index, i1, index) -> !residual_chunk
  memref.store %chunk, %residual_held[%k] : !residual_held
  return
}
