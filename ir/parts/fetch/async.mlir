// Rows that each thread copies into shared memory chunk by chunk, some steps ahead (cp.async, NVIDIA since sm_80). It waits
// for its own copies, a group of them for each row, so there is no barrier. README.md draws the slots.
//
// In place, with as many slots as steps ahead, a chunk is copied once its dx is stored, to where it was: @refill_chunk.
// With one slot, each chunk is a group of copies, and is waited for alone (@apart).

// What a NormSpec and a Schedule decide.
!dy = bf16
!x = bf16
#chunks = 1 : index
#copied = 8 : index
#ahead_i32 = 2 : i32
#dy_chunk_bytes = 16 : i64
#x_chunk_bytes = 16 : i64
#pending_i32 = 2 : i32
#pending_first_i32 = 1 : i32
!dy_lines = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>
!x_lines = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!dy_bytes = memref<24576xi8, #gpu.address_space<workgroup>>
!x_bytes = memref<24576xi8, #gpu.address_space<workgroup>>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
!dy_chunk = vector<8x!dy>
!x_chunk = vector<8x!x>
#unrolled = #llvm.loop_annotation<unroll = <full = true>>
!thread = vector<9xindex>
!begin = vector<4xindex>
!rows_ahead = vector<2xindex>
!are_live = vector<2xi1>
!dy_room = memref<3x1x4096x!dy, #gpu.address_space<workgroup>>
!x_room = memref<3x1x4096x!x, #gpu.address_space<workgroup>>

func.func private @my_part(!thread) -> index
func.func private @my_group(!thread) -> index
func.func private @my_shift(!thread) -> index
func.func private @column(index, !thread) -> (index, i1)
func.func private @copied_elements(i1, index, index, index) -> index
func.func private @cell_address(index, index, index) -> (index, index)
func.func private @apart() -> i1
func.func private @in_place() -> i1
func.func private @meet(index)
func.func private @await_copies(i32)
func.func private @masked(!dy_chunk, !x_chunk, index, index, index) -> (!dy_chunk, !x_chunk)
func.func private @kth_row(!thread, i32) -> i32
// with policies: func.func private @copy_lasting_of_dy(!dy_lines, !dy_room, index, index, index, index, index, index, index, index, i64, i32)
// with policies: func.func private @copy_lasting_of_x(!x_lines, !x_room, index, index, index, index, index, index, index, index, i64, i32)
// End of what is replaced.

