// How a thread's chunks of a row come from memory and go there, where rows begin anywhere in an access.
//
// Chunks are counted from the row's first column, so that its sums have one order wherever it begins. A chunk c comes in
// two neighbouring accesses, and is cut out of them for the sums: the second is what the next thread has as its first.
// What is computed of a single column, the output, is computed for the first access as it is in memory. Its elements
// are %shift columns before those of the chunk. So it is stored in one access, too, but at both ends of a row, where it
// has elements of another row. The weights for it are read in accesses of two words, and cut.

// What a NormSpec and a Schedule decide.
#columns = 4096 : index
#forward_columns = 4096 : index
#forward_vector = 8 : index
#forward_chunks = 2 : index
#forward_unit = 1 : index        // elements that divide both N and V
#forward_last_chunk = 1 : index  // which chunk of its thread has the row's last column
#forward_first_edge = 1 : index  // the chunks of a thread, from one to another, that may be beside it
#forward_last_edge = 1 : index
#forward_lasts = true
!pointer = !llvm.ptr<1>
!rows = memref<?x8xbf16, #hal.descriptor_type<storage_buffer>>
!row = memref<4096xbf16, #hal.descriptor_type<storage_buffer>>
!element = bf16
!acc = f32
!narrow = vector<8xbf16>
!words = vector<4xi32>
!pair = vector<4xbf16>
!wide = vector<8xf32>
!held = memref<4xvector<8xbf16>, #gpu.address_space<private>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>

func.func private @access_number_of_it(!rows, index, index, index, index) -> index
func.func private @address_of_it(!rows, index, index) -> !pointer
func.func private @load_lasting_of_it(!rows, index, index, !pointer) -> !narrow
func.func private @stored_of_it(!narrow, index, !held) -> !narrow
func.func private @pair_word_of_it(!narrow, !words, !row, index, index, index, i1, i1, i1) -> i32
func.func private @cut_of_it(!narrow, !narrow, index) -> !narrow
func.func private @word_count_of_it(!words) -> index
func.func private @moved_of_it(!words, !words, index, index) -> (!words, !words)
func.func private @words_before_of_it(!words, index) -> (index, i32)
func.func private @words_from_of_it(!words, !words, index, i32) -> !words
func.func private @word_at_of_it(!words, !words, index) -> i32
// End of what is replaced.

// How many accesses a tensor in memory has, of M rows. What is behind the last whole one is read element by element.
func.func private @memory_rows(%m: index) -> index {
  %n = arith.constant #columns
  %v = arith.constant #forward_vector
  %elements = arith.muli %m, %n : index
  %accesses = arith.divui %elements, %v : index
  return %accesses : index
}

// How many chunks n columns of a row are in, from a workgroup's first on, and how many columns the last one lacks.
func.func private @chunk_count(%n: index) -> index {
  %v = arith.constant #forward_vector
  %chunks = arith.ceildivui %n, %v : index
  return %chunks : index
}

func.func private @lacking_columns(%n: index) -> index {
  %v = arith.constant #forward_vector
  %chunks = func.call @chunk_count(%n) : (index) -> index
  %columns = arith.muli %chunks, %v : index
  %lacking = arith.subi %columns, %n : index
  return %lacking : index
}

// How many elements of other rows are before a row, in the access where it begins. The product may wrap around: V is
// a power of 2, so the rest is right.
func.func private @row_shift(%row: index) -> index {
  %n = arith.constant #columns
  %v = arith.constant #forward_vector
  %unit = arith.constant #forward_unit
  %units = arith.divui %n, %unit : index
  %units_of_access = arith.divui %v, %unit : index
  %row_i32 = arith.index_castui %row : index to i32
  %units_i32 = arith.index_castui %units : index to i32
  %units_of_access_i32 = arith.index_castui %units_of_access : index to i32
  %before = arith.muli %row_i32, %units_i32 : i32
  %shift_i32 = arith.remui %before, %units_of_access_i32 : i32
  %shift_in_units = arith.index_castui %shift_i32 : i32 to index
  %shift = arith.muli %shift_in_units, %unit : index
  return %shift : index
}

// Which access of the tensor is the first of a chunk.
func.func private @first_access(%row: index, %at: index) -> index {
  %n = arith.constant #columns
  %v = arith.constant #forward_vector
  %elements_before = arith.muli %row, %n : index
  %before = arith.divui %elements_before, %v : index
  %chunk = arith.divui %at, %v : index
  %access = arith.addi %before, %chunk : index
  return %access : index
}

