// Sets of weights, in StableHLO, for the oracles: the same as sets_of_rows.mlir, written again with gathers and masks.
// The two files share no line of code. M is fixed here, and no row takes a set beyond the first M. (IREE compiles
// neither conversions of sets, whose number is open, nor scatters that add.)

// What a NormSpec decides. These lines are replaced; nothing below them is.
!gamma = bf16
!beta = bf16
!acc = f32
!acc_mn = tensor<64x4096x!acc>
!gamma_mn = tensor<64x4096x!gamma>
!beta_mn = tensor<64x4096x!beta>
!gamma_n = tensor<?x4096x!gamma>
!beta_n = tensor<?x4096x!beta>
!set_m = tensor<64xi64>
!set_mm = tensor<64x64xi64>
!lanes_mm = tensor<64x64xi1>
!lanes_mmn = tensor<64x64x4096xi1>
!acc_mmn = tensor<64x64x4096x!acc>
#one_set = array<i64: 1, 4096>
#columns = 4096 : index
// End of what is replaced.

!number = tensor<i64>
!total = tensor<!acc>

func.func private @gamma_of_rows(%gamma: !gamma_n, %rows: index, %rows_per_set: index) -> !acc_mn {
  %first = arith.constant 0 : index
  %sets = tensor.dim %gamma, %first : !gamma_n
  %set = call @set_of_rows(%sets, %rows_per_set) : (index, index) -> !set_m
  %taken = "stablehlo.gather"(%gamma, %set) {
    dimension_numbers = #stablehlo.gather<
      offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
    slice_sizes = #one_set} : (!gamma_n, !set_m) -> !gamma_mn
  %gamma_acc = stablehlo.convert %taken : (!gamma_mn) -> !acc_mn
  return %gamma_acc : !acc_mn
}

func.func private @beta_of_rows(%beta: !beta_n, %rows: index, %rows_per_set: index) -> !acc_mn {
  %first = arith.constant 0 : index
  %sets = tensor.dim %beta, %first : !beta_n
  %set = call @set_of_rows(%sets, %rows_per_set) : (index, index) -> !set_m
  %taken = "stablehlo.gather"(%beta, %set) {
    dimension_numbers = #stablehlo.gather<
      offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
    slice_sizes = #one_set} : (!beta_n, !set_m) -> !beta_mn
  %beta_acc = stablehlo.convert %taken : (!beta_mn) -> !acc_mn
  return %beta_acc : !acc_mn
}

func.func private @no_beta_of_rows(%rows: index) -> !acc_mn {
  %nothing = stablehlo.constant dense<0.0> : !total
  %nothing_mn = stablehlo.broadcast_in_dim %nothing, dims = [] : (!total) -> !acc_mn
  return %nothing_mn : !acc_mn
}

func.func private @dgamma_of_sets(%cells: !acc_mn, %sets: index, %rows_per_set: index) -> !gamma_n {
  %columns = arith.constant #columns
  %total = call @totals(%cells, %sets, %rows_per_set) : (!acc_mn, index, index) -> !acc_mn
  %rounded = stablehlo.convert %total : (!acc_mn) -> !gamma_mn
  %nothing = arith.constant 0.0 : !gamma
  %longer = tensor.pad %rounded low[0, 0] high[%sets, 0] {
  ^bb0(%row: index, %column: index):
    tensor.yield %nothing : !gamma
  } : !gamma_mn to !gamma_n
  %dgamma = tensor.extract_slice %longer[0, 0] [%sets, %columns] [1, 1] : !gamma_n to tensor<?x?x!gamma>
  %sized = tensor.cast %dgamma : tensor<?x?x!gamma> to !gamma_n
  return %sized : !gamma_n
}

func.func private @dbeta_of_sets(%cells: !acc_mn, %sets: index, %rows_per_set: index) -> !beta_n {
  %columns = arith.constant #columns
  %total = call @totals(%cells, %sets, %rows_per_set) : (!acc_mn, index, index) -> !acc_mn
  %rounded = stablehlo.convert %total : (!acc_mn) -> !beta_mn
  %nothing = arith.constant 0.0 : !beta
  %longer = tensor.pad %rounded low[0, 0] high[%sets, 0] {
  ^bb0(%row: index, %column: index):
    tensor.yield %nothing : !beta
  } : !beta_mn to !beta_n
  %dbeta = tensor.extract_slice %longer[0, 0] [%sets, %columns] [1, 1] : !beta_n to tensor<?x?x!beta>
  %sized = tensor.cast %dbeta : tensor<?x?x!beta> to !beta_n
  return %sized : !beta_n
}

// Of the first M sets, each of which masks the rows of the others.
func.func private @totals(%cells: !acc_mn, %sets: index, %rows_per_set: index) -> !acc_mn {
  %set = call @set_of_rows(%sets, %rows_per_set) : (index, index) -> !set_m
  %set_mm = stablehlo.broadcast_in_dim %set, dims = [1] : (!set_m) -> !set_mm
  %own_mm = stablehlo.iota dim = 0 : !set_mm
  %is_own = stablehlo.compare EQ, %set_mm, %own_mm : (!set_mm, !set_mm) -> !lanes_mm
  %is_own_mmn = stablehlo.broadcast_in_dim %is_own, dims = [0, 1] : (!lanes_mm) -> !lanes_mmn
  %nothing = stablehlo.constant dense<0.0> : !total
  %nothing_mmn = stablehlo.broadcast_in_dim %nothing, dims = [] : (!total) -> !acc_mmn
  %cells_mmn = stablehlo.broadcast_in_dim %cells, dims = [1, 2] : (!acc_mn) -> !acc_mmn
  %masked = stablehlo.select %is_own_mmn, %cells_mmn, %nothing_mmn : !lanes_mmn, !acc_mmn
  %total = stablehlo.reduce(%masked init: %nothing) applies stablehlo.add across dimensions = [1]
      : (!acc_mmn, !total) -> !acc_mn
  return %total : !acc_mn
}

func.func private @set_of_rows(%sets: index, %rows_per_set: index) -> !set_m {
  %number = stablehlo.iota dim = 0 : !set_m
  %run_64 = arith.index_cast %rows_per_set : index to i64
  %run_0 = tensor.from_elements %run_64 : !number
  %run_m = stablehlo.broadcast_in_dim %run_0, dims = [] : (!number) -> !set_m
  %sets_64 = arith.index_cast %sets : index to i64
  %sets_0 = tensor.from_elements %sets_64 : !number
  %sets_m = stablehlo.broadcast_in_dim %sets_0, dims = [] : (!number) -> !set_m
  %round = stablehlo.divide %number, %run_m : !set_m
  %set = stablehlo.remainder %round, %sets_m : !set_m
  return %set : !set_m
}
