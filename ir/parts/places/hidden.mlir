// The same functions, for LLVM's code for AMD's GPUs where rows are loaded twice. It computes the places of all chunks before
// the first row, or for a row's sums and its dx at once, and it adds to the sums of columns behind the last chunk's branch:
// all of these would be in registers, which have no room but for the sums. So layer norm's backward of 46000 columns spilled
// 720 bytes of a thread (gfx942), and spills nothing so. The empty instructions hide that a place is an old one, and
// keep sums where they are.

// What a NormSpec and a Schedule decide.
!acc = f32
#threads = 512 : index
#sums_dbeta = true
#centres = true
!chunk = vector<8x!acc>
!thread = vector<9xindex>
!begin = vector<4xindex>

func.func private @my_t(!thread) -> index
func.func private @settled_on_amd_of_sums(!chunk) -> !chunk
// End of what is replaced.

// This thread, for one reading of a row. Its number is still known to be below T.
func.func private @thread_anew(%thread: !thread) -> !thread {
  %c1 = arith.constant 1 : index
  %t_count = arith.constant #threads
  %most = arith.subi %t_count, %c1 : index
  %t = func.call @my_t(%thread) : (!thread) -> index
  %t_i32 = arith.index_castui %t : index to i32
  %hidden = llvm.inline_asm has_side_effects "", "=v,0" %t_i32 : (i32) -> i32
  %hidden_t = arith.index_castui %hidden : i32 to index
  %t_anew = arith.minui %hidden_t, %most : index
  %anew = vector.insert %t_anew, %thread[1] : index into !thread
  return %anew : !thread
}

// Where a row begins, for another reading. The zero is one for all threads of a subgroup, and leaves the row so.
func.func private @begin_anew(%where: !begin) -> !begin {
  %zero = arith.constant 0 : i32
  %row = vector.extract %where[3] : index from !begin
  %hidden = llvm.inline_asm has_side_effects "", "=s,0" %zero : (i32) -> i32
  %nothing = arith.index_castui %hidden : i32 to index
  %row_anew = arith.addi %row, %nothing : index
  %anew = vector.insert %row_anew, %where[3] : index into !begin
  return %anew : !begin
}

// A thread's shares of a row's two sums, after a chunk.
func.func private @shares_after(%h: !chunk, %hx: !chunk) -> (!chunk, !chunk) {
  %centres = arith.constant #centres
  %hx_here = func.call @settled_on_amd_of_sums(%hx) : (!chunk) -> !chunk
  %h_here = scf.if %centres -> !chunk {
    %settled = func.call @settled_on_amd_of_sums(%h) : (!chunk) -> !chunk
    scf.yield %settled : !chunk
  } else {
    scf.yield %h : !chunk
  }
  return %h_here, %hx_here : !chunk, !chunk
}

// A chunk's sums of columns, after a row.
func.func private @sums_after(%dgamma: !chunk, %dbeta: !chunk) -> (!chunk, !chunk) {
  %sums_dbeta = arith.constant #sums_dbeta
  %dgamma_here = func.call @settled_on_amd_of_sums(%dgamma) : (!chunk) -> !chunk
  %dbeta_here = scf.if %sums_dbeta -> !chunk {
    %settled = func.call @settled_on_amd_of_sums(%dbeta) : (!chunk) -> !chunk
    scf.yield %settled : !chunk
  } else {
    scf.yield %dbeta : !chunk
  }
  return %dgamma_here, %dbeta_here : !chunk, !chunk
}
