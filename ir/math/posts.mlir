// Values that workgroups of one launch post in global memory, and that others wait for.
//
// A post has 64 bits and is its own message: whoever reads anything but @unsent_word() has all of it, for such an access is
// never torn. So no fence orders anything, and relaxed accesses do. They are coherent for all of a GPU ("gpu", "agent"),
// past the L1 cache. Source: PTX ISA, "ld", "st", "atom", "Memory Consistency Model"; LLVM, "Memory Model" of AMDGPU.

// What a kernel's declaration decides.
!pointer = !llvm.ptr<1>
!posted = memref<?x2xi64, #hal.descriptor_type<storage_buffer>>
// End of what is replaced.

// What is there before anything is posted: ir/unsent.mlir stores it. No arithmetic gives this NaN.
func.func private @unsent_word() -> i64 {
  %all_ones = arith.constant -1 : i64
  return %all_ones : i64
}

// Where a row's post of that number is.
func.func private @post_address(%posted: !posted, %row: index, %which: index) -> !pointer {
  %c1 = arith.constant 1 : index
  %bytes = arith.constant 8 : index
  %each = memref.dim %posted, %c1 : !posted
  %before = arith.muli %row, %each : index
  %number = arith.addi %before, %which : index
  %offset = arith.muli %number, %bytes : index
  %base = memref.extract_aligned_pointer_as_index %posted : !posted -> index
  %at = arith.addi %base, %offset : index
  %at_i64 = arith.index_castui %at : index to i64
  %address = llvm.inttoptr %at_i64 : i64 to !pointer
  return %address : !pointer
}

func.func private @load_post(%address: !pointer) -> i64 {
  %value = llvm.inline_asm has_side_effects "ld.relaxed.gpu.global.b64 $0, [$1];", "=l,l,~{memory}" %address
      : (!pointer) -> i64
  return %value : i64
}

func.func private @store_post(%address: !pointer, %value: i64) {
  llvm.inline_asm has_side_effects "st.relaxed.gpu.global.b64 [$0], $1;", "l,l,~{memory}" %address, %value
      : (!pointer, i64) -> ()
  return
}

// Of a post's first 32 bits, which count.
func.func private @load_count(%address: !pointer) -> i32 {
  %value = llvm.inline_asm has_side_effects "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l,~{memory}" %address
      : (!pointer) -> i32
  return %value : i32
}

// Adds to them, and returns what was there before.
func.func private @add_count(%address: !pointer, %more: i32) -> i32 {
  %before = llvm.inline_asm has_side_effects "atom.relaxed.gpu.global.add.u32 $0, [$1], $2;", "=r,l,r,~{memory}" %address, %more
      : (!pointer, i32) -> i32
  return %before : i32
}

// Puts a number in place of an expected one, and returns what was there before.
func.func private @swap_count(%address: !pointer, %expected: i32, %instead: i32) -> i32 {
  %before = llvm.inline_asm has_side_effects "atom.relaxed.gpu.global.cas.b32 $0, [$1], $2, $3;", "=r,l,r,r,~{memory}" %address, %expected, %instead
      : (!pointer, i32, i32) -> i32
  return %before : i32
}

// Lets others run for a moment.
func.func private @rest() {
  %nanoseconds = arith.constant 40 : i32
  llvm.inline_asm has_side_effects "nanosleep.u32 $0;", "r,~{memory}" %nanoseconds : (i32) -> ()
  return
}
