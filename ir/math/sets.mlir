// Sets of weights: row r takes the set (r / rows_per_set) % sets, with the whole part of the quotient. So the rows of a
// set come in runs of rows_per_set neighbours, and from one run to the next it is sets * rows_per_set rows. All numbers
// here have 32 bits: a GPU divides those of 64 bits slowly.

// What a NormSpec and a Schedule decide.
#teams = 1 : index
#least_run = 64 : i32  // rows of a long run, at least
// End of what is replaced.

func.func private @row_set(%row: index, %sets: index, %rows_per_set: index) -> index {
  %row_i32 = arith.index_castui %row : index to i32
  %sets_i32 = arith.index_castui %sets : index to i32
  %rows_per_set_i32 = arith.index_castui %rows_per_set : index to i32
  %run = arith.divui %row_i32, %rows_per_set_i32 : i32
  // Sets of samples come once, and need no second division: a GPU takes many instructions for one.
  %wraps = arith.cmpi uge, %run, %sets_i32 : i32
  %set_i32 = scf.if %wraps -> i32 {
    %wrapped = arith.remui %run, %sets_i32 : i32
    scf.yield %wrapped : i32
  } else {
    scf.yield %run : i32
  }
  %set = arith.index_castui %set_i32 : i32 to index
  return %set : index
}

// The row that is the k-th of a set.
func.func private @set_row(%k: index, %set: index, %sets: index, %rows_per_set: index) -> index {
  %k_i32 = arith.index_castui %k : index to i32
  %rows_per_set_i32 = arith.index_castui %rows_per_set : index to i32
  %round_i32 = arith.divui %k_i32, %rows_per_set_i32 : i32
  %in_run_i32 = arith.remui %k_i32, %rows_per_set_i32 : i32
  %round = arith.index_castui %round_i32 : i32 to index
  %in_run = arith.index_castui %in_run_i32 : i32 to index
  %runs = arith.muli %round, %sets : index
  %run = arith.addi %runs, %set : index
  %first = arith.muli %run, %rows_per_set : index
  %row = arith.addi %first, %in_run : index
  return %row : index
}

// How many of M rows a set has.
func.func private @count_set_rows(%m: index, %set: index, %sets: index, %rows_per_set: index) -> index {
  %zero = arith.constant 0 : i32
  %m_i32 = arith.index_castui %m : index to i32
  %set_i32 = arith.index_castui %set : index to i32
  %sets_i32 = arith.index_castui %sets : index to i32
  %rows_per_set_i32 = arith.index_castui %rows_per_set : index to i32
  %runs = arith.divui %m_i32, %rows_per_set_i32 : i32  // whole ones
  %rest = arith.remui %m_i32, %rows_per_set_i32 : i32
  %rounds = arith.divui %runs, %sets_i32 : i32
  %more_runs = arith.remui %runs, %sets_i32 : i32
  %has_one_more = arith.cmpi ult, %set_i32, %more_runs : i32
  %has_rest = arith.cmpi eq, %set_i32, %more_runs : i32
  %rest_or_none = arith.select %has_rest, %rest, %zero : i32
  %more = arith.select %has_one_more, %rows_per_set_i32, %rest_or_none : i32
  %in_rounds = arith.muli %rounds, %rows_per_set_i32 : i32
  %rows_i32 = arith.addi %in_rounds, %more : i32
  %rows = arith.index_castui %rows_i32 : i32 to index
  return %rows : index
}

func.func private @has_teams() -> i1 {
  %c1 = arith.constant 1 : index
  %teams = arith.constant #teams
  %are_several = arith.cmpi ne, %teams, %c1 : index
  return %are_several : i1
}

// Whether the teams of a workgroup (parts/set_rows.mlir) have sets of their own: where runs of a set's rows are short.
func.func private @teams_have_sets(%rows_per_set: i32) -> i1 {
  %has_teams = func.call @has_teams() : () -> i1
  %least_run = arith.constant #least_run
  %has_short_runs = arith.cmpi ult, %rows_per_set, %least_run : i32
  %do = arith.andi %has_teams, %has_short_runs : i1
  return %do : i1
}

// Partial rows of a workgroup: one for each set that it has.
func.func private @count_partial_rows(%rows_per_set: i32) -> index {
  %c1 = arith.constant 1 : index
  %teams = arith.constant #teams
  %several = func.call @teams_have_sets(%rows_per_set) : (i32) -> i1
  %count = arith.select %several, %teams, %c1 : index
  return %count : index
}
