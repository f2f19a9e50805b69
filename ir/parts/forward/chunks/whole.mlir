// How a thread's chunks of a row come from memory and go there, where V divides N: in one access each.

// What a NormSpec and a Schedule decide.
#forward_chunks = 2 : index
#forward_threads = 256 : index
#forward_lasts = true
!pointer = !llvm.ptr<1>
!rows = memref<?x4096xbf16, #hal.descriptor_type<storage_buffer>>
!row = memref<4096xbf16, #hal.descriptor_type<storage_buffer>>
!narrow = vector<8xbf16>
!wide = vector<8xf32>
!held = memref<2xvector<8xbf16>, #gpu.address_space<private>>
!forward_thread = vector<6xindex>

func.func private @my_t(!forward_thread) -> index
func.func private @my_part(!forward_thread) -> index
func.func private @address_of_it(!rows, index, index) -> !pointer
func.func private @load_lasting_of_it(!rows, index, index, !pointer) -> !narrow
// End of what is replaced.

// The number of a thread's chunk k of a step, of the workgroup's chunks of a row.
func.func private @chunk_number(%step: index, %k: index, %thread: !forward_thread) -> index {
  %t = func.call @my_t(%thread) : (!forward_thread) -> index
  %t_count = arith.constant #forward_threads
  %chunks = arith.constant #forward_chunks
  %steps_before = arith.muli %step, %chunks : index
  %chunks_before = arith.addi %steps_before, %k : index
  %before = arith.muli %chunks_before, %t_count : index
  %chunk = arith.addi %before, %t : index
  return %chunk : index
}

// Whether all of a chunk comes in the accesses below.
func.func private @comes_whole(%row: index, %at: index, %inside: i1) -> i1 {
  return %inside : i1
}

// One of a chunk's accesses: there is one.
func.func private @access(%rows: !rows, %row: index, %at: index, %which: index) -> !narrow {
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

// What does not come in whole accesses: nothing.
func.func private @read_edge(%rows: !rows, %zeros: !narrow, %row: index, %k: index, %at: index, %inside: i1, %held: !held) {
  return
}

// A chunk, of its accesses.
func.func private @joined(%zeros: !narrow, %row: index, %k: index, %at: index, %held: !held) -> !narrow {
  %chunk = memref.load %held[%k] : !held
  return %chunk : !narrow
}

// Sums with a chunk, or without it: elements that are not of the row count for nothing.
func.func private @counted(%with: !wide, %without: !wide, %k: index, %at: index, %inside: i1) -> !wide {
  %sums = arith.select %inside, %with, %without : !wide
  return %sums : !wide
}

// The weights, or biases, of a chunk.
func.func private @columns_at(%row: !row, %zeros: !narrow, %k: index, %at: index) -> !narrow {
  %read = vector.load %row[%at] : !row, !narrow
  return %read : !narrow
}

// Stores a chunk, or keeps it until all of them are there.
func.func private @put(%rows: !rows, %chunk: !narrow, %row: index, %k: index, %at: index, %stores: i1, %held: !held) {
  scf.if %stores {
    vector.store %chunk, %rows[%row, %at] : !rows, !narrow
  }
  return
}

// Stores the chunks of a step that were kept: none.
func.func private @put_kept(%rows: !rows, %zeros: !narrow, %step: index, %exists: i1, %thread: !forward_thread, %held: !held) {
  return
}