// Whether chunk k of a thread may be beside the row's last column.
func.func private @may_be_edge(%k: index) -> i1 {
  %first = arith.constant #forward_first_edge
  %last = arith.constant #forward_last_edge
  %begun = arith.cmpi uge, %k, %first : index
  %goes_on = arith.cmpi ule, %k, %last : index
  %may_be = arith.andi %begun, %goes_on : i1
  return %may_be : i1
}

// Whether a chunk's first access has elements of the row.
func.func private @has_access(%row: index, %col: index, %at: index, %inside: i1) -> i1 {
  %n = arith.constant #columns
  %own_columns = arith.constant #forward_columns
  %shift = func.call @row_shift(%row) : (index) -> index
  %end = arith.addi %n, %shift : index
  %begins = arith.cmpi ult, %at, %end : index
  %is_own = arith.cmpi ult, %col, %own_columns : index
  %has = arith.andi %begins, %is_own : i1
  return %has : i1
}

// The number of one of a chunk's two accesses among all of a tensor's, or of the last one before it that is whole. They
// come in the order in which @joined and @stored want them.
func.func private @access_number(%rows: !rows, %row: index, %k: index, %at: index, %which: index) -> index {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %first = func.call @first_access(%row, %at) : (index, index) -> index
  %on = arith.subi %c1, %which : index
  %mine = arith.addi %first, %on : index
  %all = memref.dim %rows, %c0 : !rows
  %last = arith.subi %all, %c1 : index
  %least = arith.minui %mine, %last : index
  %may_be = func.call @may_be_edge(%k) : (index) -> i1
  %number = arith.select %may_be, %least, %mine : index
  return %number : index
}

// One of a chunk's two accesses.
func.func private @access(%rows: !rows, %row: index, %k: index, %at: index, %which: index) -> !narrow {
  %c0 = arith.constant 0 : index
  %lasts = arith.constant #forward_lasts
  %number = func.call @access_number_of_it(%rows, %row, %k, %at, %which) : (!rows, index, index, index, index) -> index
  %read = scf.if %lasts -> !narrow {
    %address = func.call @address_of_it(%rows, %number, %c0) : (!rows, index, index) -> !pointer
    %lasting = func.call @load_lasting_of_it(%rows, %number, %c0, %address) : (!rows, index, index, !pointer) -> !narrow
    scf.yield %lasting : !narrow
  } else {
    %usual = vector.load %rows[%number, %c0] : !rows, !narrow
    scf.yield %usual : !narrow
  }
  return %read : !narrow
}

