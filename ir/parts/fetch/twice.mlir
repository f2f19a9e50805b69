// Rows that each thread loads for their sums, and once more for dx (any GPU): only the caches keep a row. Rows are so wide
// that a thread's registers have room for the sums of its columns, and for little else.

// What a NormSpec and a Schedule decide.
!dy = bf16
!x = bf16
!dy_lines = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>
!x_lines = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>
!dy_bytes = memref<24576xi8, #gpu.address_space<workgroup>>
!x_bytes = memref<24576xi8, #gpu.address_space<workgroup>>
!mbarriers = memref<2xi64, #gpu.address_space<workgroup>>
!dy_chunk = vector<8x!dy>
!x_chunk = vector<8x!x>
!thread = vector<9xindex>
!begin = vector<4xindex>
!rows_ahead = vector<2xindex>
!are_live = vector<2xi1>
!dy_room = memref<?x4096x!dy, #hal.descriptor_type<storage_buffer>>
!x_room = memref<?x4096x!x, #hal.descriptor_type<storage_buffer>>

func.func private @my_part(!thread) -> index
func.func private @my_shift(!thread) -> index
func.func private @column(index, !thread) -> (index, i1)
func.func private @load_cells_of_dy(!dy_room, index, index, index, index, i1, index) -> !dy_chunk
func.func private @load_cells_of_x(!x_room, index, index, index, index, i1, index) -> !x_chunk
// End of what is replaced.

// Whether subgroups copy rows together.
func.func private @in_bulk() -> i1 {
  %no = arith.constant false
  return %no : i1
}

// Whether rows are loaded once more for dx.
func.func private @loads_twice() -> i1 {
  %yes = arith.constant true
  return %yes : i1
}

// Where they are: in memory.
func.func private @room_for_rows(%dy_bytes: !dy_bytes, %x_bytes: !x_bytes, %dy: !dy_lines, %x: !x_lines) -> (!dy_room, !x_room) {
  return %dy, %x : !dy_room, !x_room
}

// Nothing: rows are loaded when they are used.
func.func private @fetch_first_rows(%thread: !thread, %leads: i1, %first: i32, %last: i32, %stride: i32, %cells: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room, %mbarriers: !mbarriers) {
  return
}

func.func private @fetch_first_chunk(%k: index, %thread: !thread, %row: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room) {
  return
}

func.func private @fetch_ahead(%thread: !thread, %row: index, %live: i1, %slot: index, %dy: !dy_lines, %x: !x_lines, %dy_rows: !dy_room, %x_rows: !x_room) {
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

// Where a row begins: in memory.
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
  %row = vector.extract %where[3] : index from !begin
  %part = func.call @my_part(%thread) : (!thread) -> index
  %shift = func.call @my_shift(%thread) : (!thread) -> index
  %col, %inside = func.call @column(%k, %thread) : (index, !thread) -> (index, i1)
  %exists = arith.andi %inside, %has_row : i1
  %dy_read = func.call @load_cells_of_dy(%dy_rows, %row, %k, %part, %col, %exists, %shift)
      : (!dy_room, index, index, index, index, i1, index) -> !dy_chunk
  %x_read = func.call @load_cells_of_x(%x_rows, %row, %k, %part, %col, %exists, %shift)
      : (!x_room, index, index, index, index, i1, index) -> !x_chunk
  %dy_k = arith.select %exists, %dy_read, %zero_dy : !dy_chunk
  %x_k = arith.select %exists, %x_read, %zero_x : !x_chunk
  return %dy_k, %x_k : !dy_chunk, !x_chunk
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
