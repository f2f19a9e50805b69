// Rows that begin anywhere in an access, because N is no multiple of V: accesses go across their borders.

// What a NormSpec and a Schedule decide.
!dy = bf16
!x = bf16
!gamma = bf16
!acc = f32
#columns = 4096 : index
#vector = 8 : index
#loads_late = false
#least_last = 0 : index
#dy_bits = 16 : index
#x_bits = 16 : index
!x_lines = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!acc_rows = memref<?x4096x!acc, #hal.descriptor_type<storage_buffer>>
!dy_chunk = vector<8x!dy>
!x_chunk = vector<8x!x>
!chunk = vector<8x!acc>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
!row = memref<4096x!gamma, #hal.descriptor_type<storage_buffer>>
!lines = memref<?x4096xbf16, #hal.descriptor_type<storage_buffer>>
!element = bf16
!narrow = vector<8x!gamma>

func.func private @in_bulk() -> i1
func.func private @beyond_i32() -> i32
func.func private @vector_i32() -> i32
func.func private @zero_first_of_dy(!dy_chunk, index) -> !dy_chunk
func.func private @zero_first_of_x(!x_chunk, index) -> !x_chunk
func.func private @gathered_of_it(!row, index, index, index, index, i1, index) -> !narrow
func.func private @is_within(index, index, index) -> i1
// End of what is replaced.

// Where a column of a row is in memory, counted from the first of the workgroup's part.
func.func private @cell_address(%row: index, %part: index, %column: index) -> (index, index) {
  %n = arith.constant #columns
  %v = arith.constant #vector
  %c0 = arith.constant 0 : index
  %in_bulk = func.call @in_bulk() : () -> i1
  %before = arith.muli %row, %n : index
  %row_line = arith.divui %before, %v : index
  %part_lines = arith.divui %part, %v : index
  %part_line = arith.addi %row_line, %part_lines : index
  %lines_on = arith.divui %column, %v : index
  %chunk = arith.addi %part_line, %lines_on : index
  // LLVM takes the constant part of a column into an access, but not that of a line.
  %line_here = arith.select %in_bulk, %part_line, %chunk : index
  %at_here = arith.select %in_bulk, %column, %c0 : index
  return %line_here, %at_here : index, index
}

// Whether chunk k of a thread may have elements of other rows in it.
func.func private @may_be_edge(%k: index) -> i1 {
  %c0 = arith.constant 0 : index
  %least_last = arith.constant #least_last
  %may_be_first = arith.cmpi eq, %k, %c0 : index
  %may_be_last = arith.cmpi uge, %k, %least_last : index
  %may_be = arith.ori %may_be_first, %may_be_last : i1
  return %may_be : i1
}

// How many elements of other rows are before a row, in the access where it begins. The product may wrap
// around: V is a power of 2, so the rest is right.
func.func private @row_shift(%row: i32) -> index {
  %beyond = func.call @beyond_i32() : () -> i32
  %v = func.call @vector_i32() : () -> i32
  %all_beyond = arith.muli %row, %beyond : i32
  %before_i32 = arith.remui %all_beyond, %v : i32
  %shift = arith.index_castui %before_i32 : i32 to index
  return %shift : index
}

// The elements of chunk k that are of the row: from the first number on, below the second. The row has
// that chunk.
func.func private @span(%k: index, %column: index, %shift: index) -> (index, index) {
  %c0 = arith.constant 0 : index
  %n = arith.constant #columns
  %v = arith.constant #vector
  %least_last = arith.constant #least_last
  %edge = func.call @may_be_edge(%k) : (index) -> i1
  %first, %end = scf.if %edge -> (index, index) {
    %is_first = arith.cmpi eq, %k, %c0 : index
    %begins = arith.cmpi ult, %column, %shift : index
    %has_before = arith.andi %is_first, %begins : i1
    %before = arith.subi %shift, %column : index
    %from = arith.select %has_before, %before, %c0 : index
    %may_be_last = arith.cmpi uge, %k, %least_last : index
    %all = arith.addi %n, %shift : index
    %left = arith.subi %all, %column : index
    %less = arith.minui %left, %v : index
    %below = arith.select %may_be_last, %less, %v : index
    scf.yield %from, %below : index, index
  } else {
    scf.yield %c0, %v : index, index
  }
  return %first, %end : index, index
}

// How many elements are copied of a chunk that exists, and none of another. What is before the row comes along.
func.func private @copied_elements(%exists: i1, %k: index, %column: index, %shift: index) -> index {
  %c0 = arith.constant 0 : index
  %from, %below = func.call @span(%k, %column, %shift) : (index, index, index) -> (index, index)
  %size = arith.select %exists, %below, %c0 : index
  return %size : index
}

// A chunk that was copied, with zeros for what came along.
func.func private @masked(%dy: !dy_chunk, %x: !x_chunk, %k: index, %column: index, %shift: index) -> (!dy_chunk, !x_chunk) {
  %from, %below = func.call @span(%k, %column, %shift) : (index, index, index) -> (index, index)
  %dy_bits = arith.constant #dy_bits
  %x_bits = arith.constant #x_bits
  %dy_before = arith.muli %from, %dy_bits : index
  %x_before = arith.muli %from, %x_bits : index
  %dy_rest = func.call @zero_first_of_dy(%dy, %dy_before) : (!dy_chunk, index) -> !dy_chunk
  %x_rest = func.call @zero_first_of_x(%x, %x_before) : (!x_chunk, index) -> !x_chunk
  return %dy_rest, %x_rest : !dy_chunk, !x_chunk
}

