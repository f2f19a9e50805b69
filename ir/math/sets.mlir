// Sets of weights: row r takes the set (r / rows_per_set) % sets, with the whole part of the quotient. So the rows of a
// set come in runs of rows_per_set neighbours, and from one run to the next it is sets * rows_per_set rows.

// What a kernel's declaration decides: nothing.
// End of what is replaced.

func.func private @row_set(%row: index, %sets: index, %rows_per_set: index) -> index {
  %run = arith.divui %row, %rows_per_set : index
  %set = arith.remui %run, %sets : index
  return %set : index
}

// The row that is the k-th of a set.
func.func private @set_row(%k: index, %set: index, %sets: index, %rows_per_set: index) -> index {
  %round = arith.divui %k, %rows_per_set : index
  %in_run = arith.remui %k, %rows_per_set : index
  %runs = arith.muli %round, %sets : index
  %run = arith.addi %runs, %set : index
  %first = arith.muli %run, %rows_per_set : index
  %row = arith.addi %first, %in_run : index
  return %row : index
}

// How many of M rows a set has.
func.func private @count_set_rows(%m: index, %set: index, %sets: index, %rows_per_set: index) -> index {
  %round = arith.muli %sets, %rows_per_set : index
  %rounds = arith.divui %m, %round : index
  %rest = arith.remui %m, %round : index
  %others = arith.muli %set, %rows_per_set : index
  %before = arith.minui %others, %rest : index
  %left = arith.subi %rest, %before : index
  %in_last = arith.minui %left, %rows_per_set : index
  %in_others = arith.muli %rounds, %rows_per_set : index
  %rows = arith.addi %in_others, %in_last : index
  return %rows : index
}
