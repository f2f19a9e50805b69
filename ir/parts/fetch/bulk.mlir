// Rows that each subgroup copies together, in bulk and in place (NVIDIA since sm_90; math/bulk.mlir).
//
// One thread starts such a copy, and the subgroup waits for it at an mbarrier of its own for each slot. README.md draws
// them. The subgroup's columns are neighbours: a thread owns the chunks l, l + L, l + 2L, ... of them, for lane l of L. A
// copy may begin anywhere, so V need not be more than what divides N, and shared memory is read at any position. If V does
// not divide N, what a copy brings of other rows is overwritten by zeros in shared memory.
//
// with strides: // Rows that lie where a call says are counted as if each were the first: they begin at 16 bytes, and are
// with strides: // whole 16 bytes. If they begin at no line of memory, copies are not between places of the same rest.
// with strides: //
// Where shared memory has no room for two rows, it may have room for one and a half: x is copied a step later than dy then
// (#x_later), into its only slot. Copies of dy are the last to begin, so that x does not wait for them.

// What a NormSpec and a Schedule decide.
!dy = bf16
!x = bf16
#columns = 4096 : index
#own_columns = 4096 : index
#dy_bits = 16 : index
#x_bits = 16 : index
#subgroup = 32 : index
#warps = 16 : index
#ahead_i32 = 2 : i32
#slots = 3 : index
#dy_pitch = 4160 : index
#x_pitch = 4160 : index
#lines_behind = 3 : index
#may_have_none = false
#dy_chunk_bytes = 16 : i64
#x_chunk_bytes = 16 : i64
#x_later = false
!dy_lines = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>
!x_lines = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!dy_bytes = memref<24576xi8, #gpu.address_space<workgroup>>
!x_bytes = memref<24576xi8, #gpu.address_space<workgroup>>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
!dy_chunk = vector<8x!dy>
!x_chunk = vector<8x!x>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
#rolled = #llvm.loop_annotation<unroll = <disable = true>>
!thread = vector<9xindex>
!begin = vector<4xindex>
!rows_ahead = vector<2xindex>
!are_live = vector<2xi1>
!dy_room = memref<3x1x4096x!dy, #gpu.address_space<workgroup>>
!x_room = memref<3x1x4096x!x, #gpu.address_space<workgroup>>

func.func private @of_subgroup() -> index
func.func private @copies_first() -> index
func.func private @mbarrier(!mbarriers, index) -> i32
func.func private @whole_16() -> i1
func.func private @shifted() -> i1
func.func private @my_group(!thread) -> index
func.func private @my_copier(!thread) -> index
func.func private @my_part(!thread) -> index
func.func private @my_shift(!thread) -> index
func.func private @dy_in_16() -> index
func.func private @x_in_16() -> index
func.func private @dy_in_line() -> index
func.func private @x_in_line() -> index
func.func private @expect(i32, i32)
func.func private @copy_in_bulk_of_dy(!dy_lines, !dy_room, index, index, index, index, index, index, i32, i1)
func.func private @copy_in_bulk_of_x(!x_lines, !x_room, index, index, index, index, index, index, i32, i1)
func.func private @my_lane(!thread) -> index
func.func private @await(i32, i32)
func.func private @copy_one_of_dy(!dy_lines, !dy_room, index, index, index, index, index, index)
func.func private @copy_one_of_x(!x_lines, !x_room, index, index, index, index, index, index)
func.func private @zero_of_dy(!dy_room, index, index, index, index)
func.func private @zero_of_x(!x_room, index, index, index, index)
func.func private @before_copies(!dy_room)
func.func private @leads(!thread) -> i1
func.func private @slot_after(index) -> index
func.func private @x_slots() -> index
func.func private @arrivals_i32() -> i32
func.func private @init_mbarrier(i32, i32)
func.func private @column(index, !thread) -> (index, i1)
func.func private @meet(index)
func.func private @kth_row(!thread, i32) -> i32
// End of what is replaced.

// Whether subgroups copy rows together.
func.func private @in_bulk() -> i1 {
  %yes = arith.constant true
  return %yes : i1
}

// Whether rows are loaded once more for dx.
func.func private @loads_twice() -> i1 {
  %no = arith.constant false
  return %no : i1
}