// Whether subgroups copy rows together.
func.func private @in_bulk() -> i1 {
  %no = arith.constant false
  return %no : i1
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

// A chunk of dy and of x to a slot, or zeros if the row has none. MLIR does not inline what has these operations, so
// linking.py puts the text of such functions where they are called. Copies of less than 16 bytes pass through the L1
// cache. The cache has the memory that shared memory leaves, so more slots may slow such copies down.
func.func private @copy_chunk(%k: index, %thread: !thread, %row: index, %live: i1, %slot: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room) {
  %part = func.call @my_part(%thread) : (!thread) -> index
  %group = func.call @my_group(%thread) : (!thread) -> index
  %shift = func.call @my_shift(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %at = arith.addi %part, %col : index
  %exists = arith.andi %inside, %live : i1
  %size = func.call @copied_elements(%exists, %k, %at, %shift) : (i1, index, index, index) -> index
  %line, %in_line = func.call @cell_address(%row, %part, %col) : (index, index, index) -> (index, index)
  // with strides: %dy_strided = func.call @row_of_dy(%dy, %row) : (!dy_lines, index) -> !dy_lines
  // with strides: %x_strided = func.call @row_of_x(%x, %row) : (!x_lines, index) -> !x_lines
  // with policies: %chunk = arith.constant #copied
  // with policies: %c0 = arith.constant 0 : index
  // with policies: %place, %has_chunk = func.call @column(%c0, %thread) : (index, !thread) -> (index, i1)
  // with policies: %beyond = arith.subi %col, %place : index
  // with policies: %m = vector.extract %thread[13] : index from !thread
  // with policies: %m_i32 = arith.index_castui %m : index to i32
  %dy_copy = "nvgpu.device_async_copy"(%dy_rows, %slot, %group, %col, %dy, %line, %in_line, %size)  // without policies
      <{dstElements = #copied, operandSegmentSizes = array<i32: 1, 3, 1, 2, 1>}>  // without policies
      : (!dy_room, index, index, index, !dy_lines, index, index, index) -> !nvgpu.device.async.token  // without policies
  // with policies: %dy_bytes = arith.constant #dy_chunk_bytes
  // with policies: func.call @copy_lasting_of_dy(%dy, %dy_rows, %line, %in_line, %slot, %group, %place, %beyond, %size, %chunk, %dy_bytes, %m_i32)
  // with policies:     : (!dy_lines, !dy_room, index, index, index, index, index, index, index, index, i64, i32) -> ()
  %x_copy = "nvgpu.device_async_copy"(%x_rows, %slot, %group, %col, %x, %line, %in_line, %size)  // without policies
      <{dstElements = #copied, operandSegmentSizes = array<i32: 1, 3, 1, 2, 1>}>  // without policies
      : (!x_room, index, index, index, !x_lines, index, index, index) -> !nvgpu.device.async.token  // without policies
  // with policies: %x_bytes = arith.constant #x_chunk_bytes
  // with policies: func.call @copy_lasting_of_x(%x, %x_rows, %line, %in_line, %slot, %group, %place, %beyond, %size, %chunk, %x_bytes, %m_i32)
  // with policies:     : (!x_lines, !x_room, index, index, index, index, index, index, index, index, i64, i32) -> ()
  return
}

// The first rows, before anything else: they are on their way while statistics are read.
func.func private @fetch_first_rows(%thread: !thread, %leads: i1, %first: i32, %last: i32, %stride: i32, %cells: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room, %mbarriers: !mbarriers) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %zero_i32 = arith.constant 0 : i32
  %one_i32 = arith.constant 1 : i32
  %chunks = arith.constant #chunks
  %ahead_i32 = arith.constant #ahead_i32
  %apart = func.call @apart() : () -> i1
  scf.for %step = %zero_i32 to %ahead_i32 step %one_i32 : i32 {
    %slot = arith.index_castui %step : i32 to index
    %rows_on = arith.muli %step, %stride : i32
    %row = arith.addi %first, %rows_on : i32  // without sets
    // with sets: %row_k = arith.addi %first, %rows_on : i32
    // with sets: %row = func.call @kth_row(%thread, %row_k) : (!thread, i32) -> i32
    %live = arith.cmpi sle, %row, %last : i32
    %row_in = arith.minsi %row, %last : i32
    %row_index = arith.index_castui %row_in : i32 to index
    scf.for %k = %c0 to %chunks step %c1 {
      func.call @copy_chunk(%k, %thread, %row_index, %live, %slot, %dy, %x, %dy_rows, %x_rows)
          : (index, !thread, index, i1, index, !dy_lines, !x_lines, !dy_room, !x_room) -> ()
      scf.if %apart {
        nvvm.cp.async.commit.group
      }
    } {llvm.loop_annotation = #unrolled}
    scf.if %apart {
    } else {
      nvvm.cp.async.commit.group
    }
  }
  return
}

// Nothing: rows are copied above.
func.func private @fetch_first_chunk(%k: index, %thread: !thread, %row: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room) {
  return
}

// A row ahead, unless a slot is refilled in place; then waits for the row that is used.
func.func private @fetch_ahead(%thread: !thread, %row: index, %live: i1, %slot: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %chunks = arith.constant #chunks
  %in_place = func.call @in_place() : () -> i1
  %apart = func.call @apart() : () -> i1
  scf.if %in_place {
  } else {
    scf.for %k = %c0 to %chunks step %c1 {
      func.call @copy_chunk(%k, %thread, %row, %live, %slot, %dy, %x, %dy_rows, %x_rows)
          : (index, !thread, index, i1, index, !dy_lines, !x_lines, !dy_room, !x_room) -> ()
    } {llvm.loop_annotation = #unrolled}
    nvvm.cp.async.commit.group
  }
  scf.if %apart {
  } else {
    "nvvm.cp.async.wait.group"() <{n = #pending_i32}> : () -> ()
  }
  return
}

// The first row, where its sums are sent before the walk.
func.func private @await_first_copies() {
  "nvvm.cp.async.wait.group"() <{n = #pending_first_i32}> : () -> ()
  return
}

// Nothing: @fetch_ahead has waited for the row.
func.func private @await_row(%thread: !thread, %row: i32, %last: i32, %where: !begin, %parity: i32, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room, %mbarriers: !mbarriers) {
  return
}

// Those of rows that there are not.
func.func private @await_last_copies() {
  nvvm.cp.async.wait.group 0
  return
}

// Where a row begins: with its slot.
func.func private @row_begin(%row: i32, %slot: index, %thread: !thread) -> !begin {
  %c0 = arith.constant 0 : index
  %row_index = arith.index_castui %row : i32 to index
  %where = vector.from_elements %slot, %c0, %c0, %row_index : !begin
  return %where : !begin
}

// Chunk k of dy and of x, and zeros where the row has none. The first time, it waits for its own copies alone (@apart), so
// that memory is busy while the first chunks are summed.
func.func private @fetched_chunk(%k: index, %thread: !thread, %where: !begin, %has_row: i1, %again: i1, %dy_rows: !dy_room, %x_rows: !x_room) -> (!dy_chunk, !x_chunk) {
  %c1 = arith.constant 1 : index
  %yes = arith.constant true
  %chunks = arith.constant #chunks
  %slot = vector.extract %where[0] : index from !begin
  %group = func.call @my_group(%thread) : (!thread) -> index
  %part = func.call @my_part(%thread) : (!thread) -> index
  %shift = func.call @my_shift(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  func.call @meet(%k) : (index) -> ()
  %apart = func.call @apart() : () -> i1
  %is_first = arith.xori %again, %yes : i1
  %awaits = arith.andi %apart, %is_first : i1
  scf.if %awaits {
    %last_chunk = arith.subi %chunks, %c1 : index
    %behind = arith.subi %last_chunk, %k : index
    %behind_i32 = arith.index_castui %behind : index to i32
    func.call @await_copies(%behind_i32) : (i32) -> ()
  }
  %dy_copied = "vector.load"(%dy_rows, %slot, %group, %col) <{alignment = #dy_chunk_bytes}> : (!dy_room, index, index, index) -> !dy_chunk
  %x_copied = "vector.load"(%x_rows, %slot, %group, %col) <{alignment = #x_chunk_bytes}> : (!x_room, index, index, index) -> !x_chunk
  %at = arith.addi %part, %col : index
  %dy_k, %x_k = func.call @masked(%dy_copied, %x_copied, %k, %at, %shift)
      : (!dy_chunk, !x_chunk, index, index, index) -> (!dy_chunk, !x_chunk)
  return %dy_k, %x_k : !dy_chunk, !x_chunk
}

// Chunk k of a row ahead to where this row's was, in place: its dx is stored.
func.func private @refill_chunk(%k: index, %thread: !thread, %row: index, %live: i1, %slot: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room) {
  %in_place = func.call @in_place() : () -> i1
  %apart = func.call @apart() : () -> i1
  scf.if %in_place {
    func.call @copy_chunk(%k, %thread, %row, %live, %slot, %dy, %x, %dy_rows, %x_rows)
        : (index, !thread, index, i1, index, !dy_lines, !x_lines, !dy_room, !x_room) -> ()
    scf.if %apart {
      nvvm.cp.async.commit.group
    }
  }
  return
}

// Copies in place are a group, once all are made.
func.func private @refill_row(%thread: !thread, %rows_ahead: !rows_ahead, %are_live: !are_live, %cells: index, %slot: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room, %mbarriers: !mbarriers) {
  %in_place = func.call @in_place() : () -> i1
  %apart = func.call @apart() : () -> i1
  scf.if %in_place {
    scf.if %apart {
    } else {
      nvvm.cp.async.commit.group
    }
  }
  return
}

// Nothing moves: another slot is used.
func.func private @take_next_chunk(%k: index, %dy_rows: !dy_room, %x_rows: !x_room) {
  return
}

// There are no mbarriers of copies.
func.func private @parity_after(%slot_next: index, %parity: i32) -> i32 {
  return %parity : i32
}
