// Where a thread's chunks of a row are, and its sums of columns: LLVM may compute places when it likes.

// What a NormSpec and a Schedule decide.
!acc = f32
!chunk = vector<8x!acc>
!thread = vector<9xindex>
!begin = vector<4xindex>

func.func private @branches() -> i1
func.func private @settled_of_sums(!chunk) -> !chunk
// End of what is replaced.

// This thread, for one reading of a row.
func.func private @thread_anew(%thread: !thread) -> !thread {
  return %thread : !thread
}

// Where a row begins, for another reading.
func.func private @begin_anew(%where: !begin) -> !begin {
  return %where : !begin
}

// A thread's shares of a row's two sums, after a chunk.
func.func private @shares_after(%h: !chunk, %hx: !chunk) -> (!chunk, !chunk) {
  return %h, %hx : !chunk, !chunk
}

// A chunk's sums of columns, after a row. Before the branches of a row's edges, of copies, and of turns: LLVM would move both
// sums behind them, and keep what they add.
func.func private @sums_after(%dgamma: !chunk, %dbeta: !chunk) -> (!chunk, !chunk) {
  %branches = func.call @branches() : () -> i1
  %dgamma_here, %dbeta_here = scf.if %branches -> (!chunk, !chunk) {
    %dgamma_settled = func.call @settled_of_sums(%dgamma) : (!chunk) -> !chunk
    %dbeta_settled = func.call @settled_of_sums(%dbeta) : (!chunk) -> !chunk
    scf.yield %dgamma_settled, %dbeta_settled : !chunk, !chunk
  } else {
    scf.yield %dgamma, %dbeta : !chunk, !chunk
  }
  return %dgamma_here, %dbeta_here : !chunk, !chunk
}
