// Rows that each thread loads into registers when they are used (any GPU). Other workgroups keep memory busy meanwhile.

// What a NormSpec and a Schedule decide.
!dy = bf16
!x = bf16
#chunks = 1 : index
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
!dy_room = memref<1x!dy_chunk, #gpu.address_space<private>>
!x_room = memref<1x!x_chunk, #gpu.address_space<private>>

func.func private @my_part(!thread) -> index
func.func private @column(index, !thread) -> (index, i1)
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

// Registers of a row.
func.func private @room_for_rows(%dy_bytes: !dy_bytes, %x_bytes: !x_bytes, %dy: !dy_lines, %x: !x_lines) -> (!dy_room, !x_room) {
  %dy_rows = memref.alloca() : !dy_room
  %x_rows = memref.alloca() : !x_room
  return %dy_rows, %x_rows : !dy_room, !x_room
}

// Nothing: rows are loaded when they are used.
func.func private @fetch_first_rows(%thread: !thread, %leads: i1, %first: i32, %last: i32, %stride: i32, %cells: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room, %mbarriers: !mbarriers) {
  return
}

func.func private @fetch_first_chunk(%k: index, %thread: !thread, %row: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room) {
  return
}

// The row: no steps ahead.
func.func private @fetch_ahead(%thread: !thread, %row: index, %live: i1, %slot: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %chunks = arith.constant #chunks
  %part = func.call @my_part(%thread) : (!thread) -> index
  scf.for %k = %c0 to %chunks step %c1 {
    %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
    %col_in = arith.select %inside, %col, %c0 : index
    %at_in = arith.addi %part, %col_in : index
    // with strides: %dy_strided = func.call @row_of_dy(%dy, %row) : (!dy_lines, index) -> !dy_lines
    // with strides: %x_strided = func.call @row_of_x(%x, %row) : (!x_lines, index) -> !x_lines
    %dy_k = vector.load %dy[%row, %at_in] : !dy_lines, !dy_chunk
    %x_k = vector.load %x[%row, %at_in] : !x_lines, !x_chunk
    memref.store %dy_k, %dy_rows[%k] : !dy_room
    memref.store %x_k, %x_rows[%k] : !x_room
  } {llvm.loop_annotation = #unrolled}
  return
}

// Only copies are waited for.
func.func private @await_first_copies() {
  return
}

func.func private @await_row(%thread: !thread, %row: i32, %last: i32, %where: !begin, %parity: i32, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room, %mbarriers: !mbarriers) {
  return
}

func.func private @await_last_copies() {
  return
}

// Where a row begins: there are no slots.
func.func private @row_begin(%row: i32, %slot: index, %thread: !thread) -> !begin {
  %c0 = arith.constant 0 : index
  %row_index = arith.index_castui %row : i32 to index
  %where = vector.from_elements %slot, %c0, %c0, %row_index : !begin
  return %where : !begin
}

// Chunk k of dy and of x, and zeros where the row has none.
func.func private @fetched_chunk(%k: index, %thread: !thread, %where: !begin, %has_row: i1, %again: i1, %dy_rows: !dy_room, %x_rows: !x_room) -> (!dy_chunk, !x_chunk) {
  %zero_dy = arith.constant dense<0.0> : !dy_chunk
  %zero_x = arith.constant dense<0.0> : !x_chunk
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %dy_mine = memref.load %dy_rows[%k] : !dy_room
  %x_mine = memref.load %x_rows[%k] : !x_room
  %counts = arith.andi %inside, %has_row : i1
  %dy_in = arith.select %counts, %dy_mine, %zero_dy : !dy_chunk
  %x_in = arith.select %counts, %x_mine, %zero_x : !x_chunk
  return %dy_in, %x_in : !dy_chunk, !x_chunk
}

// Nothing is refilled.
func.func private @refill_chunk(%k: index, %thread: !thread, %row: index, %live: i1, %slot: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room) {
  return
}

func.func private @refill_row(%thread: !thread, %rows_ahead: !rows_ahead, %are_live: !are_live, %cells: index, %slot: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room, %mbarriers: !mbarriers) {
  return
}

// Nothing moves.
func.func private @take_next_chunk(%k: index, %dy_rows: !dy_room, %x_rows: !x_room) {
  return
}

// There are no mbarriers of copies.
func.func private @parity_after(%slot_next: index, %parity: i32) -> i32 {
  return %parity : i32
}
