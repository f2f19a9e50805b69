// Sets of weights, for the algorithms on whole tensors: these see a weight for each row, in the type of sums, and
// leave the sums over rows to what is here. Row m takes the set (m / rows_per_set) % sets.

// What a NormSpec decides. These lines are replaced; nothing below them is.
!gamma = bf16
!beta = bf16
!acc = f32
!acc_mn = tensor<?x4096x!acc>
!gamma_n = tensor<?x4096x!gamma>
!beta_n = tensor<?x4096x!beta>
!acc_sets = tensor<?x4096x!acc>
// End of what is replaced.

#cells = affine_map<(m, n) -> (m, n)>
#sets_cells = affine_map<(g, n, m) -> (m, n)>
#sets_sums  = affine_map<(g, n, m) -> (g, n)>

func.func private @gamma_of_rows(%gamma: !gamma_n, %rows: index, %rows_per_set: index) -> !acc_mn {
  %c0 = arith.constant 0 : index
  %sets = tensor.dim %gamma, %c0 : !gamma_n
  %empty = tensor.empty(%sets) : !acc_sets
  %wide = linalg.copy ins(%gamma : !gamma_n) outs(%empty : !acc_sets) -> !acc_sets
  %of_rows = call @of_rows(%wide, %rows, %rows_per_set) : (!acc_sets, index, index) -> !acc_mn
  return %of_rows : !acc_mn
}

func.func private @beta_of_rows(%beta: !beta_n, %rows: index, %rows_per_set: index) -> !acc_mn {
  %c0 = arith.constant 0 : index
  %sets = tensor.dim %beta, %c0 : !beta_n
  %empty = tensor.empty(%sets) : !acc_sets
  %wide = linalg.copy ins(%beta : !beta_n) outs(%empty : !acc_sets) -> !acc_sets
  %of_rows = call @of_rows(%wide, %rows, %rows_per_set) : (!acc_sets, index, index) -> !acc_mn
  return %of_rows : !acc_mn
}

// Where there is no bias.
func.func private @no_beta_of_rows(%rows: index) -> !acc_mn {
  %zero = arith.constant 0.0 : !acc
  %empty = tensor.empty(%rows) : !acc_mn
  %zeros = linalg.fill ins(%zero : !acc) outs(%empty : !acc_mn) -> !acc_mn
  return %zeros : !acc_mn
}

func.func private @dgamma_of_sets(%cells: !acc_mn, %sets: index, %rows_per_set: index) -> !gamma_n {
  %sums = call @of_sets(%cells, %sets, %rows_per_set) : (!acc_mn, index, index) -> !acc_sets
  %empty = tensor.empty(%sets) : !gamma_n
  %dgamma = linalg.copy ins(%sums : !acc_sets) outs(%empty : !gamma_n) -> !gamma_n
  return %dgamma : !gamma_n
}

func.func private @dbeta_of_sets(%cells: !acc_mn, %sets: index, %rows_per_set: index) -> !beta_n {
  %sums = call @of_sets(%cells, %sets, %rows_per_set) : (!acc_mn, index, index) -> !acc_sets
  %empty = tensor.empty(%sets) : !beta_n
  %dbeta = linalg.copy ins(%sums : !acc_sets) outs(%empty : !beta_n) -> !beta_n
  return %dbeta : !beta_n
}

func.func private @of_rows(%of_sets: !acc_sets, %rows: index, %rows_per_set: index) -> !acc_mn {
  %c0 = arith.constant 0 : index
  %sets = tensor.dim %of_sets, %c0 : !acc_sets
  %empty = tensor.empty(%rows) : !acc_mn
  %of_rows = linalg.generic {indexing_maps = [#cells], iterator_types = ["parallel", "parallel"]}
      outs(%empty : !acc_mn) {
  ^bb0(%unused: !acc):
    %row = linalg.index 0 : index
    %column = linalg.index 1 : index
    %run = arith.divui %row, %rows_per_set : index
    %set = arith.remui %run, %sets : index
    %value = tensor.extract %of_sets[%set, %column] : !acc_sets
    linalg.yield %value : !acc
  } -> !acc_mn
  return %of_rows : !acc_mn
}

// Each set looks at all rows, and counts its own.
func.func private @of_sets(%cells: !acc_mn, %sets: index, %rows_per_set: index) -> !acc_sets {
  %zero = arith.constant 0.0 : !acc
  %empty = tensor.empty(%sets) : !acc_sets
  %zeros = linalg.fill ins(%zero : !acc) outs(%empty : !acc_sets) -> !acc_sets
  %sums = linalg.generic {indexing_maps = [#sets_cells, #sets_sums], iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%cells : !acc_mn) outs(%zeros : !acc_sets) {
  ^bb0(%cell: !acc, %sum: !acc):
    %own = linalg.index 0 : index
    %row = linalg.index 2 : index
    %run = arith.divui %row, %rows_per_set : index
    %set = arith.remui %run, %sets : index
    %is_own = arith.cmpi eq, %set, %own : index
    %counted = arith.select %is_own, %cell, %zero : !acc
    %with_row = arith.addf %sum, %counted : !acc
    linalg.yield %with_row : !acc
  } -> !acc_sets
  return %sums : !acc_sets
}
