// RMS normalization: the algorithm on whole tensors, for no particular target and without a schedule. The
// tensors have M rows of N columns.
//
//   s    = x + residual, rounded to the residual's type
//   rstd = 1 / sqrt(mean_N(s^2) + eps)                   a row sum
//   xhat = s * rstd
//   y    = xhat * (gamma + weight_offset) + beta
//
// Every sum is an !acc, for data of any type. A spec without a residual or a bias gives another tensor in
// its place, and does not add it; then s is x.

// What a NormSpec decides. These lines are replaced; nothing below them is.
!x = bf16
!y = bf16
!gamma = bf16
!beta = bf16
!residual = bf16
!acc = f32
!x_mn = tensor<?x4096x!x>
!y_mn = tensor<?x4096x!y>
!residual_mn = tensor<?x4096x!residual>
!acc_mn = tensor<?x4096x!acc>
!acc_m = tensor<?x!acc>
!acc_n = tensor<4096x!acc>
!gamma_n = tensor<4096x!gamma>
!beta_n = tensor<4096x!beta>
#inv_n = 2.44140625e-4 : !acc
#eps = 1.0e-5 : !acc
#weight_offset = -0.0 : !acc  // added to gamma; -0.0 changes no number
#adds_residual = false        // residual is added to x
#adds_bias = false            // beta is added
// End of what is replaced.

#mn = affine_map<(m, n) -> (m, n)>
#m  = affine_map<(m, n) -> (m)>
#n  = affine_map<(m, n) -> (n)>  // without sets
// with sets: #n  = affine_map<(m, n) -> (m, n)>
#id = affine_map<(m) -> (m)>

func.func private @algorithm(%x: !x_mn, %residual: !residual_mn, %gamma: !gamma_n, %beta: !beta_n)
    -> (!y_mn, !acc_m, !residual_mn) {
  %zero = arith.constant 0.0 : !acc
  %one = arith.constant 1.0 : !acc
  %inv_n = arith.constant #inv_n
  %eps = arith.constant #eps
  %offset = arith.constant #weight_offset
  %adds_residual = arith.constant #adds_residual
  %adds_bias = arith.constant #adds_bias
  %c0 = arith.constant 0 : index
  %rows = tensor.dim %x, %c0 : !x_mn

  // The operands in the type of sums. (A copy casts where types differ, and vanishes where they are equal.)
  %empty_mn = tensor.empty(%rows) : !acc_mn
  %empty_n = tensor.empty() : !acc_n
  %xa = linalg.copy ins(%x : !x_mn) outs(%empty_mn : !acc_mn) -> !acc_mn
  %ra = linalg.copy ins(%residual : !residual_mn) outs(%empty_mn : !acc_mn) -> !acc_mn
  %ga = linalg.copy ins(%gamma : !gamma_n) outs(%empty_n : !acc_n) -> !acc_n
  %ba = linalg.copy ins(%beta : !beta_n) outs(%empty_n : !acc_n) -> !acc_n

  // s, rounded once. The rounded s is what is normalized.
  %s_acc = linalg.generic {indexing_maps = [#mn, #mn, #mn], iterator_types = ["parallel", "parallel"]}
      ins(%xa, %ra : !acc_mn, !acc_mn) outs(%empty_mn : !acc_mn) {
  ^bb0(%x_: !acc, %r_: !acc, %unused: !acc):
    %with_residual = arith.addf %x_, %r_ : !acc
    %s_ = arith.select %adds_residual, %with_residual, %x_ : !acc
    linalg.yield %s_ : !acc
  } -> !acc_mn
  %empty_s = tensor.empty(%rows) : !residual_mn
  %s = linalg.copy ins(%s_acc : !acc_mn) outs(%empty_s : !residual_mn) -> !residual_mn
  %sa = linalg.copy ins(%s : !residual_mn) outs(%empty_mn : !acc_mn) -> !acc_mn

  // rstd.
  %empty_m = tensor.empty(%rows) : !acc_m
  %zeros_m = linalg.fill ins(%zero : !acc) outs(%empty_m : !acc_m) -> !acc_m
  %sum_ss = linalg.generic {indexing_maps = [#mn, #m], iterator_types = ["parallel", "reduction"]}
      ins(%sa : !acc_mn) outs(%zeros_m : !acc_m) {
  ^bb0(%s_: !acc, %sum_: !acc):
    %square = arith.mulf %s_, %s_ : !acc
    %sum1 = arith.addf %sum_, %square : !acc
    linalg.yield %sum1 : !acc
  } -> !acc_m
  %rstd = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%sum_ss : !acc_m) outs(%empty_m : !acc_m) {
  ^bb0(%sum_: !acc, %unused: !acc):
    %mean_square = arith.mulf %sum_, %inv_n : !acc
    %square_eps = arith.addf %mean_square, %eps : !acc
    %root = math.sqrt %square_eps : !acc
    %rstd_ = arith.divf %one, %root : !acc
    linalg.yield %rstd_ : !acc
  } -> !acc_m

  // y, rounded once to the type of y.
  %y_acc = linalg.generic {
      indexing_maps = [#mn, #m, #n, #n, #mn], iterator_types = ["parallel", "parallel"]}
      ins(%sa, %rstd, %ga, %ba : !acc_mn, !acc_m, !acc_n, !acc_n) outs(%empty_mn : !acc_mn) {
  ^bb0(%s_: !acc, %rstd_: !acc, %gamma_: !acc, %beta_: !acc, %unused: !acc):
    %xhat = arith.mulf %s_, %rstd_ : !acc
    %g = arith.addf %gamma_, %offset : !acc
    %scaled = arith.mulf %xhat, %g : !acc
    %with_bias = arith.addf %scaled, %beta_ : !acc
    %y_ = arith.select %adds_bias, %with_bias, %scaled : !acc
    linalg.yield %y_ : !acc
  } -> !acc_mn
  %empty_y = tensor.empty(%rows) : !y_mn
  %y = linalg.copy ins(%y_acc : !acc_mn) outs(%empty_y : !y_mn) -> !y_mn
  return %y, %rstd, %s : !y_mn, !acc_m, !residual_mn
}
