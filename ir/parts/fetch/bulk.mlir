// Rows that each subgroup copies together, in bulk (NVIDIA since sm_90; math/bulk.mlir).

// What a NormSpec and a Schedule decide.
!dy = bf16
!x = bf16
#columns = 4096 : index
#own_columns = 4096 : index
#dy_bits = 16 : index
#x_bits = 16 : index
#subgroup = 32 : index
#warps = 16 : index
#slots = 3 : index
#bulk = false
#dy_pitch = 4160 : index
#x_pitch = 4160 : index
#lines_behind = 3 : index
#may_have_none = false
#refills = 1 : index
#x_later = false
!dy_lines = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>
!x_lines = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!dy_staged = memref<3x1x4096x!dy, #gpu.address_space<workgroup>>
!x_staged = memref<3x1x4096x!x, #gpu.address_space<workgroup>>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
#rolled = #llvm.loop_annotation<unroll = <disable = true>>

func.func private @of_subgroup() -> index
func.func private @copies_first() -> index
func.func private @mbarrier(!mbarriers, index) -> i32
func.func private @whole_16() -> i1
func.func private @shifted() -> i1
func.func private @in_refills() -> i1
func.func private @refill_columns() -> index
func.func private @dy_in_16() -> index
func.func private @x_in_16() -> index
func.func private @dy_in_line() -> index
func.func private @x_in_line() -> index
func.func private @expect(i32, i32)
func.func private @copy_in_bulk_of_dy(!dy_lines, !dy_staged, index, index, index, index, index, index, i32)
func.func private @copy_in_bulk_of_x(!x_lines, !x_staged, index, index, index, index, index, index, i32)
func.func private @await(i32, i32)
func.func private @copy_one_of_dy(!dy_lines, !dy_staged, index, index, index, index, index, index)
func.func private @copy_one_of_x(!x_lines, !x_staged, index, index, index, index, index, index)
func.func private @zero_of_dy(!dy_staged, index, index, index, index)
func.func private @zero_of_x(!x_staged, index, index, index, index)
func.func private @before_copies(!dy_staged)
func.func private @slot_after(index) -> index
func.func private @arrivals_i32() -> i32
func.func private @init_mbarrier(i32, i32)
func.func private @x_slots() -> index
// End of what is replaced.

// Where a row's elements are in a slot, counted from their columns. Copies in bulk are fastest between places of the
// same rest by 128 bytes. So each subgroup's part of a slot begins with 128 bytes of memory. The product may wrap
// around: these are a power of 2.
func.func private @slot_offset(%row: i32, %part: index, %warp: index, %shift: index, %of_line: index, %pitch: index) -> index {
  %c0 = arith.constant 0 : index
  %bulk = arith.constant #bulk
  %n = arith.constant #columns
  %room = func.call @of_subgroup() : () -> index
  %n_i32 = arith.index_castui %n : index to i32
  %warps_before = arith.muli %warp, %room : index
  %columns_before = arith.addi %part, %warps_before : index
  %columns_on = arith.subi %columns_before, %shift : index
  %columns_i32 = arith.index_cast %columns_on : index to i32
  %of_line_i32 = arith.index_castui %of_line : index to i32
  %rows_before = arith.muli %row, %n_i32 : i32
  %all_before = arith.addi %rows_before, %columns_i32 : i32
  %before_i32 = arith.remui %all_before, %of_line_i32 : i32
  %before = arith.index_castui %before_i32 : i32 to index
  %beside_each = arith.subi %pitch, %room : index
  %beside = arith.muli %warp, %beside_each : index
  %from = arith.addi %beside, %before : index
  %staged_from = arith.select %bulk, %from, %c0 : index
  return %staged_from : index
}

// The slot for x of a row, if dy has that one.
func.func private @x_slot(%slot: index) -> index {
  %c0 = arith.constant 0 : index
  %x_later = arith.constant #x_later
  %slot_of_x = arith.select %x_later, %c0, %slot : index
  return %slot_of_x : index
}

