// Which of a row's columns a thread owns, and which slot of shared memory comes after another.

// What a NormSpec and a Schedule decide.
#columns = 4096 : index
#own_columns = 4096 : index
#vector = 8 : index
#chunks = 1 : index
#threads = 512 : index
#subgroup = 32 : index
#slots = 3 : index
!thread = vector<9xindex>

func.func private @my_t(!thread) -> index
func.func private @my_part(!thread) -> index
func.func private @my_shift(!thread) -> index
func.func private @parts_alike() -> i1
func.func private @in_bulk() -> i1
func.func private @in_place() -> i1
// End of what is replaced.

// The first column of a thread's chunk k, of the workgroup's columns, and whether these have that chunk. The last workgroup of a cluster may have fewer columns. Columns are counted from the
// first chunk on, which may begin some elements before the row.
func.func private @column(%k: index, %thread: !thread) -> (index, i1) {
  %t = func.call @my_t(%thread) : (!thread) -> index
  %part = func.call @my_part(%thread) : (!thread) -> index
  %shift = func.call @my_shift(%thread) : (!thread) -> index
  %n_all = arith.constant #columns
  %all = arith.addi %n_all, %shift : index
  %n = arith.constant #own_columns
  %alike = func.call @parts_alike() : () -> i1
  %v = arith.constant #vector
  %t_count = arith.constant #threads
  %in_bulk = func.call @in_bulk() : () -> i1
  %lanes = arith.constant #subgroup
  %chunks = arith.constant #chunks
  %lane = arith.remui %t, %lanes : index
  %warp = arith.divui %t, %lanes : index
  %of_warp = arith.muli %chunks, %lanes : index
  %warps_before = arith.muli %warp, %of_warp overflow<nsw, nuw> : index
  %first_of_lane = arith.addi %warps_before, %lane overflow<nsw, nuw> : index
  %lines_before = arith.muli %k, %lanes : index
  %of_subgroup = arith.addi %lines_before, %first_of_lane overflow<nsw, nuw> : index
  %before = arith.muli %k, %t_count : index
  %of_group = arith.addi %before, %t : index
  %chunk = arith.select %in_bulk, %of_subgroup, %of_group : index
  %col = arith.muli %chunk, %v overflow<nsw, nuw> : index
  %at = arith.addi %part, %col : index
  %in_row = arith.cmpi ult, %at, %all : index
  %exists = arith.ori %alike, %in_row : i1
  %in_part = arith.cmpi ult, %col, %n : index
  %inside = arith.andi %in_part, %exists : i1
  return %col, %inside : index, i1
}

// Whether an element of a chunk is one of a span.
func.func private @is_within(%e: index, %from: index, %below: index) -> i1 {
  %begun = arith.cmpi uge, %e, %from : index
  %goes_on = arith.cmpi ult, %e, %below : index
  %within = arith.andi %begun, %goes_on : i1
  return %within : i1
}

// The slot of shared memory after this one: they are used one after the other.
func.func private @slot_after(%slot: index) -> index {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %slots = arith.constant #slots
  %after = arith.addi %slot, %c1 : index
  %wraps = arith.cmpi eq, %after, %slots : index
  %wrapped = arith.select %wraps, %c0, %after : index
  return %wrapped : index
}

// The slot that a row is in, if this one is filled next: in place, the same.
func.func private @slot_in_use(%fill: index) -> index {
  %in_place = func.call @in_place() : () -> i1
  %after = func.call @slot_after(%fill) : (index) -> index
  %slot = arith.select %in_place, %fill, %after : index
  return %slot : index
}
