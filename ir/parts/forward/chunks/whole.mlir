// How a thread's chunks of a row come from memory and go there, where V divides N: in one access each.

// What a NormSpec and a Schedule decide.
#forward_vector = 8 : index
#columns = 4096 : index
#forward_lasts = true
!pointer = !llvm.ptr<1>
!rows = memref<?x4096xbf16, #hal.descriptor_type<storage_buffer>>
!row = memref<4096xbf16, #hal.descriptor_type<storage_buffer>>
!narrow = vector<8xbf16>
!wide = vector<8xf32>
!held = memref<2xvector<8xbf16>, #gpu.address_space<private>>

func.func private @address_of_it(!rows, index, index) -> !pointer
func.func private @load_lasting_of_it(!rows, index, index, !pointer) -> !narrow
// End of what is replaced.

// How many rows a tensor in memory has, of M.
func.func private @memory_rows(%m: index) -> index {
  return %m : index
}

// How many chunks n columns of a row are in, from a workgroup's first on, and how many columns the last one lacks.
func.func private @chunk_count(%n: index) -> index {
  %v = arith.constant #forward_vector
  %chunks = arith.divui %n, %v : index
  return %chunks : index
}

func.func private @lacking_columns(%n: index) -> index {
  %c0 = arith.constant 0 : index
  return %c0 : index
}

// Whether a thread reads and stores a chunk's access.
func.func private @has_access(%row: index, %col: index, %at: index, %inside: i1) -> i1 {
  return %inside : i1
}

// One of the accesses that a chunk comes in: there is one.
func.func private @access(%rows: !rows, %row: index, %k: index, %at: index, %which: index) -> !narrow {
  %lasts = arith.constant #forward_lasts
  %read = scf.if %lasts -> !narrow {
    %address = func.call @address_of_it(%rows, %row, %at) : (!rows, index, index) -> !pointer
    %lasting = func.call @load_lasting_of_it(%rows, %row, %at, %address) : (!rows, index, index, !pointer) -> !narrow
    scf.yield %lasting : !narrow
  } else {
    %usual = vector.load %rows[%row, %at] : !rows, !narrow
    scf.yield %usual : !narrow
  }
  return %read : !narrow
}

// What cannot be read in whole accesses: nothing.
func.func private @read_edge(%rows: !rows, %zeros: !narrow, %row: index, %k: index, %at: index, %held: !held) {
  return
}

// A chunk, of its accesses; and all of a thread's, in their places.
func.func private @joined(%zeros: !narrow, %row: index, %k: index, %held: !held) -> !narrow {
  %chunk = memref.load %held[%k] : !held
  return %chunk : !narrow
}

func.func private @join_all(%zeros: !narrow, %row: index, %held: !held) {
  return
}

// The access that a thread stores for a chunk.
func.func private @stored(%zeros: !narrow, %k: index, %held: !held) -> !narrow {
  %chunk = memref.load %held[%k] : !held
  return %chunk : !narrow
}

// Sums with a chunk, or without it.
func.func private @counted(%with: !wide, %without: !wide, %k: index, %at: index, %inside: i1) -> !wide {
  %sums = arith.select %inside, %with, %without : !wide
  return %sums : !wide
}

// The weights, or biases, of an access.
func.func private @columns_at(%zeros: !narrow, %weights: !row, %row: index, %k: index, %at: index) -> !narrow {
  %read = vector.load %weights[%at] : !row, !narrow
  return %read : !narrow
}

// Stores an access.
func.func private @put(%rows: !rows, %chunk: !narrow, %row: index, %k: index, %col: index, %at: index, %inside: i1, %exists: i1) {
  %stores = arith.andi %inside, %exists : i1
  scf.if %stores {
    vector.store %chunk, %rows[%row, %at] : !rows, !narrow
  }
  return
}

// The number of an access among all of a tensor's.
func.func private @access_number(%rows: !rows, %row: index, %k: index, %at: index, %which: index) -> index {
  %v = arith.constant #forward_vector
  %n = arith.constant #columns
  %before = arith.muli %row, %n : index
  %element = arith.addi %before, %at : index
  %number = arith.divui %element, %v : index
  return %number : index
}