// The mbarrier that a subgroup's copies to a slot tell.
func.func private @copied_mbarrier(%mbarriers: !mbarriers, %group: index, %warp: index, %slot: index) -> i32 {
  %first = func.call @copies_first() : () -> index
  %warps = arith.constant #warps
  %slots = arith.constant #slots
  %groups_before = arith.muli %group, %warps : index
  %subgroups_before = arith.addi %groups_before, %warp : index
  %slots_before = arith.muli %subgroups_before, %slots : index
  %of_copies = arith.addi %slots_before, %slot : index
  %which = arith.addi %first, %of_copies : index
  %mbarrier = func.call @mbarrier(%mbarriers, %which) : (!mbarriers, index) -> i32
  return %mbarrier : i32
}

// How many columns a subgroup copies: the last ones of a workgroup may have fewer than there is room for, or none.
func.func private @subgroup_columns(%part: index, %warp: index, %shift: index) -> index {
  %n = arith.constant #columns
  %own = arith.constant #own_columns
  %room = func.call @of_subgroup() : () -> index
  %end = arith.addi %n, %shift : index
  %left = arith.subi %end, %part : index
  %of_workgroup = arith.minui %left, %own : index
  %warps_before = arith.muli %warp, %room : index
  %begun = arith.minui %warps_before, %of_workgroup : index
  %behind = arith.subi %of_workgroup, %begun : index
  %count = arith.minui %behind, %room : index
  return %count : index
}

// What is copied of so many elements from a number on: how many elements before them, how many in all, and how
// many are wanted. Copies have whole 16 bytes, and none from behind a tensor's last element, so that its last ones
// may be left.
func.func private @extent(%first: index, %count: index, %all: index, %of_16: index) -> (index, index, index) {
  %whole = func.call @whole_16() : () -> i1
  %before = arith.remui %first, %of_16 : index
  %from = arith.subi %first, %before : index
  %until = arith.addi %before, %count : index
  %c0 = arith.constant 0 : index
  %may_be_none = arith.constant #may_have_none
  %has_none = arith.cmpi eq, %count, %c0 : index
  %is_none = arith.andi %may_be_none, %has_none : i1
  %wanted = arith.select %is_none, %c0, %until : index
  %pieces = arith.ceildivui %wanted, %of_16 : index
  %more = arith.muli %pieces, %of_16 : index
  %beyond = arith.remui %wanted, %of_16 : index
  %less = arith.subi %wanted, %beyond : index
  %end = arith.addi %from, %more : index
  %is_there = arith.cmpi ule, %end, %all : index
  %fits = arith.ori %whole, %is_there : i1
  %copied = arith.select %fits, %more, %less : index
  return %before, %copied, %wanted : index, index, index
}

// The first column that a subgroup copies, the number of its element among all of the rows, and the place of its
// columns in a slot but for what is beside them.
func.func private @subgroup_begin(%row: index, %part: index, %warp: index, %shift: index) -> (index, index, index) {
  %n = arith.constant #columns
  %room = func.call @of_subgroup() : () -> index
  %warps_before = arith.muli %warp, %room : index
  %column = arith.addi %part, %warps_before : index
  %rows_before = arith.muli %row, %n : index
  %all_before = arith.addi %rows_before, %column : index
  %first = arith.subi %all_before, %shift : index
  return %column, %first, %warps_before : index, index, index
}

// Whether a subgroup has the first access of a row, and in it what is before the row.
func.func private @begins_within(%part: index, %warp: index, %shift: index) -> i1 {
  %c0 = arith.constant 0 : index
  %shifted = func.call @shifted() : () -> i1
  %either = arith.addi %part, %warp : index
  %is_first = arith.cmpi eq, %either, %c0 : index
  %is_within = arith.cmpi ne, %shift, %c0 : index
  %has_both = arith.andi %is_first, %is_within : i1
  %begins = arith.andi %has_both, %shifted : i1
  return %begins : i1
}

