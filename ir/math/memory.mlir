// Loads of rows that leave the L2 cache late.
//
// A norm writes as many rows as it reads, and what it writes pushes out of the cache what was read. Where rows
// leave late, forwards on an H200 took up to 4 % less time. So NVIDIA GPUs load rows with such a policy, from
// sm_90 on. Source: PTX ISA, "createpolicy", "ld".

// What a kernel's declaration decides.
!rows = memref<?x4096xbf16, #hal.descriptor_type<storage_buffer>>
!row = memref<4096xbf16, #hal.descriptor_type<storage_buffer>>
!staged = memref<3x1x4096xbf16, #gpu.address_space<workgroup>>
!element = bf16
!pointer = !llvm.ptr<1>
!narrow = vector<8xbf16>
!one_word = vector<2xbf16>     // narrow elements of so many words
!two_words = vector<4xbf16>
!four_words = vector<8xbf16>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>

func.func private @address_of_it(!rows, index, index) -> !pointer
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

// The first elements of a row's chunk to shared memory (cp.async), and zeros in place of its others. They leave the L2 cache
// late, and bring their line of memory along. %place is that of a thread's first chunk in a slot, and %beyond is how many
// elements beyond it this one is.
//
// ptxas 12.9 and 13.0 may take the sum that is such an address apart, and name the policy's register wrongly then: the GPU
// stops at an illegal instruction. They take no exclusive or apart. So there is one with zero, of which neither they know nor
// LLVM, from whom the empty instruction hides that M has 31 bits.
func.func private @copy_lasting(%rows: !rows, %staged: !staged, %row: index, %column: index, %slot: index, %group: index, %place: index, %beyond: index, %copied: index, %chunk: index, %chunk_bytes: i64, %m: i32) {
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  %late = llvm.inline_asm "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", "=l" : () -> i64
  %source = func.call @address_of_it(%rows, %row, %column) : (!rows, index, index) -> !pointer
  %groups = memref.dim %staged, %c1 : !staged
  %columns = memref.dim %staged, %c2 : !staged
  %slots_before = arith.muli %slot, %groups : index
  %groups_before = arith.addi %slots_before, %group : index
  %elements_before = arith.muli %groups_before, %columns : index
  %at = arith.addi %elements_before, %place : index
  %unit = arith.index_castui %chunk_bytes : i64 to index
  %size = arith.divui %unit, %chunk : index
  %first_offset = arith.muli %at, %size : index
  %base = memref.extract_aligned_pointer_as_index %staged : !staged -> index
  %first = arith.addi %base, %first_offset : index
  %first_i32 = arith.index_castui %first : index to i32
  %bits = arith.constant 31 : i32
  %any = llvm.inline_asm "", "=r,0" %m : (i32) -> i32
  %none = arith.shrsi %any, %bits : i32
  %whole = arith.xori %first_i32, %none : i32
  %offset = arith.muli %beyond, %size : index
  %offset_i32 = arith.index_castui %offset : index to i32
  %to = arith.addi %whole, %offset_i32 : i32
  %bytes = arith.muli %copied, %size : index
  %bytes_i32 = arith.index_castui %bytes : index to i32
  %chunk_i32 = arith.trunci %chunk_bytes : i64 to i32
  llvm.inline_asm has_side_effects "cp.async.ca.shared.global.L2::cache_hint.L2::128B [$0], [$1], $2, $3, $4;", "r,l,n,r,l,~{memory}" %to, %source, %chunk_i32, %bytes_i32, %late
      : (i32, !pointer, i32, i32, i64) -> ()
  return
}
