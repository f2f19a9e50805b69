// Numbers that follow from a schedule's, as arithmetic: the compiler folds them.

// What a NormSpec and a Schedule decide.
#columns = 4096 : index
#own_columns = 4096 : index
#cluster = 1 : index
#vector = 8 : index
#dy_bits = 16 : index
#x_bits = 16 : index
#chunks = 1 : index
#threads = 512 : index
#subgroup = 32 : index
#warps = 16 : index
#groups = 1 : index
#ahead_i32 = 2 : i32
#slots = 3 : index
#x_later = false
#buffers = 2 : index

func.func private @in_bulk() -> i1
func.func private @takes_turns() -> i1
// End of what is replaced.

// V.
func.func private @vector_i32() -> i32 {
  %v = arith.constant #vector
  %n = arith.index_castui %v : index to i32
  return %n : i32
}

// T.
func.func private @threads_i32() -> i32 {
  %t = arith.constant #threads
  %n = arith.index_castui %t : index to i32
  return %n : i32
}

// Lanes of a subgroup.
func.func private @subgroup_i32() -> i32 {
  %lanes = arith.constant #subgroup
  %n = arith.index_castui %lanes : index to i32
  return %n : i32
}

// Groups of a subgroup: 1 unless a narrow row has a part of it.
func.func private @subgroup_groups() -> index {
  %c1 = arith.constant 1 : index
  %lanes = arith.constant #subgroup
  %t = arith.constant #threads
  %each = arith.divui %lanes, %t : index
  %groups = arith.maxui %each, %c1 : index
  return %groups : index
}

// Groups of a workgroup.
func.func private @groups_i32() -> i32 {
  %groups = arith.constant #groups
  %n = arith.index_castui %groups : index to i32
  return %n : i32
}

// Whether N is no multiple of V.
func.func private @shifted() -> i1 {
  %c0 = arith.constant 0 : index
  %n = arith.constant #columns
  %v = arith.constant #vector
  %beyond = arith.remui %n, %v : index
  %is = arith.cmpi ne, %beyond, %c0 : index
  return %is : i1
}

// Columns beyond whole chunks: N mod V.
func.func private @beyond_i32() -> i32 {
  %n = arith.constant #columns
  %v = arith.constant #vector
  %beyond = arith.remui %n, %v : index
  %i32 = arith.index_castui %beyond : index to i32
  return %i32 : i32
}

// Whether workgroups share a row.
func.func private @in_clusters() -> i1 {
  %c1 = arith.constant 1 : index
  %cluster = arith.constant #cluster
  %is = arith.cmpi ne, %cluster, %c1 : index
  return %is : i1
}

// Subgroups of a cluster, each of which sends its sums.
func.func private @senders() -> index {
  %cluster = arith.constant #cluster
  %warps = arith.constant #warps
  %senders = arith.muli %cluster, %warps : index
  return %senders : index
}

// Sums that each lane of a subgroup reads of theirs.
func.func private @received() -> index {
  %lanes = arith.constant #subgroup
  %senders = func.call @senders() : () -> index
  %each = arith.ceildivui %senders, %lanes : index
  return %each : index
}

// That each workgroup of a cluster gets of a row: two sums of f32 from each subgroup.
func.func private @sent_bytes() -> i32 {
  %bytes = arith.constant 8 : index
  %senders = func.call @senders() : () -> index
  %sent = arith.muli %senders, %bytes : index
  %n = arith.index_castui %sent : index to i32
  return %n : i32
}

// Whether a workgroup has a single group.
func.func private @one_group() -> i1 {
  %c1 = arith.constant 1 : index
  %groups = arith.constant #groups
  %is = arith.cmpi eq, %groups, %c1 : index
  return %is : i1
}

// Whether T threads are a part of a subgroup.
func.func private @shares_subgroup() -> i1 {
  %t = arith.constant #threads
  %lanes = arith.constant #subgroup
  %is = arith.cmpi ult, %t, %lanes : index
  return %is : i1
}

// Whether all workgroups of a cluster have as many columns.
func.func private @parts_alike() -> i1 {
  %n = arith.constant #columns
  %own = arith.constant #own_columns
  %cluster = arith.constant #cluster
  %all = arith.muli %own, %cluster : index
  %is = arith.cmpi eq, %all, %n : index
  return %is : i1
}

// Whether all threads have all chunks.
func.func private @fills() -> i1 {
  %n = arith.constant #columns
  %cluster = arith.constant #cluster
  %chunks = arith.constant #chunks
  %v = arith.constant #vector
  %t = arith.constant #threads
  %of_thread = arith.muli %chunks, %v : index
  %of_workgroup = arith.muli %of_thread, %t : index
  %all = arith.muli %of_workgroup, %cluster : index
  %is = arith.cmpi eq, %all, %n : index
  return %is : i1
}