// Of copies to a subgroup's part of a slot, from a place there on, what belongs to one refill of several: how many
// elements come before it, and how many it has. All that a refill overwrites is in chunks whose dx is stored: a row
// begins up to 128 bytes behind the first place.
func.func private @refill_extent(%refill: index, %from: index, %copied: index) -> (index, index) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %refills = arith.constant #refills
  %in_refills = func.call @in_refills() : () -> i1
  %columns = func.call @refill_columns() : () -> index
  %before, %count = scf.if %in_refills -> (index, index) {
    %end = arith.addi %from, %copied : index
    %begins = arith.muli %refill, %columns : index
    %ends = arith.addi %begins, %columns : index
    %next = arith.addi %refill, %c1 : index
    %is_last = arith.cmpi eq, %next, %refills : index
    %own_from = arith.maxui %from, %begins : index
    %until = arith.minui %end, %ends : index
    %own_end = arith.select %is_last, %end, %until : index
    %has_any = arith.cmpi ult, %own_from, %own_end : index
    %few = arith.subi %own_end, %own_from : index
    %own = arith.select %has_any, %few, %c0 : index
    %others = arith.subi %own_from, %from : index
    scf.yield %others, %own : index, index
  } else {
    scf.yield %c0, %copied : index, index
  }
  return %before, %count : index, index
}

// What is copied of a row of one tensor: the number of its first element among all of the rows, how many, and their
// place in a slot.
func.func private @copy_extent(%first: index, %count: index, %all: index, %of_16: index, %of_line: index, %pitch: index, %warp: index, %refill: index) -> (index, index, index) {
  %before, %copied_all, %wanted = func.call @extent(%first, %count, %all, %of_16) : (index, index, index, index) -> (index, index, index)
  %first_all = arith.subi %first, %before : index
  %begins = arith.muli %warp, %pitch : index
  %in_line = arith.remui %first_all, %of_line : index
  %place_all = arith.addi %begins, %in_line : index
  %others, %copied = func.call @refill_extent(%refill, %in_line, %copied_all) : (index, index, index) -> (index, index)
  %from = arith.addi %first_all, %others : index
  %place = arith.addi %place_all, %others : index
  return %from, %copied, %place : index, index, index
}

// A subgroup's columns of a row to a slot, or those of one refill: of dy, of x, or of both. One thread does that.
func.func private @fetch_in_bulk(%takes_dy: i1, %takes_x: i1, %dy: !dy_lines, %x: !x_lines, %row: index, %all: index, %refill: index, %slot: index, %group: index, %warp: index, %part: index, %shift: index, %dy_staged: !dy_staged, %x_staged: !x_staged, %mbarriers: !mbarriers) {
  %c0 = arith.constant 0 : index
  %dy_of_16 = func.call @dy_in_16() : () -> index
  %x_of_16 = func.call @x_in_16() : () -> index
  %dy_of_line = func.call @dy_in_line() : () -> index
  %x_of_line = func.call @x_in_line() : () -> index
  %dy_pitch = arith.constant #dy_pitch
  %x_pitch = arith.constant #x_pitch
  %dy_size_bits = arith.constant #dy_bits
  %x_size_bits = arith.constant #x_bits
  %bits = arith.constant 8 : index
  %count = func.call @subgroup_columns(%part, %warp, %shift) : (index, index, index) -> index
  %column, %first, %warps_before = func.call @subgroup_begin(%row, %part, %warp, %shift) : (index, index, index, index) -> (index, index, index)
  %dy_first, %dy_copied, %dy_place = func.call @copy_extent(%first, %count, %all, %dy_of_16, %dy_of_line, %dy_pitch, %warp, %refill)
      : (index, index, index, index, index, index, index, index) -> (index, index, index)
  %x_first, %x_copied, %x_place = func.call @copy_extent(%first, %count, %all, %x_of_16, %x_of_line, %x_pitch, %warp, %refill)
      : (index, index, index, index, index, index, index, index) -> (index, index, index)
  %dy_bits_copied = arith.muli %dy_copied, %dy_size_bits : index
  %x_bits_copied = arith.muli %x_copied, %x_size_bits : index
  %dy_bits_taken = arith.select %takes_dy, %dy_bits_copied, %c0 : index
  %x_bits_taken = arith.select %takes_x, %x_bits_copied, %c0 : index
  %bits_copied = arith.addi %dy_bits_taken, %x_bits_taken : index
  %bytes = arith.divui %bits_copied, %bits : index
  %bytes_i32 = arith.index_castui %bytes : index to i32
  %mbarrier = func.call @copied_mbarrier(%mbarriers, %group, %warp, %slot) : (!mbarriers, index, index, index) -> i32
  func.call @expect(%mbarrier, %bytes_i32) : (i32, i32) -> ()
  scf.if %takes_dy {
    func.call @copy_in_bulk_of_dy(%dy, %dy_staged, %dy_first, %dy_copied, %dy_of_16, %slot, %group, %dy_place, %mbarrier)
        : (!dy_lines, !dy_staged, index, index, index, index, index, index, i32) -> ()
  }
  scf.if %takes_x {
    %slot_of_x = func.call @x_slot(%slot) : (index) -> index
    func.call @copy_in_bulk_of_x(%x, %x_staged, %x_first, %x_copied, %x_of_16, %slot_of_x, %group, %x_place, %mbarrier)
        : (!x_lines, !x_staged, index, index, index, index, index, index, i32) -> ()
  }
  return
}

