// The rows of workgroups that walk, on their way to shared memory (NVIDIA since sm_90; math/bulk.mlir).
//
// The rows that the groups of a workgroup have next are one piece of memory. One thread copies it into a slot. So rows come
// while others are summed up and stored, and take no registers. A copy begins with a whole access. Its address in shared
// memory has the same rest by 128 bytes as its address in memory: such copies are the fastest.

// What a NormSpec and a Schedule decide.
!x = bf16
#columns = 4096 : index
#forward_columns = 4096 : index
#forward_vector = 8 : index
#forward_chunks = 2 : index
#forward_rows = 1 : index
#forward_slots = 1 : index
#forward_lasts = true
#forward_accesses = 1 : index
#forward_copies_again = false
#forward_line = 64 : index      // elements of 128 bytes
#forward_x_of_16 = 8 : index
#forward_copies_first = 0 : index  // the first mbarrier of copies
!forward_x_rows = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!forward_staged = memref<1x1x8x!x, #gpu.address_space<workgroup>>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
!forward_x = vector<8x!x>
!forward_x_held = memref<2x!forward_x, #gpu.address_space<private>>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
!forward_thread = vector<8xindex>

func.func private @my_id(!forward_thread) -> index
func.func private @my_row(!forward_thread) -> index
func.func private @my_part(!forward_thread) -> index
func.func private @my_round(!forward_thread) -> index
func.func private @my_set(!forward_thread) -> index
func.func private @mbarrier(!mbarriers, index) -> i32
func.func private @init_mbarrier(i32, i32)
func.func private @expect(i32, i32)
func.func private @await(i32, i32)
func.func private @copy_in_bulk_of_x(!forward_x_rows, !forward_staged, index, index, index, index, index, index, i32, i1)
func.func private @access_number_of_x(!forward_x_rows, index, index, index, index) -> index
func.func private @column(index, index, !forward_thread) -> (index, i1)
func.func private @has_access(index, index, index, i1) -> i1
func.func private @read_edge_of_x(!forward_x_rows, !forward_x, index, index, index, !forward_x_held)
// End of what is replaced.

// The mbarrier of a slot.
func.func private @copied(%mbarriers: !mbarriers, %slot: index) -> i32 {
  %first = arith.constant #forward_copies_first
  %which = arith.addi %first, %slot : index
  %mbarrier = func.call @mbarrier(%mbarriers, %which) : (!mbarriers, index) -> i32
  return %mbarrier : i32
}

func.func private @begin_copies(%mbarriers: !mbarriers, %thread: !forward_thread) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %slots = arith.constant #forward_slots
  %one_i32 = arith.constant 1 : i32
  %id = func.call @my_id(%thread) : (!forward_thread) -> index
  %leads = arith.cmpi eq, %id, %c0 : index
  scf.if %leads {
    scf.for %slot = %c0 to %slots step %c1 {
      %mbarrier = func.call @copied(%mbarriers, %slot) : (!mbarriers, index) -> i32
      func.call @init_mbarrier(%mbarrier, %one_i32) : (i32, i32) -> ()
    } {llvm.loop_annotation = #unrolled}
  }
  gpu.barrier
  return
}

// The first access that a workgroup has of a set of rows, and where it is in a slot. The product may wrap around: a line
// has a power of 2 of elements.
func.func private @first_copied(%x: !forward_x_rows, %set_first: index, %part: index) -> (index, index) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %v = arith.constant #forward_vector
  %of_line = arith.constant #forward_line
  %first = func.call @access_number_of_x(%x, %set_first, %c0, %part, %c1) : (!forward_x_rows, index, index, index, index) -> index
  %element = arith.muli %first, %v : index
  %element_i32 = arith.index_castui %element : index to i32
  %of_line_i32 = arith.index_castui %of_line : index to i32
  %place_i32 = arith.remui %element_i32, %of_line_i32 : i32
  %place = arith.index_castui %place_i32 : i32 to index
  return %first, %place : index, index
}