// The weight, or the bias, at a chunk that the row has, and zeros at another.
func.func private @columns_at(%all: !row, %k: index, %part: index, %col: index, %inside: i1, %shift: index) -> !narrow {
  %v = arith.constant #vector
  %at = arith.addi %part, %col : index
  %from, %below = func.call @span(%k, %at, %shift) : (index, index, index) -> (index, index)
  %gathered = func.call @gathered_of_it(%all, %at, %shift, %from, %below, %inside, %v)
      : (!row, index, index, index, index, i1, index) -> !narrow
  return %gathered : !narrow
}

// Whether all elements of chunk k are of the row.
func.func private @is_whole(%k: index, %column: index, %shift: index) -> i1 {
  %v = arith.constant #vector
  %from, %below = func.call @span(%k, %column, %shift) : (index, index, index) -> (index, index)
  %count = arith.subi %below, %from : index
  %whole = arith.cmpi eq, %count, %v : index
  return %whole : i1
}

// The elements of chunk k that are of the row to memory, one by one, if not all are.
func.func private @store_edge(%lines: !lines, %row: index, %k: index, %part: index, %col: index, %shift: index, %exists: i1, %chunk: !narrow) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %v = arith.constant #vector
  %yes = arith.constant true
  %column = arith.addi %part, %col : index
  %whole = func.call @is_whole(%k, %column, %shift) : (index, index, index) -> i1
  %broken = arith.xori %whole, %yes : i1
  %stores = arith.andi %broken, %exists : i1
  scf.if %stores {
    %line, %at = func.call @cell_address(%row, %part, %col) : (index, index, index) -> (index, index)
    %from, %below = func.call @span(%k, %column, %shift) : (index, index, index) -> (index, index)
    scf.for %e = %c0 to %v step %c1 {
      %in_row = func.call @is_within(%e, %from, %below) : (index, index, index) -> i1
      scf.if %in_row {
        %one = vector.extract %chunk[%e] : !element from !narrow
        %e_at = arith.addi %at, %e : index
        memref.store %one, %lines[%line, %e_at] : !lines
      }
    } {llvm.loop_annotation = #unrolled}
  }
  return
}

// A chunk of a row from memory. What is not of the row is zeros.
func.func private @load_cells(%rows: !lines, %row: index, %k: index, %part: index, %col: index, %exists: i1, %shift: index) -> !narrow {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %v = arith.constant #vector
  %in_bulk = func.call @in_bulk() : () -> i1
  %loads_late = arith.constant #loads_late
  %is_known = arith.ori %in_bulk, %loads_late : i1
  %zeros = arith.constant dense<0.0> : !narrow
  %column = arith.addi %part, %col : index
  %line, %at = func.call @cell_address(%row, %part, %col) : (index, index, index) -> (index, index)
  %from, %below = func.call @span(%k, %column, %shift) : (index, index, index) -> (index, index)
  %is_whole = func.call @is_whole(%k, %column, %shift) : (index, index, index) -> i1
  %whole = arith.andi %is_whole, %exists : i1
  %read = scf.if %whole -> !narrow {
    %all = vector.load %rows[%line, %at] : !lines, !narrow
    scf.yield %all : !narrow
  } else {
    %gathered = scf.for %e = %c0 to %v step %c1 iter_args(%before = %zeros) -> !narrow {
      %in_row = func.call @is_within(%e, %from, %below) : (index, index, index) -> i1
      %is_own = arith.andi %in_row, %exists : i1
      %after = scf.if %is_own -> !narrow {
        %e_at = arith.addi %at, %e : index
        %one = memref.load %rows[%line, %e_at] : !lines
        // Where the last chunk's position is known, LLVM would make one access of several, beyond the tensor's end.
        scf.if %is_known {
          llvm.inline_asm has_side_effects "", "~{memory}" : () -> ()
        }
        %more = vector.insert %one, %before[%e] : !element into !narrow
        scf.yield %more : !narrow
      } else {
        scf.yield %before : !narrow
      }
      scf.yield %after : !narrow
    } {llvm.loop_annotation = #unrolled}
    scf.yield %gathered : !narrow
  }
  return %read : !narrow
}

// A chunk's sums, to where their columns are.
func.func private @store_sums(%sums: !acc_rows, %workgroup: index, %k: index, %column: index, %shift: index, %chunk: !chunk) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %v = arith.constant #vector
  %from, %below = func.call @span(%k, %column, %shift) : (index, index, index) -> (index, index)
  scf.for %e = %c0 to %v step %c1 {
    %in_row = func.call @is_within(%e, %from, %below) : (index, index, index) -> i1
    scf.if %in_row {
      %shifted_at = arith.addi %column, %e : index
      %own_column = arith.subi %shifted_at, %shift : index
      %one = vector.extract %chunk[%e] : !acc from !chunk
      memref.store %one, %sums[%workgroup, %own_column] : !acc_rows
    }
  } {llvm.loop_annotation = #unrolled}
  return
}
