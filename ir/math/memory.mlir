// Loads of rows that leave the L2 cache late.
//
// A norm writes as many rows as it reads, and what it writes pushes out of the cache what was read. Where rows
// leave late, forwards on an H200 took up to 4 % less time. So NVIDIA GPUs load rows with such a policy, from
// sm_90 on. Source: PTX ISA, "createpolicy", "ld".

// What a kernel's declaration decides.
!rows = memref<?x4096xbf16, #hal.descriptor_type<storage_buffer>>
!row = memref<4096xbf16, #hal.descriptor_type<storage_buffer>>
!element = bf16
!pointer = !llvm.ptr<1>
!narrow = vector<8xbf16>
!one_word = vector<2xbf16>     // narrow elements of so many words
!two_words = vector<4xbf16>
!four_words = vector<8xbf16>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
// End of what is replaced.

// Of an element in rows. LLVM takes the constant part of such an address into the load: a thread's chunks
// have one address in registers.
func.func private @address(%rows: !rows, %row: index, %column: index) -> !pointer {
  %c1 = arith.constant 1 : index  // without strides
  %n = memref.dim %rows, %c1 : !rows  // without strides
  %before = arith.muli %row, %n : index  // without strides
  // with strides: %memory, %before, %sizes:2, %strides:2 = memref.extract_strided_metadata %rows
  // with strides:     : !rows -> memref<!element, #hal.descriptor_type<storage_buffer>>, index, index, index, index, index
  %at = arith.addi %before, %column : index
  %at_i64 = arith.index_castui %at : index to i64
  %base = memref.extract_aligned_pointer_as_index %rows : !rows -> index
  %base_i64 = arith.index_castui %base : index to i64
  %first = llvm.inttoptr %base_i64 : i64 to !pointer
  %address = llvm.getelementptr %first[%at_i64] : (!pointer, i64) -> !pointer, !element
  return %address : !pointer
}

// For other GPUs, and for less than a word.
func.func private @load_lasting(%rows: !rows, %row: index, %column: index, %address: !pointer) -> !narrow {
  %value = vector.load %rows[%row, %column] : !rows, !narrow
  return %value : !narrow
}

func.func private @load_lasting_word(%rows: !rows, %row: index, %column: index, %address: !pointer) -> !one_word {
  %late = llvm.inline_asm "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", "=l" : () -> i64
  %loaded = llvm.inline_asm has_side_effects operand_attrs = [{elementtype = i32}, {}] "ld.global.L1::evict_last.L2::cache_hint.b32 $0, $1, $2;", "=r,*m,l,~{memory}" %address, %late
      : (!pointer, i64) -> i32
  %words = vector.from_elements %loaded : vector<1xi32>
  %value = vector.bitcast %words : vector<1xi32> to !one_word
  return %value : !one_word
}

func.func private @load_lasting_two_words(%rows: !rows, %row: index, %column: index, %address: !pointer) -> !two_words {
  %late = llvm.inline_asm "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", "=l" : () -> i64
  %loaded = llvm.inline_asm has_side_effects operand_attrs = [{elementtype = i32}, {}] "ld.global.L1::evict_last.L2::cache_hint.v2.b32 {$0, $1}, $2, $3;", "=r,=r,*m,l,~{memory}" %address, %late
      : (!pointer, i64) -> !llvm.struct<(i32, i32)>
  %w0 = llvm.extractvalue %loaded[0] : !llvm.struct<(i32, i32)>
  %w1 = llvm.extractvalue %loaded[1] : !llvm.struct<(i32, i32)>
  %words = vector.from_elements %w0, %w1 : vector<2xi32>
  %value = vector.bitcast %words : vector<2xi32> to !two_words
  return %value : !two_words
}

