// A copy of dx in a narrower type. It has dx's roundings, and one more.

// What a NormSpec and a Schedule decide.
!x = f32
!copy = bf16
!acc = f32
!copy_lines = memref<?x4096x!copy, #hal.descriptor_type<storage_buffer>>
!x_chunk = vector<4x!x>
!copy_chunk = vector<4x!copy>
!chunk = vector<4x!acc>

func.func private @widen_of_x(!x_chunk) -> !chunk
func.func private @round_of_copy(!chunk) -> !copy_chunk
func.func private @store_of_copy(!copy_lines, index, index, index, i1, !copy_chunk)
func.func private @store_edge_of_copy(!copy_lines, index, index, index, index, index, i1, !copy_chunk)
// End of what is replaced.

// A chunk of dx, if it is to be stored.
func.func private @store_copy(%copy: !copy_lines, %row: index, %part: index, %col: index, %stores: i1, %dx: !x_chunk) {
  %wide = func.call @widen_of_x(%dx) : (!x_chunk) -> !chunk
  %narrow = func.call @round_of_copy(%wide) : (!chunk) -> !copy_chunk
  func.call @store_of_copy(%copy, %row, %part, %col, %stores, %narrow)
      : (!copy_lines, index, index, index, i1, !copy_chunk) -> ()
  return
}

// What is of the row in a chunk of dx at the row's edge.
func.func private @store_copy_edge(%copy: !copy_lines, %row: index, %k: index, %part: index, %col: index, %shift: index, %exists: i1, %dx: !x_chunk) {
  %wide = func.call @widen_of_x(%dx) : (!x_chunk) -> !chunk
  %narrow = func.call @round_of_copy(%wide) : (!chunk) -> !copy_chunk
  func.call @store_edge_of_copy(%copy, %row, %k, %part, %col, %shift, %exists, %narrow)
      : (!copy_lines, index, index, index, index, index, i1, !copy_chunk) -> ()
  return
}
