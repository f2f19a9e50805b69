// Layer normalization with a gate: the algorithm on whole tensors, for no particular target and without a schedule.
// The tensors have M rows of N columns, z too.
//
//   silu(z) = z / (1 + exp(-z))
//   v    = x * silu(z) if the gate comes first, else x
//   mean = mean_N(v)                                     row sums
//   rstd = 1 / sqrt(mean_N((v - mean)^2) + eps)
//   n    = (v - mean) * rstd * (gamma + weight_offset) + beta
//   y    = n if the gate comes first, else n * silu(z)
//
// Every sum is an !acc, for data of any type, and so is v. A spec without a bias gives another tensor in its place,
// and does not add it.

// What a NormSpec decides. These lines are replaced; nothing below them is.
!x = bf16
!y = bf16
!gamma = bf16
!beta = bf16
!z = bf16
!acc = f32
!x_mn = tensor<?x4096x!x>
!y_mn = tensor<?x4096x!y>
!z_mn = tensor<?x4096x!z>
!acc_mn = tensor<?x4096x!acc>
!acc_m = tensor<?x!acc>
!acc_n = tensor<4096x!acc>
!gamma_n = tensor<4096x!gamma>
!beta_n = tensor<4096x!beta>
#inv_n = 2.44140625e-4 : !acc
#eps = 1.0e-5 : !acc
#weight_offset = -0.0 : !acc  // added to gamma; -0.0 changes no number
#adds_bias = true             // beta is added
#gates_first = false          // the gate is before the norm
// End of what is replaced.

#mn = affine_map<(m, n) -> (m, n)>
#m  = affine_map<(m, n) -> (m)>
#n  = affine_map<(m, n) -> (n)>  // without sets
// with sets: #n  = affine_map<(m, n) -> (m, n)>
#id = affine_map<(m) -> (m)>

func.func private @algorithm(%x: !x_mn, %gamma: !gamma_n, %beta: !beta_n, %z: !z_mn) -> (!y_mn, !acc_m, !acc_m) {
  %zero = arith.constant 0.0 : !acc
  %one = arith.constant 1.0 : !acc
  %inv_n = arith.constant #inv_n
  %eps = arith.constant #eps
  %offset = arith.constant #weight_offset
  %adds_bias = arith.constant #adds_bias
  %gates_first = arith.constant #gates_first
  %c0 = arith.constant 0 : index
  %rows = tensor.dim %x, %c0 : !x_mn

  // The operands in the type of sums. (A copy casts where types differ, and vanishes where they are equal.)
  %empty_mn = tensor.empty(%rows) : !acc_mn
  %empty_n = tensor.empty() : !acc_n
  %xa = linalg.copy ins(%x : !x_mn) outs(%empty_mn : !acc_mn) -> !acc_mn
  %za = linalg.copy ins(%z : !z_mn) outs(%empty_mn : !acc_mn) -> !acc_mn
  %ga = linalg.copy ins(%gamma : !gamma_n) outs(%empty_n : !acc_n) -> !acc_n
  %ba = linalg.copy ins(%beta : !beta_n) outs(%empty_n : !acc_n) -> !acc_n

  // silu(z), and v.
  %silu, %va = linalg.generic {indexing_maps = [#mn, #mn, #mn, #mn], iterator_types = ["parallel", "parallel"]}
      ins(%xa, %za : !acc_mn, !acc_mn) outs(%empty_mn, %empty_mn : !acc_mn, !acc_mn) {
  ^bb0(%x_: !acc, %z_: !acc, %unused: !acc, %unused_too: !acc):
    %minus_z = arith.negf %z_ : !acc
    %exp = math.exp %minus_z : !acc
    %one_exp = arith.addf %one, %exp : !acc
    %silu_ = arith.divf %z_, %one_exp : !acc
    %product = arith.mulf %x_, %silu_ : !acc
    %v_ = arith.select %gates_first, %product, %x_ : !acc
    linalg.yield %silu_, %v_ : !acc, !acc
  } -> (!acc_mn, !acc_mn)

  // mean.
  %empty_m = tensor.empty(%rows) : !acc_m
  %zeros_m = linalg.fill ins(%zero : !acc) outs(%empty_m : !acc_m) -> !acc_m
  %sum_v = linalg.generic {indexing_maps = [#mn, #m], iterator_types = ["parallel", "reduction"]}
      ins(%va : !acc_mn) outs(%zeros_m : !acc_m) {
  ^bb0(%v_: !acc, %sum_: !acc):
    %sum1 = arith.addf %sum_, %v_ : !acc
    linalg.yield %sum1 : !acc
  } -> !acc_m
  %mean = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%sum_v : !acc_m) outs(%empty_m : !acc_m) {
  ^bb0(%sum_: !acc, %unused: !acc):
    %mean_ = arith.mulf %sum_, %inv_n : !acc
    linalg.yield %mean_ : !acc
  } -> !acc_m

  // rstd, from centred values.
  %sum_vv = linalg.generic {indexing_maps = [#mn, #m, #m], iterator_types = ["parallel", "reduction"]}
      ins(%va, %mean : !acc_mn, !acc_m) outs(%zeros_m : !acc_m) {
  ^bb0(%v_: !acc, %mean_: !acc, %sum_: !acc):
    %centred = arith.subf %v_, %mean_ : !acc
    %square = arith.mulf %centred, %centred : !acc
    %sum1 = arith.addf %sum_, %square : !acc
    linalg.yield %sum1 : !acc
  } -> !acc_m
  %rstd = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%sum_vv : !acc_m) outs(%empty_m : !acc_m) {
  ^bb0(%sum_: !acc, %unused: !acc):
    %var = arith.mulf %sum_, %inv_n : !acc
    %var_eps = arith.addf %var, %eps : !acc
    %std = math.sqrt %var_eps : !acc
    %rstd_ = arith.divf %one, %std : !acc
    linalg.yield %rstd_ : !acc
  } -> !acc_m

  // y, rounded once to the type of y.
  %y_acc = linalg.generic {
      indexing_maps = [#mn, #m, #m, #n, #n, #mn, #mn], iterator_types = ["parallel", "parallel"]}
      ins(%va, %mean, %rstd, %ga, %ba, %silu : !acc_mn, !acc_m, !acc_m, !acc_n, !acc_n, !acc_mn)
      outs(%empty_mn : !acc_mn) {
  ^bb0(%v_: !acc, %mean_: !acc, %rstd_: !acc, %gamma_: !acc, %beta_: !acc, %silu_: !acc, %unused: !acc):
    %centred = arith.subf %v_, %mean_ : !acc
    %xhat = arith.mulf %centred, %rstd_ : !acc
    %g = arith.addf %gamma_, %offset : !acc
    %scaled = arith.mulf %xhat, %g : !acc
    %with_bias = arith.addf %scaled, %beta_ : !acc
    %n_ = arith.select %adds_bias, %with_bias, %scaled : !acc
    %product = arith.mulf %n_, %silu_ : !acc
    %y_ = arith.select %gates_first, %n_, %product : !acc
    linalg.yield %y_ : !acc
  } -> !acc_mn
  %empty_y = tensor.empty(%rows) : !y_mn
  %y = linalg.copy ins(%y_acc : !acc_mn) outs(%empty_y : !y_mn) -> !y_mn
  return %y, %mean, %rstd : !y_mn, !acc_m, !acc_m
}