func.func private @load_lasting_four_words(%rows: !rows, %row: index, %column: index, %address: !pointer) -> !four_words {
  %late = llvm.inline_asm "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", "=l" : () -> i64
  %loaded = llvm.inline_asm has_side_effects operand_attrs = [{elementtype = i32}, {}] "ld.global.L1::evict_last.L2::cache_hint.v4.b32 {$0, $1, $2, $3}, $4, $5;", "=r,=r,=r,=r,*m,l,~{memory}" %address, %late
      : (!pointer, i64) -> !llvm.struct<(i32, i32, i32, i32)>
  %w0 = llvm.extractvalue %loaded[0] : !llvm.struct<(i32, i32, i32, i32)>
  %w1 = llvm.extractvalue %loaded[1] : !llvm.struct<(i32, i32, i32, i32)>
  %w2 = llvm.extractvalue %loaded[2] : !llvm.struct<(i32, i32, i32, i32)>
  %w3 = llvm.extractvalue %loaded[3] : !llvm.struct<(i32, i32, i32, i32)>
  %words = vector.from_elements %w0, %w1, %w2, %w3 : vector<4xi32>
  %value = vector.bitcast %words : vector<4xi32> to !four_words
  return %value : !four_words
}

// A chunk of a row that begins %shift elements after what chunks are counted from: its elements from a number on
// and below another, if it exists. The others are zeros, and are not read.
func.func private @gathered(%row: !row, %first: index, %shift: index, %from: index, %below: index, %exists: i1, %count: index) -> !narrow {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %zeros = arith.constant dense<0.0> : !narrow
  %values = scf.for %e = %c0 to %count step %c1 iter_args(%before = %zeros) -> !narrow {
    %begun = arith.cmpi uge, %e, %from : index
    %goes_on = arith.cmpi ult, %e, %below : index
    %within = arith.andi %begun, %goes_on : i1
    %is_own = arith.andi %within, %exists : i1
    %after = scf.if %is_own -> !narrow {
      %at = arith.addi %first, %e : index
      %column = arith.subi %at, %shift : index
      %one = memref.load %row[%column] : !row
      %more = vector.insert %one, %before[%e] : !element into !narrow
      scf.yield %more : !narrow
    } else {
      scf.yield %before : !narrow
    }
    scf.yield %after : !narrow
  } {llvm.loop_annotation = #unrolled}
  return %values : !narrow
}

// Elements of a row that no kernel writes, from a column on, once more. Compilers know that they do not change, and would
// read them once, before the first row, and spill them. The empty instruction hides whose address this is.
func.func private @load_again(%row: !row, %column: index) -> !narrow {
  %zero = arith.constant 0 : i32
  %column_i64 = arith.index_castui %column : index to i64  // without sets
  // with sets: %memory, %begin, %count, %step = memref.extract_strided_metadata %row
  // with sets:     : !row -> memref<!element, #hal.descriptor_type<storage_buffer>>, index, index, index
  // with sets: %column_on = arith.addi %begin, %column : index  // of a set, which begins anywhere
  // with sets: %column_i64 = arith.index_castui %column_on : index to i64
  %base = memref.extract_aligned_pointer_as_index %row : !row -> index
  %base_i64 = arith.index_castui %base : index to i64
  %hidden = llvm.inline_asm has_side_effects "", "=r,0" %zero : (i32) -> i32
  %nothing = arith.extui %hidden : i32 to i64
  %somewhere = arith.addi %base_i64, %nothing : i64
  %first = llvm.inttoptr %somewhere : i64 to !pointer
  %address = llvm.getelementptr %first[%column_i64] : (!pointer, i64) -> !pointer, !element
  %read = llvm.load %address : !pointer -> !narrow
  return %read : !narrow
}

// Until all copies of a thread are done but those of so many groups, the last ones. The number is a constant,
// once loops are unrolled.
func.func private @await_copies(%pending: i32) {
  llvm.inline_asm has_side_effects "cp.async.wait_group $0;", "n,~{memory}" %pending : (i32) -> ()
  return
}