// The elements behind the tensor's last whole access, one by one.
func.func private @read_edge(%rows: !rows, %zeros: !narrow, %row: index, %k: index, %at: index, %held: !held) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  %n = arith.constant #columns
  %v = arith.constant #forward_vector
  %chunks = arith.constant #forward_chunks
  %all = memref.dim %rows, %c0 : !rows
  %shift = func.call @row_shift(%row) : (index) -> index
  %first = func.call @first_access(%row, %at) : (index, index) -> index
  %may_be = func.call @may_be_edge(%k) : (index) -> i1
  %beyond = arith.addi %first, %c1 : index
  %reaches = arith.cmpi uge, %beyond, %all : index
  %reads = arith.andi %may_be, %reaches : i1
  scf.if %reads {
    %end = arith.addi %n, %shift : index
    scf.for %which = %c0 to %c2 step %c1 {
      %on = arith.subi %c1, %which : index
      %number = arith.addi %first, %on : index
      %is_behind = arith.cmpi uge, %number, %all : index
      scf.if %is_behind {
        %columns_on = arith.muli %on, %v : index
        %shifted = arith.addi %at, %columns_on : index
        %chunk = scf.for %e = %c0 to %v step %c1 iter_args(%before = %zeros) -> !narrow {
          %column = arith.addi %shifted, %e : index
          %in_row = arith.cmpi ult, %column, %end : index
          %after = scf.if %in_row -> !narrow {
            %one = memref.load %rows[%number, %e] : !rows
            // Else LLVM makes one access of several, beyond the tensor's end.
            llvm.inline_asm has_side_effects "", "~{memory}" : () -> ()
            %more = vector.insert %one, %before[%e] : !element into !narrow
            scf.yield %more : !narrow
          } else {
            scf.yield %before : !narrow
          }
          scf.yield %after : !narrow
        } {llvm.loop_annotation = #unrolled}
        %accesses_before = arith.muli %which, %chunks : index
        %place = arith.addi %accesses_before, %k : index
        memref.store %chunk, %held[%place] : !held
      }
    } {llvm.loop_annotation = #unrolled}
  }
  return
}

// A chunk, of its two accesses.
func.func private @joined(%zeros: !narrow, %row: index, %k: index, %held: !held) -> !narrow {
  %first = func.call @stored_of_it(%zeros, %k, %held) : (!narrow, index, !held) -> !narrow
  %second = memref.load %held[%k] : !held
  %shift = func.call @row_shift(%row) : (index) -> index
  %chunk = func.call @cut_of_it(%first, %second, %shift) : (!narrow, !narrow, index) -> !narrow
  return %chunk : !narrow
}

// All chunks of a thread, each in place of its second access. A row's threads take one branch: within it, words are where
// the program's text says.
func.func private @join_all(%zeros: !narrow, %row: index, %held: !held) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %chunks = arith.constant #forward_chunks
  %zero_words = vector.bitcast %zeros : !narrow to !words
  %count = func.call @word_count_of_it(%zero_words) : (!words) -> index
  %shift = func.call @row_shift(%row) : (index) -> index
  %words, %rest = func.call @words_before_of_it(%zero_words, %shift) : (!words, index) -> (index, i32)
  scf.for %case = %c0 to %count step %c1 {
    %is_it = arith.cmpi eq, %words, %case : index
    scf.if %is_it {
      scf.for %k = %c0 to %chunks step %c1 {
        %first = func.call @stored_of_it(%zeros, %k, %held) : (!narrow, index, !held) -> !narrow
        %second = memref.load %held[%k] : !held
        %a = vector.bitcast %first : !narrow to !words
        %b = vector.bitcast %second : !narrow to !words
        %cut = func.call @words_from_of_it(%a, %b, %case, %rest) : (!words, !words, index, i32) -> !words
        %chunk = vector.bitcast %cut : !words to !narrow
        memref.store %chunk, %held[%k] : !held
      } {llvm.loop_annotation = #unrolled}
    }
  } {llvm.loop_annotation = #unrolled}
  return
}

// The access that a thread stores for a chunk: the first one.
func.func private @stored(%zeros: !narrow, %k: index, %held: !held) -> !narrow {
  %chunks = arith.constant #forward_chunks
  %place = arith.addi %chunks, %k : index
  %chunk = memref.load %held[%place] : !held
  return %chunk : !narrow
}

// Sums with a chunk, or without it: elements that are not of the row count for nothing.
func.func private @counted(%with: !wide, %without: !wide, %k: index, %at: index, %inside: i1) -> !wide {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %n = arith.constant #columns
  %v = arith.constant #forward_vector
  %last = arith.constant #forward_last_chunk
  %may_be_last = arith.cmpi eq, %k, %last : index
  %sums = scf.if %may_be_last -> !wide {
    %each = scf.for %e = %c0 to %v step %c1 iter_args(%before = %without) -> !wide {
      %column = arith.addi %at, %e : index
      %in_row = arith.cmpi ult, %column, %n : index
      %counts = arith.andi %in_row, %inside : i1
      %one = vector.extract %with[%e] : !acc from !wide
      %old = vector.extract %without[%e] : !acc from !wide
      %sum = arith.select %counts, %one, %old : !acc
      %after = vector.insert %sum, %before[%e] : !acc into !wide
      scf.yield %after : !wide
    } {llvm.loop_annotation = #unrolled}
    scf.yield %each : !wide
  } else {
    %all = arith.select %inside, %with, %without : !wide
    scf.yield %all : !wide
  }
  return %sums : !wide
}

// The weights, or biases, of a chunk's first access. Those of another row's elements may be any.
func.func private @columns_at(%zeros: !narrow, %weights: !row, %row: index, %k: index, %at: index) -> !narrow {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  %n = arith.constant #columns
  %v = arith.constant #forward_vector
  %zero_words = vector.bitcast %zeros : !narrow to !words
  %words = func.call @word_count_of_it(%zero_words) : (!words) -> index
  %pairs = arith.divui %words, %c2 : index
  %of_pair = arith.divui %v, %pairs : index       // elements of two words
  %all = arith.divui %n, %of_pair : index         // pairs that the weights have, but for a part of one
  %rest = arith.remui %n, %of_pair : index        // the elements of that part
  %has_part = arith.cmpi ne, %rest, %c0 : index
  %zero_i32 = arith.constant 0 : i32
  %shift = func.call @row_shift(%row) : (index) -> index
  // A chunk more, so that nothing is below zero.
  %on = arith.subi %v, %shift : index
  %pairs_on = arith.divui %on, %of_pair : index
  %within = arith.remui %on, %of_pair : index
  %pairs_at = arith.divui %at, %of_pair : index
  %first_on = arith.addi %pairs_at, %pairs_on : index
  %may_be = func.call @may_be_edge(%k) : (index) -> i1
  %edge = arith.andi %may_be, %has_part : i1
  %part_words = scf.if %edge -> !words {
    %behind = arith.muli %all, %of_pair : index
    %part = scf.for %e = %c0 to %rest step %c1 iter_args(%before = %zeros) -> !narrow {
      // The empty instruction hides where this is: else LLVM makes one access of several, beyond the tensor's end.
      %hidden = llvm.inline_asm has_side_effects "", "=r,0" %zero_i32 : (i32) -> i32
      %nothing = arith.index_castui %hidden : i32 to index
      %column_any = arith.addi %behind, %e : index
      %column = arith.addi %column_any, %nothing : index
      %one = memref.load %weights[%column] : !row
      %more = vector.insert %one, %before[%e] : !element into !narrow
      scf.yield %more : !narrow
    } {llvm.loop_annotation = #unrolled}
    %its_words = vector.bitcast %part : !narrow to !words
    scf.yield %its_words : !words
  } else {
    scf.yield %zero_words : !words
  }
  %may_be_first = arith.cmpi eq, %k, %c0 : index
  %a, %b = scf.for %i = %c0 to %words step %c1 iter_args(%a_before = %zero_words, %b_before = %zero_words) -> (!words, !words) {
    %half = arith.remui %i, %c2 : index
    %which = arith.divui %i, %c2 : index
    %a_word = func.call @pair_word_of_it(%zeros, %part_words, %weights, %first_on, %which, %half, %may_be_first, %may_be, %edge)
        : (!narrow, !words, !row, index, index, index, i1, i1, i1) -> i32
    %b_word = func.call @pair_word_of_it(%zeros, %part_words, %weights, %first_on, %pairs, %half, %may_be_first, %may_be, %edge)
        : (!narrow, !words, !row, index, index, index, i1, i1, i1) -> i32
    %a_after = vector.insert %a_word, %a_before[%i] : i32 into !words
    %b_after = vector.insert %b_word, %b_before[%i] : i32 into !words
    scf.yield %a_after, %b_after : !words, !words
  } {llvm.loop_annotation = #unrolled}
  %first = vector.bitcast %a : !words to !narrow
  %second = vector.bitcast %b : !words to !narrow
  %chunk = func.call @cut_of_it(%first, %second, %within) : (!narrow, !narrow, index) -> !narrow
  return %chunk : !narrow
}

// A word of two of the weights'. What is before the first, or behind the last, may be any.
func.func private @pair_word(%zeros: !narrow, %part_words: !words, %weights: !row, %first_on: index, %which: index, %half: index, %may_be_first: i1, %may_be_last: i1, %edge: i1) -> i32 {
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  %n = arith.constant #columns
  %v = arith.constant #forward_vector
  %words = func.call @word_count_of_it(%part_words) : (!words) -> index
  %pairs = arith.divui %words, %c2 : index
  %of_pair = arith.divui %v, %pairs : index
  %all = arith.divui %n, %of_pair : index
  %last = arith.subi %all, %c1 : index
  %number_on = arith.addi %first_on, %which : index
  %number_on_i32 = arith.index_castui %number_on : index to i32
  %pairs_i32 = arith.index_castui %pairs : index to i32
  %last_i32 = arith.index_castui %last : index to i32
  %zero_i32 = arith.constant 0 : i32
  %number_any = arith.subi %number_on_i32, %pairs_i32 : i32
  %number_first = arith.maxsi %number_any, %zero_i32 : i32
  %number_i32 = arith.select %may_be_first, %number_first, %number_any : i32
  %number_last = arith.minui %number_i32, %last_i32 : i32
  %number_in_i32 = arith.select %may_be_last, %number_last, %number_i32 : i32
  %number = arith.index_castui %number_i32 : i32 to index
  %number_in = arith.index_castui %number_in_i32 : i32 to index
  %column = arith.muli %number_in, %of_pair : index
  %pair = vector.load %weights[%column] : !row, !pair
  %pair_words = vector.bitcast %pair : !pair to vector<2xi32>
  %read = vector.extract %pair_words[%half] : i32 from vector<2xi32>
  %is_behind = arith.cmpi eq, %number, %all : index
  %is_part = arith.andi %is_behind, %edge : i1
  %of_part = vector.extract %part_words[%half] : i32 from !words
  %word = arith.select %is_part, %of_part, %read : i32
  return %word : i32
}

// Stores an access, but for the elements of other rows.
func.func private @put(%rows: !rows, %chunk: !narrow, %row: index, %k: index, %col: index, %at: index, %inside: i1, %exists: i1) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %n = arith.constant #columns
  %v = arith.constant #forward_vector
  %yes = arith.constant true
  %has = func.call @has_access(%row, %col, %at, %inside) : (index, index, index, i1) -> i1
  %stores = arith.andi %has, %exists : i1
  %access = func.call @first_access(%row, %at) : (index, index) -> index
  %shift = func.call @row_shift(%row) : (index) -> index
  %row_end = arith.addi %n, %shift : index
  %is_first_k = arith.cmpi eq, %k, %c0 : index
  %is_first = arith.cmpi eq, %at, %c0 : index
  %begins = arith.andi %is_first_k, %is_first : i1
  %from = arith.select %begins, %shift, %c0 : index
  %may_be_last = func.call @may_be_edge(%k) : (index) -> i1
  %left = arith.subi %row_end, %at : index
  %left_in = arith.minui %left, %v : index
  %below = arith.select %may_be_last, %left_in, %v : index
  %count = arith.subi %below, %from : index
  %is_whole = arith.cmpi eq, %count, %v : index
  %is_broken = arith.xori %is_whole, %yes : i1
  %stores_whole = arith.andi %stores, %is_whole : i1
  scf.if %stores_whole {
    vector.store %chunk, %rows[%access, %c0] : !rows, !narrow
  }
  %may_be_broken = arith.ori %is_first_k, %may_be_last : i1
  %is_edge = arith.andi %is_broken, %may_be_broken : i1
  %stores_edge = arith.andi %stores, %is_edge : i1
  scf.if %stores_edge {
    scf.for %e = %c0 to %v step %c1 {
      %has_begun = arith.cmpi uge, %e, %from : index
      %goes_on = arith.cmpi ult, %e, %below : index
      %is_own = arith.andi %has_begun, %goes_on : i1
      scf.if %is_own {
        %one = vector.extract %chunk[%e] : !element from !narrow
        memref.store %one, %rows[%access, %e] : !rows
      }
    } {llvm.loop_annotation = #unrolled}
  }
  return
}

// V neighbouring elements of two chunks, from a number of the first one's on, by their words.
func.func private @cut(%first: !narrow, %second: !narrow, %from: index) -> !narrow {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  %c4 = arith.constant 4 : index
  %first_words = vector.bitcast %first : !narrow to !words
  %second_words = vector.bitcast %second : !narrow to !words
  %words, %rest = func.call @words_before_of_it(%first_words, %from) : (!words, index) -> (index, i32)
  %a4, %b4 = func.call @moved_of_it(%first_words, %second_words, %words, %c4) : (!words, !words, index, index) -> (!words, !words)
  %a2, %b2 = func.call @moved_of_it(%a4, %b4, %words, %c2) : (!words, !words, index, index) -> (!words, !words)
  %a1, %b1 = func.call @moved_of_it(%a2, %b2, %words, %c1) : (!words, !words, index, index) -> (!words, !words)
  %cut_words = func.call @words_from_of_it(%a1, %b1, %c0, %rest) : (!words, !words, index, i32) -> !words
  %chunk = vector.bitcast %cut_words : !words to !narrow
  return %chunk : !narrow
}

func.func private @word_count(%words: !words) -> index {
  %ones = arith.constant dense<1> : !words
  %count_i32 = vector.reduction <add>, %ones : !words into i32
  %count = arith.index_castui %count_i32 : i32 to index
  return %count : index
}

// The words of two chunks, a power of 2 of them further on, if that power is in a number of words.
func.func private @moved(%first: !words, %second: !words, %words: index, %by: index) -> (!words, !words) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  %count = func.call @word_count_of_it(%first) : (!words) -> index
  %last = arith.subi %count, %c1 : index
  %times = arith.divui %words, %by : index
  %odd = arith.remui %times, %c2 : index
  %moves = arith.cmpi eq, %odd, %c1 : index
  %a, %b = scf.for %i = %c0 to %count step %c1 iter_args(%a_before = %first, %b_before = %second) -> (!words, !words) {
    %on = arith.addi %i, %by : index
    %in_one = arith.cmpi ult, %on, %count : index
    %here = arith.select %in_one, %on, %i : index
    %over = arith.subi %on, %count : index
    %over_in = arith.minui %over, %last : index
    %there = arith.select %in_one, %c0, %over_in : index
    %of_first = vector.extract %first[%here] : i32 from !words
    %of_second = vector.extract %second[%there] : i32 from !words
    %moved = arith.select %in_one, %of_first, %of_second : i32
    %stays = vector.extract %first[%i] : i32 from !words
    %word = arith.select %moves, %moved, %stays : i32
    %beyond_moved = vector.extract %second[%here] : i32 from !words
    %beyond_stays = vector.extract %second[%i] : i32 from !words
    %beyond = arith.select %moves, %beyond_moved, %beyond_stays : i32
    %a_after = vector.insert %word, %a_before[%i] : i32 into !words
    %b_after = vector.insert %beyond, %b_before[%i] : i32 into !words
    scf.yield %a_after, %b_after : !words, !words
  } {llvm.loop_annotation = #unrolled}
  return %a, %b : !words, !words
}

// Whole words before an element, and the bits of another.
func.func private @words_before(%chunk: !words, %element: index) -> (index, i32) {
  %v = arith.constant #forward_vector
  %v_i32 = arith.index_castui %v : index to i32
  %word_bits = arith.constant 32 : i32
  %count = func.call @word_count_of_it(%chunk) : (!words) -> index
  %count_i32 = arith.index_castui %count : index to i32
  %chunk_bits = arith.muli %count_i32, %word_bits : i32
  %element_bits = arith.divui %chunk_bits, %v_i32 : i32
  %element_i32 = arith.index_castui %element : index to i32
  %all_bits = arith.muli %element_i32, %element_bits : i32
  %words_i32 = arith.divui %all_bits, %word_bits : i32
  %rest = arith.remui %all_bits, %word_bits : i32
  %words = arith.index_castui %words_i32 : i32 to index
  return %words, %rest : index, i32
}

// As many words of two chunks as one has, from some bits of a word on.
func.func private @words_from(%first: !words, %second: !words, %word: index, %bits: i32) -> !words {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %count = func.call @word_count_of_it(%first) : (!words) -> index
  %all = scf.for %i = %c0 to %count step %c1 iter_args(%before = %first) -> !words {
    %at = arith.addi %word, %i : index
    %next = arith.addi %at, %c1 : index
    %lower = func.call @word_at_of_it(%first, %second, %at) : (!words, !words, index) -> i32
    %upper = func.call @word_at_of_it(%first, %second, %next) : (!words, !words, index) -> i32
    %cut = llvm.intr.fshr(%upper, %lower, %bits) : (i32, i32, i32) -> i32
    %after = vector.insert %cut, %before[%i] : i32 into !words
    scf.yield %after : !words
  } {llvm.loop_annotation = #unrolled}
  return %all : !words
}

// A word of two chunks.
func.func private @word_at(%first: !words, %second: !words, %at: index) -> i32 {
  %c0 = arith.constant 0 : index
  %count = func.call @word_count_of_it(%first) : (!words) -> index
  %in_first = arith.cmpi ult, %at, %count : index
  %over = arith.subi %at, %count : index
  %here = arith.select %in_first, %at, %c0 : index
  %there = arith.select %in_first, %c0, %over : index
  %of_first = vector.extract %first[%here] : i32 from !words
  %of_second = vector.extract %second[%there] : i32 from !words
  %word = arith.select %in_first, %of_first, %of_second : i32
  return %word : i32
}