// Shared memory of rows: [slots, groups, columns of T threads].
func.func private @room_for_rows(%dy_bytes: !dy_bytes, %x_bytes: !x_bytes, %dy: !dy_lines, %x: !x_lines) -> (!dy_room, !x_room) {
  %c0 = arith.constant 0 : index
  %dy_rows = memref.view %dy_bytes[%c0][] : !dy_bytes to !dy_room
  %x_rows = memref.view %x_bytes[%c0][] : !x_bytes to !x_room
  return %dy_rows, %x_rows : !dy_room, !x_room
}

// Where a row's elements are in a slot, counted from their columns. Copies in bulk are fastest between places of the
// same rest by 128 bytes. So each subgroup's part of a slot begins with 128 bytes of memory. The product may wrap
// around: these are a power of 2.
func.func private @slot_offset(%row: i32, %part: index, %warp: index, %shift: index, %of_line: index, %pitch: index) -> index {
  %n = arith.constant #columns
  %room = func.call @of_subgroup() : () -> index
  %n_i32 = arith.index_castui %n : index to i32
  %warps_before = arith.muli %warp, %room : index
  %columns_before = arith.addi %part, %warps_before : index
  %columns_on = arith.subi %columns_before, %shift : index
  %columns_i32 = arith.index_cast %columns_on : index to i32
  %of_line_i32 = arith.index_castui %of_line : index to i32
  %rows_before = arith.muli %row, %n_i32 : i32  // without strides
  // with strides: %rows_before = arith.constant 0 : i32
  %all_before = arith.addi %rows_before, %columns_i32 : i32
  %before_i32 = arith.remui %all_before, %of_line_i32 : i32
  %before = arith.index_castui %before_i32 : i32 to index
  %beside_each = arith.subi %pitch, %room : index
  %beside = arith.muli %warp, %beside_each : index
  %from = arith.addi %beside, %before : index
  return %from : index
}

// The slot for x of a row, if dy has that one.
func.func private @x_slot(%slot: index) -> index {
  %c0 = arith.constant 0 : index
  %x_later = arith.constant #x_later
  %slot_of_x = arith.select %x_later, %c0, %slot : index
  return %slot_of_x : index
}

// The mbarrier that copies of a subgroup to a slot arrive at.
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

