// Rows that lie where a call says (two strides): row r begins at
// (r / inner_count) * outer + (r % inner_count) * inner, with the whole part of the quotient.
//
// All rows of an operand are a memref with two numbers that nothing else needs: its stride is outer, and its first
// *size* is inner. A row is a memref whose every row it is: its stride is zero. So kernels take either with the number of
// a row, and a row of it is the same.

// What a kernel's declaration decides.
!rows = memref<?x4096xbf16, strided<[?, 1], offset: ?>, #hal.descriptor_type<storage_buffer>>
!element = bf16
#its_layout = #hal.pipeline.layout<constants = 3, bindings = [#hal.pipeline.binding<storage_buffer>]>  // the kernel's
// End of what is replaced.

// One row of all.
func.func private @row(%rows: !rows, %row: index) -> !rows {
  %c0 = arith.constant 0 : index
  %run, %place = func.call @run_and_place(%row) : (index) -> (index, index)
  %memory, %begin, %inner, %columns, %outer, %one = memref.extract_strided_metadata %rows
      : !rows -> memref<!element, #hal.descriptor_type<storage_buffer>>, index, index, index, index, index
  %runs_before = arith.muli %run, %outer : index
  %before = arith.muli %place, %inner : index
  %at = arith.addi %runs_before, %before : index
  %row_of_any = memref.reinterpret_cast %memory to offset: [%at], sizes: [%inner, %columns], strides: [%c0, 1]
      : memref<!element, #hal.descriptor_type<storage_buffer>>
      to memref<?x?x!element, strided<[?, 1], offset: ?>, #hal.descriptor_type<storage_buffer>>
  %own = memref.cast %row_of_any
      : memref<?x?x!element, strided<[?, 1], offset: ?>, #hal.descriptor_type<storage_buffer>> to !rows
  return %own : !rows
}

// The run that a row is in, and its place there. Numbers of rows have 32 bits, and a division of those takes a GPU some 20
// instructions. So the row is multiplied by the inverse of the divisor, 2^64 / inner_count, rounded up: the quotient is what
// is above 64 bits of the product.
func.func private @run_and_place(%row: index) -> (index, index) {
  %count_i32 = hal.interface.constant.load layout(#its_layout) ordinal(0) : i32
  %high_i32 = hal.interface.constant.load layout(#its_layout) ordinal(1) : i32
  %low_i32 = hal.interface.constant.load layout(#its_layout) ordinal(2) : i32
  %half = arith.constant 32 : i64
  %row_i32 = arith.index_castui %row : index to i32
  %row_i64 = arith.extui %row_i32 : i32 to i64
  %high = arith.extui %high_i32 : i32 to i64
  %low = arith.extui %low_i32 : i32 to i64
  %below = arith.muli %row_i64, %low : i64
  %carried = arith.shrui %below, %half : i64
  %above = arith.muli %row_i64, %high : i64
  %both = arith.addi %above, %carried : i64
  %quotient = arith.shrui %both, %half : i64
  %run_i32 = arith.trunci %quotient : i64 to i32
  %rows_before = arith.muli %run_i32, %count_i32 : i32
  %place_i32 = arith.subi %row_i32, %rows_before : i32
  %run = arith.index_castui %run_i32 : i32 to index
  %place = arith.index_castui %place_i32 : i32 to index
  return %run, %place : index, index
}