// Copies a workgroup's columns of the set of rows that begins with the thread's, of a round, if there are any. The last
// elements of a tensor, behind its last whole access, are not copied.
func.func private @copy_row(%x: !forward_x_rows, %staged: !forward_staged, %mbarriers: !mbarriers, %m: index, %thread: !forward_thread) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %n = arith.constant #columns
  %v = arith.constant #forward_vector
  %own = arith.constant #forward_columns
  %rows = arith.constant #forward_rows
  %accesses = arith.constant #forward_accesses
  %lasts = arith.constant #forward_lasts
  %slots = arith.constant #forward_slots
  %of_16 = arith.constant #forward_x_of_16
  %id = func.call @my_id(%thread) : (!forward_thread) -> index
  %row = func.call @my_row(%thread) : (!forward_thread) -> index
  %part = func.call @my_part(%thread) : (!forward_thread) -> index
  %round = func.call @my_round(%thread) : (!forward_thread) -> index
  %is_there = arith.cmpi ult, %row, %m : index
  %leads = arith.cmpi eq, %id, %c0 : index
  %copies = arith.andi %is_there, %leads : i1
  scf.if %copies {
    %slot = arith.remui %round, %slots : index
    %mbarrier = func.call @copied(%mbarriers, %slot) : (!mbarriers, index) -> i32
    %first, %place = func.call @first_copied(%x, %row, %part) : (!forward_x_rows, index, index) -> (index, index)
    %rows_end = arith.addi %row, %rows : index
    %rows_end_in = arith.minui %rows_end, %m : index
    %last = arith.subi %rows_end_in, %c1 : index
    %part_end = arith.addi %part, %own : index
    %columns_end = arith.minui %part_end, %n : index
    %before_last = arith.muli %last, %n : index
    %end_element = arith.addi %before_last, %columns_end : index
    %end_row = arith.ceildivui %end_element, %v : index
    %on = arith.subi %accesses, %c1 : index
    %end = arith.addi %end_row, %on : index
    %elements = arith.muli %m, %n : index
    %all = arith.divui %elements, %v : index
    %end_in = arith.minui %end, %all : index
    %count = arith.subi %end_in, %first : index
    %copied = arith.muli %count, %v : index
    %from = arith.muli %first, %v : index
    %unit = arith.constant 16 : index
    %sixteens = arith.divui %copied, %of_16 : index
    %bytes = arith.muli %sixteens, %unit : index
    %bytes_i32 = arith.index_castui %bytes : index to i32
    func.call @expect(%mbarrier, %bytes_i32) : (i32, i32) -> ()
    func.call @copy_in_bulk_of_x(%x, %staged, %from, %copied, %of_16, %slot, %c0, %place, %mbarrier, %lasts)
        : (!forward_x_rows, !forward_staged, index, index, index, index, index, index, i32, i1) -> ()
  }
  return
}

// One of a chunk's accesses, from a thread's slot.
func.func private @copied_access(%x: !forward_x_rows, %staged: !forward_staged, %thread: !forward_thread, %k: index, %at: index, %which: index) -> !forward_x {
  %c0 = arith.constant 0 : index
  %v = arith.constant #forward_vector
  %slots = arith.constant #forward_slots
  %row = func.call @my_row(%thread) : (!forward_thread) -> index
  %part = func.call @my_part(%thread) : (!forward_thread) -> index
  %set_first = func.call @my_set(%thread) : (!forward_thread) -> index
  %round = func.call @my_round(%thread) : (!forward_thread) -> index
  %slot = arith.remui %round, %slots : index
  %first, %place = func.call @first_copied(%x, %set_first, %part) : (!forward_x_rows, index, index) -> (index, index)
  %number = func.call @access_number_of_x(%x, %row, %k, %at, %which) : (!forward_x_rows, index, index, index, index) -> index
  %accesses_on = arith.subi %number, %first : index
  %elements_on = arith.muli %accesses_on, %v : index
  %here = arith.addi %place, %elements_on : index
  %read = vector.load %staged[%slot, %c0, %here] : !forward_staged, !forward_x
  return %read : !forward_x
}