// The first column that a subgroup copies, the number of its element among all of the rows, and the position of its
// columns in a slot but for what is beside them.
func.func private @subgroup_begin(%row: index, %part: index, %warp: index, %shift: index) -> (index, index, index) {
  %n = arith.constant #columns
  %room = func.call @of_subgroup() : () -> index
  %warps_before = arith.muli %warp, %room : index
  %column = arith.addi %part, %warps_before : index
  %rows_before = arith.muli %row, %n : index  // without strides
  // with strides: %rows_before = arith.constant 0 : index
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

// What is copied of a row of one tensor: the number of its first element among all of the rows, how many, and their
// position in a slot.
func.func private @copy_extent(%first: index, %count: index, %all: index, %of_16: index, %of_line: index, %pitch: index, %warp: index) -> (index, index, index) {
  %before, %copied, %wanted = func.call @extent(%first, %count, %all, %of_16) : (index, index, index, index) -> (index, index, index)
  %from = arith.subi %first, %before : index
  %begins = arith.muli %warp, %pitch : index
  %in_line = arith.remui %from, %of_line : index
  %position = arith.addi %begins, %in_line : index
  return %from, %copied, %position : index, index, index
}

// A subgroup's columns of a row to a slot: of dy, of x, or of both. One thread does that.
func.func private @fetch_in_bulk(%takes_dy: i1, %takes_x: i1, %thread: !thread, %row: index, %all: index, %slot: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room, %mbarriers: !mbarriers) {
  %group = func.call @my_group(%thread) : (!thread) -> index
  %warp = func.call @my_copier(%thread) : (!thread) -> index
  %part = func.call @my_part(%thread) : (!thread) -> index
  %shift = func.call @my_shift(%thread) : (!thread) -> index
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
  %lasts = arith.constant false
  %count = func.call @subgroup_columns(%part, %warp, %shift) : (index, index, index) -> index
  %column, %first, %warps_before = func.call @subgroup_begin(%row, %part, %warp, %shift) : (index, index, index, index) -> (index, index, index)
  %dy_first, %dy_copied, %dy_position = func.call @copy_extent(%first, %count, %all, %dy_of_16, %dy_of_line, %dy_pitch, %warp)
      : (index, index, index, index, index, index, index) -> (index, index, index)
  %x_first, %x_copied, %x_position = func.call @copy_extent(%first, %count, %all, %x_of_16, %x_of_line, %x_pitch, %warp)
      : (index, index, index, index, index, index, index) -> (index, index, index)
  %dy_bits_copied = arith.muli %dy_copied, %dy_size_bits : index
  %x_bits_copied = arith.muli %x_copied, %x_size_bits : index
  %dy_bits_taken = arith.select %takes_dy, %dy_bits_copied, %c0 : index
  %x_bits_taken = arith.select %takes_x, %x_bits_copied, %c0 : index
  %bits_copied = arith.addi %dy_bits_taken, %x_bits_taken : index
  %bytes = arith.divui %bits_copied, %bits : index
  %bytes_i32 = arith.index_castui %bytes : index to i32
  %mbarrier = func.call @copied_mbarrier(%mbarriers, %group, %warp, %slot) : (!mbarriers, index, index, index) -> i32
  func.call @expect(%mbarrier, %bytes_i32) : (i32, i32) -> ()
  // with strides: %dy_strided = func.call @row_of_dy(%dy, %row) : (!dy_lines, index) -> !dy_lines
  // with strides: %x_strided = func.call @row_of_x(%x, %row) : (!x_lines, index) -> !x_lines
  scf.if %takes_dy {
    func.call @copy_in_bulk_of_dy(%dy, %dy_rows, %dy_first, %dy_copied, %dy_of_16, %slot, %group, %dy_position, %mbarrier, %lasts)
        : (!dy_lines, !dy_room, index, index, index, index, index, index, i32, i1) -> ()
  }
  scf.if %takes_x {
    %slot_of_x = func.call @x_slot(%slot) : (index) -> index
    func.call @copy_in_bulk_of_x(%x, %x_rows, %x_first, %x_copied, %x_of_16, %slot_of_x, %group, %x_position, %mbarrier, %lasts)
        : (!x_lines, !x_room, index, index, index, index, index, index, i32, i1) -> ()
  }
  return
}

// Until a subgroup's columns of a row have come in bulk. The last elements of the last row may be left: a lane loads
// each. Behind the columns may be what is not the subgroup's: zeros replace it.
func.func private @await_row(%thread: !thread, %row: i32, %last: i32, %where: !begin, %parity: i32, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room, %mbarriers: !mbarriers) {
  %slot = vector.extract %where[0] : index from !begin
  %dy_from = vector.extract %where[1] : index from !begin
  %x_from = vector.extract %where[2] : index from !begin
  %group = func.call @my_group(%thread) : (!thread) -> index
  %lane = func.call @my_lane(%thread) : (!thread) -> index
  %warp = func.call @my_copier(%thread) : (!thread) -> index
  %part = func.call @my_part(%thread) : (!thread) -> index
  %shift = func.call @my_shift(%thread) : (!thread) -> index
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
    %column, %first, %position = func.call @subgroup_begin(%row_index, %part, %warp, %shift) : (index, index, index, index) -> (index, index, index)
    scf.if %may_be_left {
      %row_begins = arith.subi %first, %column : index
      %row_on = arith.addi %row_begins, %shift : index
      %all = arith.addi %row_on, %n : index  // of the last row: the end of the tensor
      %dy_before, %dy_copied, %dy_wanted = func.call @extent(%first, %count, %all, %dy_of_16)
          : (index, index, index, index) -> (index, index, index)
      %x_before, %x_copied, %x_wanted = func.call @extent(%first, %count, %all, %x_of_16)
          : (index, index, index, index) -> (index, index, index)
      %dy_begins = arith.addi %dy_from, %position : index
      %x_begins = arith.addi %x_from, %position : index
      %dy_position = arith.subi %dy_begins, %dy_before : index
      %x_position = arith.subi %x_begins, %x_before : index
      %dy_first = arith.subi %first, %dy_before : index
      %x_first = arith.subi %first, %x_before : index
      %dy_which = arith.addi %dy_copied, %lane : index
      %x_which = arith.addi %x_copied, %lane : index
      func.call @copy_one_of_dy(%dy, %dy_rows, %dy_first, %dy_which, %dy_wanted, %slot, %group, %dy_position)
          : (!dy_lines, !dy_room, index, index, index, index, index, index) -> ()
      func.call @copy_one_of_x(%x, %x_rows, %x_first, %x_which, %x_wanted, %slot_of_x, %group, %x_position)
          : (!x_lines, !x_room, index, index, index, index, index, index) -> ()
    }
    // A copy has less than 16 bytes behind the columns, and one before may have begun up to 128 bytes later.
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %lanes = arith.constant #subgroup
    %behind = arith.constant #lines_behind
    %own_end = arith.addi %position, %count : index
    %at_first = arith.addi %own_end, %lane : index
    %room_end = arith.addi %position, %room : index
    %dy_below = arith.addi %dy_from, %room_end : index
    %x_below = arith.addi %x_from, %room_end : index
    scf.for %line = %c0 to %behind step %c1 {
      %lanes_before = arith.muli %line, %lanes : index
      %at = arith.addi %at_first, %lanes_before : index
      %dy_at = arith.addi %dy_from, %at : index
      %x_at = arith.addi %x_from, %at : index
      func.call @zero_of_dy(%dy_rows, %slot, %group, %dy_at, %dy_below) : (!dy_room, index, index, index, index) -> ()
      func.call @zero_of_x(%x_rows, %slot_of_x, %group, %x_at, %x_below) : (!x_room, index, index, index, index) -> ()
    } {llvm.loop_annotation = #unrolled}
    // Where a row begins within an access, what is before it in that access.
    %before_end = arith.select %begins, %shift, %c0 : index
    %dy_before_end = arith.addi %dy_from, %before_end : index
    %x_before_end = arith.addi %x_from, %before_end : index
    %dy_before_at = arith.addi %dy_from, %lane : index
    %x_before_at = arith.addi %x_from, %lane : index
    func.call @zero_of_dy(%dy_rows, %slot, %group, %dy_before_at, %dy_before_end) : (!dy_room, index, index, index, index) -> ()
    func.call @zero_of_x(%x_rows, %slot_of_x, %group, %x_before_at, %x_before_end) : (!x_room, index, index, index, index) -> ()
    nvvm.bar.warp.sync %all_lanes : i32
  }
  return
}

// Of a subgroup that has stored zeros in a slot, before it is filled again.
func.func private @stored_before_copies(%part: index, %warp: index, %shift: index, %dy_rows: !dy_room) {
  %room = func.call @of_subgroup() : () -> index
  %count = func.call @subgroup_columns(%part, %warp, %shift) : (index, index, index) -> index
  %has_room = arith.cmpi ult, %count, %room : index
  %begins = func.call @begins_within(%part, %warp, %shift) : (index, index, index) -> i1
  %stores_zeros = arith.ori %has_room, %begins : i1
  scf.if %stores_zeros {
    func.call @before_copies(%dy_rows) : (!dy_room) -> ()
  }
  return
}

// Zeros where a subgroup has room for more columns, but for those that each row stores anew. No copy comes so far.
func.func private @zero_room(%thread: !thread, %dy_rows: !dy_room, %x_rows: !x_room) {
  %group = func.call @my_group(%thread) : (!thread) -> index
  %lane = func.call @my_lane(%thread) : (!thread) -> index
  %warp = func.call @my_copier(%thread) : (!thread) -> index
  %part = func.call @my_part(%thread) : (!thread) -> index
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
  %dy_position = arith.muli %warp, %dy_pitch : index
  %x_position = arith.muli %warp, %x_pitch : index
  %dy_first = arith.addi %dy_position, %from : index
  %x_first = arith.addi %x_position, %from : index
  %dy_below = arith.addi %dy_position, %dy_pitch : index
  %x_below = arith.addi %x_position, %x_pitch : index
  scf.for %slot = %c0 to %slots step %c1 {
    scf.for %at = %dy_first to %dy_below step %lanes {
      func.call @zero_of_dy(%dy_rows, %slot, %group, %at, %dy_below) : (!dy_room, index, index, index, index) -> ()
    } {llvm.loop_annotation = #rolled}
    %has_x = arith.cmpi ult, %slot, %x_slots : index
    scf.if %has_x {
      scf.for %at = %x_first to %x_below step %lanes {
        func.call @zero_of_x(%x_rows, %slot, %group, %at, %x_below) : (!x_room, index, index, index, index) -> ()
      } {llvm.loop_annotation = #rolled}
    }
  }
  nvvm.bar.warp.sync %all_lanes : i32
  return
}

// The first rows, before anything else; and zeros where no copy comes.
func.func private @fetch_first_rows(%thread: !thread, %leads: i1, %first: i32, %last: i32, %stride: i32, %cells: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room, %mbarriers: !mbarriers) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %zero_i32 = arith.constant 0 : i32
  %one_i32 = arith.constant 1 : i32
  %ahead_i32 = arith.constant #ahead_i32
  %slots = arith.constant #slots
  %x_slots = func.call @x_slots() : () -> index
  %x_later = arith.constant #x_later
  %yes = arith.constant true
  %no = arith.constant false
  %together = arith.xori %x_later, %yes : i1
  %arrivals_i32 = func.call @arrivals_i32() : () -> i32
  %all_lanes = arith.constant -1 : i32
  %group = func.call @my_group(%thread) : (!thread) -> index
  %warp = func.call @my_copier(%thread) : (!thread) -> index
  scf.if %leads {
    scf.for %slot = %c0 to %slots step %c1 {
      %mbarrier = func.call @copied_mbarrier(%mbarriers, %group, %warp, %slot) : (!mbarriers, index, index, index) -> i32
      func.call @init_mbarrier(%mbarrier, %arrivals_i32) : (i32, i32) -> ()
    }
  }
  nvvm.bar.warp.sync %all_lanes : i32
  scf.for %step = %zero_i32 to %ahead_i32 step %one_i32 : i32 {
    %slot = arith.index_castui %step : i32 to index
    %rows_on = arith.muli %step, %stride : i32
    %row = arith.addi %first, %rows_on : i32  // without sets
    // with sets: %row_k = arith.addi %first, %rows_on : i32
    // with sets: %row = func.call @kth_row(%thread, %row_k) : (!thread, i32) -> i32
    %live = arith.cmpi sle, %row, %last : i32
    %row_in = arith.minsi %row, %last : i32
    %row_index = arith.index_castui %row_in : i32 to index
    %fetches = arith.andi %leads, %live : i1
    %has_x = arith.cmpi ult, %slot, %x_slots : index
    %has_x_apart = arith.andi %has_x, %x_later : i1
    scf.if %fetches {
      func.call @fetch_in_bulk(%yes, %together, %thread, %row_index, %cells, %slot, %dy, %x, %dy_rows, %x_rows, %mbarriers)
          : (i1, i1, !thread, index, index, index, !dy_lines, !x_lines, !dy_room, !x_room, !mbarriers) -> ()
      scf.if %has_x_apart {
        func.call @fetch_in_bulk(%no, %yes, %thread, %row_index, %cells, %slot, %dy, %x, %dy_rows, %x_rows, %mbarriers)
            : (i1, i1, !thread, index, index, index, !dy_lines, !x_lines, !dy_room, !x_room, !mbarriers) -> ()
      }
    }
  }
  func.call @zero_room(%thread, %dy_rows, %x_rows) : (!thread, !dy_room, !x_room) -> ()
  return
}

// Nothing: rows are copied above, and refilled in place.
func.func private @fetch_first_chunk(%k: index, %thread: !thread, %row: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room) {
  return
}

func.func private @fetch_ahead(%thread: !thread, %row: index, %live: i1, %slot: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room) {
  return
}

// Rows are waited for by @await_row.
func.func private @await_first_copies() {
  return
}

func.func private @await_last_copies() {
  return
}

// Where a row begins: its slot, and how far behind the begin of a subgroup's part of it, for dy and for x.
func.func private @row_begin(%row: i32, %slot: index, %thread: !thread) -> !begin {
  %warp = func.call @my_copier(%thread) : (!thread) -> index
  %part = func.call @my_part(%thread) : (!thread) -> index
  %shift = func.call @my_shift(%thread) : (!thread) -> index
  %dy_of_line = func.call @dy_in_line() : () -> index
  %x_of_line = func.call @x_in_line() : () -> index
  %dy_pitch = arith.constant #dy_pitch
  %x_pitch = arith.constant #x_pitch
  %dy_from = func.call @slot_offset(%row, %part, %warp, %shift, %dy_of_line, %dy_pitch) : (i32, index, index, index, index, index) -> index
  %x_from = func.call @slot_offset(%row, %part, %warp, %shift, %x_of_line, %x_pitch) : (i32, index, index, index, index, index) -> index
  %row_index = arith.index_castui %row : i32 to index
  %where = vector.from_elements %slot, %dy_from, %x_from, %row_index : !begin
  return %where : !begin
}

// Chunk k of dy and of x, and zeros where the row has none.
func.func private @fetched_chunk(%k: index, %thread: !thread, %where: !begin, %has_row: i1, %again: i1, %dy_rows: !dy_room, %x_rows: !x_room) -> (!dy_chunk, !x_chunk) {
  %slot = vector.extract %where[0] : index from !begin
  %dy_from = vector.extract %where[1] : index from !begin
  %x_from = vector.extract %where[2] : index from !begin
  %group = func.call @my_group(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  func.call @meet(%k) : (index) -> ()
  %dy_at = arith.addi %dy_from, %col : index
  %x_at = arith.addi %x_from, %col : index
  %dy_k = "vector.load"(%dy_rows, %slot, %group, %dy_at) <{alignment = #dy_chunk_bytes}> : (!dy_room, index, index, index) -> !dy_chunk
  %slot_of_x = func.call @x_slot(%slot) : (index) -> index
  %x_k = "vector.load"(%x_rows, %slot_of_x, %group, %x_at) <{alignment = #x_chunk_bytes}> : (!x_room, index, index, index) -> !x_chunk
  return %dy_k, %x_k : !dy_chunk, !x_chunk
}

// Only threads that copy for themselves refill chunk by chunk.
func.func private @refill_chunk(%k: index, %thread: !thread, %row: index, %live: i1, %slot: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room) {
  return
}

// A slot with columns of a row ahead, once a row's dx is stored: the subgroup has read what was there. If x is copied
// later, x of the next row takes the place of this row's, and dy of the row ahead follows.
func.func private @refill_row(%thread: !thread, %rows_ahead: !rows_ahead, %are_live: !are_live, %cells: index, %slot: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room, %mbarriers: !mbarriers) {
  %warp = func.call @my_copier(%thread) : (!thread) -> index
  %part = func.call @my_part(%thread) : (!thread) -> index
  %shift = func.call @my_shift(%thread) : (!thread) -> index
  %leads = func.call @leads(%thread) : (!thread) -> i1
  %row_ahead = vector.extract %rows_ahead[0] : index from !rows_ahead
  %row_next = vector.extract %rows_ahead[1] : index from !rows_ahead
  %is_live = vector.extract %are_live[0] : i1 from !are_live
  %next_is_live = vector.extract %are_live[1] : i1 from !are_live
  %x_later = arith.constant #x_later
  %yes = arith.constant true
  %no = arith.constant false
  %all_lanes = arith.constant -1 : i32
  func.call @stored_before_copies(%part, %warp, %shift, %dy_rows) : (index, index, index, !dy_room) -> ()
  nvvm.bar.warp.sync %all_lanes : i32
  %fetches = arith.andi %leads, %is_live : i1
  scf.if %x_later {
    %slot_next = func.call @slot_after(%slot) : (index) -> index
    %fetches_x = arith.andi %leads, %next_is_live : i1
    scf.if %fetches_x {
      func.call @fetch_in_bulk(%no, %yes, %thread, %row_next, %cells, %slot_next, %dy, %x, %dy_rows, %x_rows, %mbarriers)
          : (i1, i1, !thread, index, index, index, !dy_lines, !x_lines, !dy_room, !x_room, !mbarriers) -> ()
    }
    scf.if %fetches {
      func.call @fetch_in_bulk(%yes, %no, %thread, %row_ahead, %cells, %slot, %dy, %x, %dy_rows, %x_rows, %mbarriers)
          : (i1, i1, !thread, index, index, index, !dy_lines, !x_lines, !dy_room, !x_room, !mbarriers) -> ()
    }
  } else {
    scf.if %fetches {
      func.call @fetch_in_bulk(%yes, %yes, %thread, %row_ahead, %cells, %slot, %dy, %x, %dy_rows, %x_rows, %mbarriers)
          : (i1, i1, !thread, index, index, index, !dy_lines, !x_lines, !dy_room, !x_room, !mbarriers) -> ()
    }
  }
  return
}

// Nothing moves: another slot is used.
func.func private @take_next_chunk(%k: index, %dy_rows: !dy_room, %x_rows: !x_room) {
  return
}

// The phases of a slot's mbarrier have parity 0 and 1 alternately.
func.func private @parity_after(%slot_next: index, %parity: i32) -> i32 {
  %c0 = arith.constant 0 : index
  %wraps = arith.cmpi eq, %slot_next, %c0 : index
  %wraps_i32 = arith.extui %wraps : i1 to i32
  %flipped = arith.xori %parity, %wraps_i32 : i32
  return %flipped : i32
}