// Until a subgroup's columns of a row have come in bulk. The last elements of the last row may be left: a lane loads
// each. Behind the columns may be what is not the subgroup's: zeros take its place.
func.func private @await_row(%dy: !dy_lines, %x: !x_lines, %row: i32, %last: i32, %slot: index, %parity: i32, %group: index, %warp: index, %lane: index, %part: index, %shift: index, %dy_from: index, %x_from: index, %dy_staged: !dy_staged, %x_staged: !x_staged, %mbarriers: !mbarriers) {
  %bulk = arith.constant #bulk
  scf.if %bulk {
    %room = func.call @of_subgroup() : () -> index
    %whole = func.call @whole_16() : () -> i1
    %all_lanes = arith.constant -1 : i32
    %yes = arith.constant true
    %slot_of_x = func.call @x_slot(%slot) : (index) -> index
    %mbarrier = func.call @copied_mbarrier(%mbarriers, %group, %warp, %slot) : (!mbarriers, index, index, index) -> i32
    func.call @await(%mbarrier, %parity) : (i32, i32) -> ()
    %count = func.call @subgroup_columns(%part, %warp, %shift) : (index, index, index) -> index
    %has_room = arith.cmpi ult, %count, %room : index
    %is_last = arith.cmpi eq, %row, %last : i32
    %broken = arith.xori %whole, %yes : i1
    %may_be_left = arith.andi %broken, %is_last : i1
    %begins = func.call @begins_within(%part, %warp, %shift) : (index, index, index) -> i1
    %stores_zeros = arith.ori %has_room, %begins : i1
    %stores = arith.ori %stores_zeros, %may_be_left : i1
    scf.if %stores {
      %dy_of_16 = func.call @dy_in_16() : () -> index
      %x_of_16 = func.call @x_in_16() : () -> index
      %n = arith.constant #columns
      %row_index = arith.index_castui %row : i32 to index
      %column, %first, %place = func.call @subgroup_begin(%row_index, %part, %warp, %shift) : (index, index, index, index) -> (index, index, index)
      scf.if %may_be_left {
        %row_begins = arith.subi %first, %column : index
        %row_on = arith.addi %row_begins, %shift : index
        %all = arith.addi %row_on, %n : index  // of the last row: the end of the tensor
        %dy_before, %dy_copied, %dy_wanted = func.call @extent(%first, %count, %all, %dy_of_16)
            : (index, index, index, index) -> (index, index, index)
        %x_before, %x_copied, %x_wanted = func.call @extent(%first, %count, %all, %x_of_16)
            : (index, index, index, index) -> (index, index, index)
        %dy_begins = arith.addi %dy_from, %place : index
        %x_begins = arith.addi %x_from, %place : index
        %dy_place = arith.subi %dy_begins, %dy_before : index
        %x_place = arith.subi %x_begins, %x_before : index
        %dy_first = arith.subi %first, %dy_before : index
        %x_first = arith.subi %first, %x_before : index
        %dy_which = arith.addi %dy_copied, %lane : index
        %x_which = arith.addi %x_copied, %lane : index
        func.call @copy_one_of_dy(%dy, %dy_staged, %dy_first, %dy_which, %dy_wanted, %slot, %group, %dy_place)
            : (!dy_lines, !dy_staged, index, index, index, index, index, index) -> ()
        func.call @copy_one_of_x(%x, %x_staged, %x_first, %x_which, %x_wanted, %slot_of_x, %group, %x_place)
            : (!x_lines, !x_staged, index, index, index, index, index, index) -> ()
      }
      // A copy has less than 16 bytes behind the columns, and one before may have begun up to 128 bytes later.
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %lanes = arith.constant #subgroup
      %behind = arith.constant #lines_behind
      %own_end = arith.addi %place, %count : index
      %at_first = arith.addi %own_end, %lane : index
      %room_end = arith.addi %place, %room : index
      %dy_below = arith.addi %dy_from, %room_end : index
      %x_below = arith.addi %x_from, %room_end : index
      scf.for %turn = %c0 to %behind step %c1 {
        %lanes_before = arith.muli %turn, %lanes : index
        %at = arith.addi %at_first, %lanes_before : index
        %dy_at = arith.addi %dy_from, %at : index
        %x_at = arith.addi %x_from, %at : index
        func.call @zero_of_dy(%dy_staged, %slot, %group, %dy_at, %dy_below) : (!dy_staged, index, index, index, index) -> ()
        func.call @zero_of_x(%x_staged, %slot_of_x, %group, %x_at, %x_below) : (!x_staged, index, index, index, index) -> ()
      } {llvm.loop_annotation = #unrolled}
      // Where a row begins within an access, what is before it in that access.
      %before_end = arith.select %begins, %shift, %c0 : index
      %dy_before_end = arith.addi %dy_from, %before_end : index
      %x_before_end = arith.addi %x_from, %before_end : index
      %dy_before_at = arith.addi %dy_from, %lane : index
      %x_before_at = arith.addi %x_from, %lane : index
      func.call @zero_of_dy(%dy_staged, %slot, %group, %dy_before_at, %dy_before_end) : (!dy_staged, index, index, index, index) -> ()
      func.call @zero_of_x(%x_staged, %slot_of_x, %group, %x_before_at, %x_before_end) : (!x_staged, index, index, index, index) -> ()
      nvvm.bar.warp.sync %all_lanes : i32
    }
  }
  return
}

// Of a subgroup that has stored zeros in a slot, before it is filled again.
func.func private @stored_before_copies(%part: index, %warp: index, %shift: index, %dy_staged: !dy_staged) {
  %room = func.call @of_subgroup() : () -> index
  %count = func.call @subgroup_columns(%part, %warp, %shift) : (index, index, index) -> index
  %has_room = arith.cmpi ult, %count, %room : index
  %begins = func.call @begins_within(%part, %warp, %shift) : (index, index, index) -> i1
  %stores_zeros = arith.ori %has_room, %begins : i1
  scf.if %stores_zeros {
    func.call @before_copies(%dy_staged) : (!dy_staged) -> ()
  }
  return
}

// A slot, or a part of it, with columns of a row ahead. The subgroup has read what was there. If x is copied later,
// its part of the next row takes the place of this row's, and dy of the row ahead follows with the last part.
func.func private @refill_in_bulk(%dy: !dy_lines, %x: !x_lines, %row_ahead: index, %is_live: i1, %row_next: index, %next_is_live: i1, %all: index, %refill: index, %slot: index, %group: index, %warp: index, %lane: index, %part: index, %shift: index, %dy_staged: !dy_staged, %x_staged: !x_staged, %mbarriers: !mbarriers) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %x_later = arith.constant #x_later
  %refills = arith.constant #refills
  %yes = arith.constant true
  %no = arith.constant false
  %all_lanes = arith.constant -1 : i32
  func.call @stored_before_copies(%part, %warp, %shift, %dy_staged) : (index, index, index, !dy_staged) -> ()
  nvvm.bar.warp.sync %all_lanes : i32
  %leads = arith.cmpi eq, %lane, %c0 : index
  %fetches = arith.andi %leads, %is_live : i1
  scf.if %x_later {
    %slot_next = func.call @slot_after(%slot) : (index) -> index
    %fetches_x = arith.andi %leads, %next_is_live : i1
    scf.if %fetches_x {
      func.call @fetch_in_bulk(%no, %yes, %dy, %x, %row_next, %all, %refill, %slot_next, %group, %warp, %part, %shift, %dy_staged, %x_staged, %mbarriers)
          : (i1, i1, !dy_lines, !x_lines, index, index, index, index, index, index, index, index, !dy_staged, !x_staged, !mbarriers) -> ()
    }
    %refill_after = arith.addi %refill, %c1 : index
    %is_last = arith.cmpi eq, %refill_after, %refills : index
    %fetches_dy = arith.andi %fetches, %is_last : i1
    scf.if %fetches_dy {
      scf.for %each = %c0 to %refills step %c1 {
        func.call @fetch_in_bulk(%yes, %no, %dy, %x, %row_ahead, %all, %each, %slot, %group, %warp, %part, %shift, %dy_staged, %x_staged, %mbarriers)
            : (i1, i1, !dy_lines, !x_lines, index, index, index, index, index, index, index, index, !dy_staged, !x_staged, !mbarriers) -> ()
      }
    }
  } else {
    scf.if %fetches {
      func.call @fetch_in_bulk(%yes, %yes, %dy, %x, %row_ahead, %all, %refill, %slot, %group, %warp, %part, %shift, %dy_staged, %x_staged, %mbarriers)
          : (i1, i1, !dy_lines, !x_lines, index, index, index, index, index, index, index, index, !dy_staged, !x_staged, !mbarriers) -> ()
    }
  }
  return
}

