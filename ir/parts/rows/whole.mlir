// Rows of whole chunks: V divides N. The same functions as in shifted.mlir.

// What a NormSpec and a Schedule decide.
!dy = bf16
!x = bf16
!gamma = bf16
!acc = f32
#vector = 8 : index
!x_lines = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!acc_rows = memref<?x4096x!acc, #hal.descriptor_type<storage_buffer>>
!dy_chunk = vector<8x!dy>
!x_chunk = vector<8x!x>
!chunk = vector<8x!acc>
!row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!lines = memref<?x4096xbf16, #hal.descriptor_type<storage_buffer>>
!narrow = vector<8x!gamma>
// End of what is replaced.

// Where a column of a row is in memory, counted from the first of the workgroup's part.
func.func private @cell_address(%row: index, %part: index, %column: index) -> (index, index) {
  %at = arith.addi %part, %column : index
  return %row, %at : index, index
}

// Whether chunk k of a thread may have elements of other rows in it: none has.
func.func private @may_be_edge(%k: index) -> i1 {
  %no = arith.constant false
  return %no : i1
}

// How many elements of other rows are before a row, in the access where it begins: none.
func.func private @row_shift(%row: i32) -> index {
  %c0 = arith.constant 0 : index
  return %c0 : index
}

// The elements of chunk k that are of the row: all V.
func.func private @span(%k: index, %column: index, %shift: index) -> (index, index) {
  %c0 = arith.constant 0 : index
  %v = arith.constant #vector
  return %c0, %v : index, index
}

// How many elements are copied of a chunk that exists, and none of another.
func.func private @copied_elements(%exists: i1, %k: index, %column: index, %shift: index) -> index {
  %c0 = arith.constant 0 : index
  %v = arith.constant #vector
  %size = arith.select %exists, %v, %c0 : index
  return %size : index
}

// A chunk, as it was copied: nothing came along.
func.func private @masked(%dy: !dy_chunk, %x: !x_chunk, %k: index, %column: index, %shift: index) -> (!dy_chunk, !x_chunk) {
  return %dy, %x : !dy_chunk, !x_chunk
}

// The weight, or the bias, at a chunk that the row has, and zeros at another.
func.func private @columns_at(%all: !row, %k: index, %part: index, %col: index, %inside: i1, %shift: index) -> !narrow {
  %c0 = arith.constant 0 : index
  %zeros = arith.constant dense<0.0> : !narrow
  %col_in = arith.select %inside, %col, %c0 : index
  %at_in = arith.addi %part, %col_in : index
  %read = vector.load %all[%at_in] : !row, !narrow
  %own = arith.select %inside, %read, %zeros : !narrow
  return %own : !narrow
}

// Whether all elements of chunk k are of the row.
func.func private @is_whole(%k: index, %column: index, %shift: index) -> i1 {
  %yes = arith.constant true
  return %yes : i1
}

// What is at a row's edges to memory: whole chunks are stored elsewhere.
func.func private @store_edge(%lines: !lines, %row: index, %k: index, %part: index, %col: index, %shift: index, %exists: i1, %chunk: !narrow) {
  return
}

// A chunk of a row from memory.
func.func private @load_cells(%rows: !lines, %row: index, %k: index, %part: index, %col: index, %exists: i1, %shift: index) -> !narrow {
  %c0 = arith.constant 0 : index
  %col_in = arith.select %exists, %col, %c0 : index
  %at_in = arith.addi %part, %col_in : index
  // with strides: %rows_strided = func.call @row_of_it(%rows, %row) : (!lines, index) -> !lines
  %read = vector.load %rows[%row, %at_in] : !lines, !narrow
  return %read : !narrow
}

// A chunk's sums, to where their columns are.
func.func private @store_sums(%sums: !acc_rows, %workgroup: index, %k: index, %column: index, %shift: index, %chunk: !chunk) {
  vector.store %chunk, %sums[%workgroup, %column] : !acc_rows, !chunk
  return
}
