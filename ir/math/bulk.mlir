// Copies of many bytes into shared memory, by one thread (NVIDIA since sm_90).
//
// Such a copy has whole 16 bytes, and begins at 16 bytes both in memory and in shared memory. It passes by the L1
// cache, and counts the bytes that have come at an mbarrier (clusters.mlir).
//
// Source: PTX ISA, "cp.async.bulk", "cp.async.bulk.prefetch", "fence.proxy".

// What a kernel's declaration decides.
!rows = memref<?x4096xbf16, #hal.descriptor_type<storage_buffer>>
!staged = memref<3x1x4096xbf16, #gpu.address_space<workgroup>>
!element = bf16
// End of what is replaced.

// Elements of rows, from a number on, to a place in a slot. They may leave the L2 cache late.
func.func private @copy_in_bulk(%rows: !rows, %staged: !staged, %from: index, %copied: index, %of_16: index, %slot: index, %group: index, %place: index, %mbarrier: i32, %lasts: i1) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  %unit = arith.constant 16 : index
  %size = arith.divui %unit, %of_16 : index
  %groups = memref.dim %staged, %c1 : !staged
  %columns = memref.dim %staged, %c2 : !staged
  %slots_before = arith.muli %slot, %groups : index
  %groups_before = arith.addi %slots_before, %group : index
  %elements_before = arith.muli %groups_before, %columns : index
  %at = arith.addi %elements_before, %place : index
  %to_offset = arith.muli %at, %size : index
  %to_base = memref.extract_aligned_pointer_as_index %staged : !staged -> index
  %to = arith.addi %to_base, %to_offset : index
  %from_offset = arith.muli %from, %size : index  // without strides
  // with strides: %memory, %begin, %lengths:2, %steps:2 = memref.extract_strided_metadata %rows
  // with strides:     : !rows -> memref<!element, #hal.descriptor_type<storage_buffer>>, index, index, index, index, index
  // with strides: %from_on = arith.addi %begin, %from : index
  // with strides: %from_offset = arith.muli %from_on, %size : index
  %from_base = memref.extract_aligned_pointer_as_index %rows : !rows -> index
  %source = arith.addi %from_base, %from_offset : index
  %bytes = arith.muli %copied, %size : index
  %to_i32 = arith.index_castui %to : index to i32
  %source_i64 = arith.index_castui %source : index to i64
  %bytes_i32 = arith.index_castui %bytes : index to i32
  %any = arith.cmpi ne, %copied, %c0 : index
  scf.if %any {
    scf.if %lasts {
      %late = llvm.inline_asm "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", "=l" : () -> i64
      llvm.inline_asm has_side_effects "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$0], [$1], $2, [$3], $4;", "r,l,r,r,l,~{memory}" %to_i32, %source_i64, %bytes_i32, %mbarrier, %late
          : (i32, i64, i32, i32, i64) -> ()
    } else {
      llvm.inline_asm has_side_effects "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];", "r,l,r,r,~{memory}" %to_i32, %source_i64, %bytes_i32, %mbarrier
          : (i32, i64, i32, i32) -> ()
    }
  }
  return
}

// One that is left: of the elements from a number on, one that is copied, if its own number is below another one.
func.func private @copy_one(%rows: !rows, %staged: !staged, %from: index, %which: index, %below: index, %slot: index, %group: index, %place: index) {
  %c1 = arith.constant 1 : index
  %is_left = arith.cmpi ult, %which, %below : index
  scf.if %is_left {
    %of_line = memref.dim %rows, %c1 : !rows
    %at = arith.addi %from, %which : index
    %line = arith.divui %at, %of_line : index
    %in_line = arith.remui %at, %of_line : index
    %to = arith.addi %place, %which : index
    %one = memref.load %rows[%line, %in_line] : !rows
    memref.store %one, %staged[%slot, %group, %to] : !staged
  }
  return
}

// Zero at a place of a slot, if it is below another place.
func.func private @zero(%staged: !staged, %slot: index, %group: index, %at: index, %below: index) {
  %nothing = arith.constant 0.0 : !element
  %is_there = arith.cmpi ult, %at, %below : index
  scf.if %is_there {
    memref.store %nothing, %staged[%slot, %group, %at] : !staged
  }
  return
}

// What this thread has stored in a slot comes before copies to it that are made later.
func.func private @before_copies(%staged: !staged) {
  llvm.inline_asm has_side_effects "fence.proxy.async.shared::cta;", "~{memory}" : () -> ()
  return
}

// Elements of rows, from a number on and below another, go to the L2 cache, and leave it late: what of them is in whole
// 16 bytes that begin with them or before. Nobody waits for them.
func.func private @fetch_to_cache(%rows: !rows, %from: index, %below: index, %of_16: index) {
  %unit = arith.constant 16 : index
  %first = arith.divui %from, %of_16 : index
  %end = arith.divui %below, %of_16 : index
  %count = arith.subi %end, %first : index
  %bytes = arith.muli %count, %unit : index
  %offset = arith.muli %first, %unit : index
  %base = memref.extract_aligned_pointer_as_index %rows : !rows -> index
  %source = arith.addi %base, %offset : index
  %source_i64 = arith.index_castui %source : index to i64
  %bytes_i32 = arith.index_castui %bytes : index to i32
  %any = arith.cmpi ne, %end, %first : index
  scf.if %any {
    %late = llvm.inline_asm "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", "=l" : () -> i64
    llvm.inline_asm has_side_effects "cp.async.bulk.prefetch.L2.global.L2::cache_hint [$0], $1, $2;", "l,r,l" %source_i64, %bytes_i32, %late
        : (i64, i32, i64) -> ()
  }
  return
}