// Before the first copies in bulk.
func.func private @ready_for_bulk(%mbarriers: !mbarriers, %group: index, %warp: index, %lane: index) {
  %bulk = arith.constant #bulk
  scf.if %bulk {
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %slots = arith.constant #slots
    %arrivals_i32 = func.call @arrivals_i32() : () -> i32
    %all_lanes = arith.constant -1 : i32
    %leads = arith.cmpi eq, %lane, %c0 : index
    scf.if %leads {
      scf.for %slot = %c0 to %slots step %c1 {
        %mbarrier = func.call @copied_mbarrier(%mbarriers, %group, %warp, %slot) : (!mbarriers, index, index, index) -> i32
        func.call @init_mbarrier(%mbarrier, %arrivals_i32) : (i32, i32) -> ()
      }
    }
    nvvm.bar.warp.sync %all_lanes : i32
  }
  return
}

// Zeros where a subgroup has room for more columns, but for those that each row stores anew. No copy comes so far.
func.func private @zero_room(%group: index, %warp: index, %lane: index, %part: index, %dy_staged: !dy_staged, %x_staged: !x_staged) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %slots = arith.constant #slots
  %x_slots = func.call @x_slots() : () -> index
  %lanes = arith.constant #subgroup
  %behind = arith.constant #lines_behind
  %dy_pitch = arith.constant #dy_pitch
  %x_pitch = arith.constant #x_pitch
  %all_lanes = arith.constant -1 : i32
  %count = func.call @subgroup_columns(%part, %warp, %c0) : (index, index, index) -> index
  %each_row = arith.muli %behind, %lanes : index
  %lane_on = arith.addi %each_row, %lane : index
  %from = arith.addi %count, %lane_on : index
  %dy_place = arith.muli %warp, %dy_pitch : index
  %x_place = arith.muli %warp, %x_pitch : index
  %dy_first = arith.addi %dy_place, %from : index
  %x_first = arith.addi %x_place, %from : index
  %dy_below = arith.addi %dy_place, %dy_pitch : index
  %x_below = arith.addi %x_place, %x_pitch : index
  scf.for %slot = %c0 to %slots step %c1 {
    scf.for %at = %dy_first to %dy_below step %lanes {
      func.call @zero_of_dy(%dy_staged, %slot, %group, %at, %dy_below) : (!dy_staged, index, index, index, index) -> ()
    } {llvm.loop_annotation = #rolled}
    %has_x = arith.cmpi ult, %slot, %x_slots : index
    scf.if %has_x {
      scf.for %at = %x_first to %x_below step %lanes {
        func.call @zero_of_x(%x_staged, %slot, %group, %at, %x_below) : (!x_staged, index, index, index, index) -> ()
      } {llvm.loop_annotation = #rolled}
    }
  }
  nvvm.bar.warp.sync %all_lanes : i32
  return
}