// Whether rows are fetched into shared memory.
func.func private @stages() -> i1 {
  %c0 = arith.constant 0 : index
  %slots = arith.constant #slots
  %is = arith.cmpi ne, %slots, %c0 : index
  return %is : i1
}

// Whether slots are as many as steps ahead: one is refilled once its chunk's dx is stored.
func.func private @in_place() -> i1 {
  %ahead_i32 = arith.constant #ahead_i32
  %ahead = arith.index_castui %ahead_i32 : i32 to index
  %slots = arith.constant #slots
  %stages = func.call @stages() : () -> i1
  %as_many = arith.cmpi eq, %slots, %ahead : index
  %is = arith.andi %stages, %as_many : i1
  return %is : i1
}

// Whether chunks are waited for one by one: the only slot is refilled while it is used.
func.func private @apart() -> i1 {
  %yes = arith.constant true
  %c1 = arith.constant 1 : index
  %slots = arith.constant #slots
  %in_bulk = func.call @in_bulk() : () -> i1
  %by_thread = arith.xori %in_bulk, %yes : i1
  %in_place = func.call @in_place() : () -> i1
  %one = arith.cmpi eq, %slots, %c1 : index
  %one_in_place = arith.andi %one, %in_place : i1
  %is = arith.andi %one_in_place, %by_thread : i1
  return %is : i1
}

// Rows of x that shared memory holds.
func.func private @x_slots() -> index {
  %c1 = arith.constant 1 : index
  %slots = arith.constant #slots
  %x_later = arith.constant #x_later
  %less = arith.subi %slots, %c1 : index
  %x_slots = arith.select %x_later, %less, %slots : index
  return %x_slots : index
}

// Of copies at a slot's mbarrier, for each row: one, or those of dy and of x if they come apart.
func.func private @arrivals_i32() -> i32 {
  %together = arith.constant 1 : i32
  %apart = arith.constant 2 : i32
  %x_later = arith.constant #x_later
  %arrivals = arith.select %x_later, %apart, %together : i32
  return %arrivals : i32
}

// Of the mbarriers, the first that copies arrive at: those of the exchange come before.
func.func private @copies_first() -> index {
  %c0 = arith.constant 0 : index
  %buffers = arith.constant #buffers
  %in_clusters = func.call @in_clusters() : () -> i1
  %first = arith.select %in_clusters, %buffers, %c0 : index
  return %first : index
}

// Columns that a subgroup has room for, where it copies its own.
func.func private @of_subgroup() -> index {
  %chunks = arith.constant #chunks
  %v = arith.constant #vector
  %lanes = arith.constant #subgroup
  %of_lane = arith.muli %chunks, %v : index
  %columns = arith.muli %of_lane, %lanes : index
  return %columns : index
}

// Elements of dy in 16 bytes, which bulk copies come in.
func.func private @dy_in_16() -> index {
  %bits = arith.constant 128 : index
  %each = arith.constant #dy_bits
  %count = arith.divui %bits, %each : index
  return %count : index
}

// Elements of dy in 128 bytes, which the L2 cache keeps together.
func.func private @dy_in_line() -> index {
  %bits = arith.constant 1024 : index
  %each = arith.constant #dy_bits
  %count = arith.divui %bits, %each : index
  return %count : index
}

// Elements of x in 16 bytes, which bulk copies come in.
func.func private @x_in_16() -> index {
  %bits = arith.constant 128 : index
  %each = arith.constant #x_bits
  %count = arith.divui %bits, %each : index
  return %count : index
}

// Elements of x in 128 bytes, which the L2 cache keeps together.
func.func private @x_in_line() -> index {
  %bits = arith.constant 1024 : index
  %each = arith.constant #x_bits
  %count = arith.divui %bits, %each : index
  return %count : index
}

// Whether a row of dy and one of x have whole 16 bytes.
func.func private @whole_16() -> i1 {
  %c0 = arith.constant 0 : index
  %n = arith.constant #columns
  %dy_of_16 = func.call @dy_in_16() : () -> index
  %x_of_16 = func.call @x_in_16() : () -> index
  %most = arith.maxui %dy_of_16, %x_of_16 : index
  %beyond = arith.remui %n, %most : index
  %is = arith.cmpi eq, %beyond, %c0 : index
  return %is : i1
}

// Whether there are branches between a row's sums and the end of its step: at its edges, of copies, or in turns.
func.func private @branches() -> i1 {
  %shifted = func.call @shifted() : () -> i1
  %in_bulk = func.call @in_bulk() : () -> i1
  %takes_turns = func.call @takes_turns() : () -> i1
  %of_rows = arith.ori %shifted, %in_bulk : i1
  %are = arith.ori %of_rows, %takes_turns : i1
  return %are : i1
}