// A thread's chunks of its row, once that has come.
func.func private @load_copied(%x: !forward_x_rows, %staged: !forward_staged, %mbarriers: !mbarriers, %thread: !forward_thread, %x_held: !forward_x_held) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  %slots = arith.constant #forward_slots
  %chunks = arith.constant #forward_chunks
  %accesses = arith.constant #forward_accesses
  %no_x = arith.constant dense<0.0> : !forward_x
  %row = func.call @my_row(%thread) : (!forward_thread) -> index
  %part = func.call @my_part(%thread) : (!forward_thread) -> index
  %round = func.call @my_round(%thread) : (!forward_thread) -> index
  %slot = arith.remui %round, %slots : index
  %turns = arith.divui %round, %slots : index
  %phase = arith.remui %turns, %c2 : index
  %parity = arith.index_castui %phase : index to i32
  %mbarrier = func.call @copied(%mbarriers, %slot) : (!mbarriers, index) -> i32
  func.call @await(%mbarrier, %parity) : (i32, i32) -> ()
  scf.for %k = %c0 to %chunks step %c1 {
    %col, %inside = func.call @column(%c0, %k, %thread) : (index, index, !forward_thread) -> (index, i1)
    %at = arith.addi %part, %col : index
    %has_access = func.call @has_access(%row, %col, %at, %inside) : (index, index, index, i1) -> i1
    %col_in = arith.select %has_access, %col, %c0 : index
    %at_in = arith.addi %part, %col_in : index
    scf.for %which = %c0 to %accesses step %c1 {
      %accesses_before = arith.muli %which, %chunks : index
      %place = arith.addi %accesses_before, %k : index
      %x_k = func.call @copied_access(%x, %staged, %thread, %k, %at_in, %which) : (!forward_x_rows, !forward_staged, !forward_thread, index, index, index) -> !forward_x
      memref.store %x_k, %x_held[%place] : !forward_x_held
    } {llvm.loop_annotation = #unrolled}
  } {llvm.loop_annotation = #unrolled}
  scf.for %k = %c0 to %chunks step %c1 {
    %col, %inside = func.call @column(%c0, %k, %thread) : (index, index, !forward_thread) -> (index, i1)
    %at = arith.addi %part, %col : index
    %has_access = func.call @has_access(%row, %col, %at, %inside) : (index, index, index, i1) -> i1
    scf.if %has_access {
      func.call @read_edge_of_x(%x, %no_x, %row, %k, %at, %x_held)
          : (!forward_x_rows, !forward_x, index, index, index, !forward_x_held) -> ()
    }
  } {llvm.loop_annotation = #unrolled}
  return
}

// The accesses that a thread stores, once more, where its chunks are none.
func.func private @load_copied_again(%x: !forward_x_rows, %staged: !forward_staged, %thread: !forward_thread, %x_held: !forward_x_held) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %chunks = arith.constant #forward_chunks
  %rereads = arith.constant #forward_copies_again
  %no_x = arith.constant dense<0.0> : !forward_x
  %row = func.call @my_row(%thread) : (!forward_thread) -> index
  %part = func.call @my_part(%thread) : (!forward_thread) -> index
  scf.if %rereads {
    scf.for %k = %c0 to %chunks step %c1 {
      %col, %inside = func.call @column(%c0, %k, %thread) : (index, index, !forward_thread) -> (index, i1)
      %at = arith.addi %part, %col : index
      %has_access = func.call @has_access(%row, %col, %at, %inside) : (index, index, index, i1) -> i1
      %col_in = arith.select %has_access, %col, %c0 : index
      %at_in = arith.addi %part, %col_in : index
      %place = arith.addi %chunks, %k : index
      %again = func.call @copied_access(%x, %staged, %thread, %k, %at_in, %c1) : (!forward_x_rows, !forward_staged, !forward_thread, index, index, index) -> !forward_x
      memref.store %again, %x_held[%place] : !forward_x_held
      scf.if %has_access {
        func.call @read_edge_of_x(%x, %no_x, %row, %k, %at, %x_held)
            : (!forward_x_rows, !forward_x, index, index, index, !forward_x_held) -> ()
      }
    } {llvm.loop_annotation = #unrolled}
  }
  return
}
