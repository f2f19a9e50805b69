// RMS normalization with a gate, backward: the algorithm on whole tensors, for no particular target and without a
// schedule. The tensors have M rows of N columns, z too.
//
//   silu(z) = z / (1 + exp(-z))          its derivative: sigmoid(z) * (1 + z * sigmoid(-z))
//   v, dn  = x * silu(z), dy if the gate comes first, else x, dy * silu(z)
//   xhat   = v * rstd
//   h      = dn * (gamma + weight_offset)
//   dv     = rstd * (h - xhat * mean_N(h * xhat))                             a row sum
//   dx     = dv * silu(z) if the gate comes first, else dv
//   dz     = dv * x * silu'(z) if the gate comes first, else dy * (xhat * (gamma + weight_offset) + beta) * silu'(z)
//   dgamma = sum_M(dn * xhat)                                                 column sums
//   dbeta  = sum_M(dn), with a bias
//
// Every sum is an !acc, for data of any type, and so are v and dn. A spec without a bias gives another tensor in its
// place, and does not add it.

// What a NormSpec decides. These lines are replaced; nothing below them is.
!dy = bf16
!x = bf16
!gamma = bf16
!beta = bf16
!z = bf16
!acc = f32
!dy_mn = tensor<?x4096x!dy>
!x_mn = tensor<?x4096x!x>
!z_mn = tensor<?x4096x!z>
!acc_mn = tensor<?x4096x!acc>
!acc_m = tensor<?x!acc>
!acc_n = tensor<4096x!acc>
!gamma_n = tensor<4096x!gamma>
!beta_n = tensor<4096x!beta>
#inv_n = 2.44140625e-4 : !acc
#eps = 1.0e-5 : !acc
#weight_offset = -0.0 : !acc  // added to gamma; -0.0 changes no number
#adds_bias = false            // beta is added
#gates_first = false          // the gate is before the norm
// End of what is replaced.

#mn = affine_map<(m, n) -> (m, n)>
#m  = affine_map<(m, n) -> (m)>
#n  = affine_map<(m, n) -> (n)>  // without sets
// with sets: #n  = affine_map<(m, n) -> (m, n)>
// Column sums: IREE wants a reduction's parallel dimensions first.
#nm_mn = affine_map<(n, m) -> (m, n)>
#nm_m  = affine_map<(n, m) -> (m)>
#nm_n  = affine_map<(n, m) -> (n)>  // without sets
// with sets: #nm_n  = affine_map<(n, m) -> (m, n)>
#id = affine_map<(m) -> (m)>

func.func private @algorithm(%dy: !dy_mn, %x: !x_mn, %rstd: !acc_m, %gamma: !gamma_n, %beta: !beta_n, %z: !z_mn)
    -> (!x_mn, !gamma_n, !beta_n, !z_mn) {
  %zero = arith.constant 0.0 : !acc
  %one = arith.constant 1.0 : !acc
  %inv_n = arith.constant #inv_n
  %offset = arith.constant #weight_offset
  %adds_bias = arith.constant #adds_bias
  %gates_first = arith.constant #gates_first
  %c0 = arith.constant 0 : index
  %rows = tensor.dim %x, %c0 : !x_mn

  // The operands in the type of sums. (A copy casts where types differ, and vanishes where they are equal.)
  %empty_mn = tensor.empty(%rows) : !acc_mn
  %empty_n = tensor.empty() : !acc_n
  %dy_acc = linalg.copy ins(%dy : !dy_mn) outs(%empty_mn : !acc_mn) -> !acc_mn
  %x_acc = linalg.copy ins(%x : !x_mn) outs(%empty_mn : !acc_mn) -> !acc_mn
  %z_acc = linalg.copy ins(%z : !z_mn) outs(%empty_mn : !acc_mn) -> !acc_mn
  %gamma_acc = linalg.copy ins(%gamma : !gamma_n) outs(%empty_n : !acc_n) -> !acc_n
  %ba = linalg.copy ins(%beta : !beta_n) outs(%empty_n : !acc_n) -> !acc_n

  // silu(z) and its derivative, v and dn.
  %silu, %slope, %xa, %dya = linalg.generic {
      indexing_maps = [#mn, #mn, #mn, #mn, #mn, #mn, #mn], iterator_types = ["parallel", "parallel"]}
      ins(%dy_acc, %x_acc, %z_acc : !acc_mn, !acc_mn, !acc_mn)
      outs(%empty_mn, %empty_mn, %empty_mn, %empty_mn : !acc_mn, !acc_mn, !acc_mn, !acc_mn) {
  ^bb0(%dy_: !acc, %x_: !acc, %z_: !acc, %unused0: !acc, %unused1: !acc, %unused2: !acc, %unused3: !acc):
    %minus_z = arith.negf %z_ : !acc
    %exp = math.exp %minus_z : !acc
    %one_exp = arith.addf %one, %exp : !acc
    %sigmoid = arith.divf %one, %one_exp : !acc
    %silu_ = arith.divf %z_, %one_exp : !acc
    %exp_z = math.exp %z_ : !acc
    %one_exp_z = arith.addf %one, %exp_z : !acc
    %along = arith.divf %z_, %one_exp_z : !acc
    %factor = arith.addf %one, %along : !acc
    %slope_ = arith.mulf %sigmoid, %factor : !acc
    %product_x = arith.mulf %x_, %silu_ : !acc
    %v_ = arith.select %gates_first, %product_x, %x_ : !acc
    %product_dy = arith.mulf %dy_, %silu_ : !acc
    %dn_ = arith.select %gates_first, %dy_, %product_dy : !acc
    linalg.yield %silu_, %slope_, %v_, %dn_ : !acc, !acc, !acc, !acc
  } -> (!acc_mn, !acc_mn, !acc_mn, !acc_mn)

  // The weight.
  %ga = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}  // without sets
  // with sets: %ga = linalg.generic {indexing_maps = [#mn, #mn], iterator_types = ["parallel", "parallel"]}
      ins(%gamma_acc : !acc_n) outs(%empty_n : !acc_n) {
  ^bb0(%gamma_: !acc, %unused: !acc):
    %g = arith.addf %gamma_, %offset : !acc
    linalg.yield %g : !acc
  } -> !acc_n

  // A row sum: sum_N(h * xhat).
  %empty_m = tensor.empty(%rows) : !acc_m
  %zeros_m = linalg.fill ins(%zero : !acc) outs(%empty_m : !acc_m) -> !acc_m
  %sum_hx = linalg.generic {
      indexing_maps = [#mn, #mn, #m, #n, #m], iterator_types = ["parallel", "reduction"]}
      ins(%dya, %xa, %rstd, %ga : !acc_mn, !acc_mn, !acc_m, !acc_n)
      outs(%zeros_m : !acc_m) {
  ^bb0(%dy_: !acc, %x_: !acc, %rstd_: !acc, %g: !acc, %hx_: !acc):
    %xhat = arith.mulf %x_, %rstd_ : !acc
    %h = arith.mulf %dy_, %g : !acc
    %hx = arith.mulf %h, %xhat : !acc
    %hx1 = arith.addf %hx_, %hx : !acc
    linalg.yield %hx1 : !acc
  } -> !acc_m

  // dx, from the row sums, and dz.
  %dx_acc, %dz_acc = linalg.generic {
      indexing_maps = [#mn, #mn, #m, #n, #n, #m, #mn, #mn, #mn, #mn, #mn, #mn],
      iterator_types = ["parallel", "parallel"]}
      ins(%dya, %xa, %rstd, %ga, %ba, %sum_hx, %silu, %slope, %dy_acc, %x_acc
          : !acc_mn, !acc_mn, !acc_m, !acc_n, !acc_n, !acc_m, !acc_mn, !acc_mn, !acc_mn, !acc_mn)
      outs(%empty_mn, %empty_mn : !acc_mn, !acc_mn) {
  ^bb0(%dy_: !acc, %x_: !acc, %rstd_: !acc, %g: !acc, %b: !acc, %hx_: !acc, %silu_: !acc, %slope_: !acc, %dy_given: !acc, %x_given: !acc, %unused: !acc, %unused_too: !acc):
    %xhat = arith.mulf %x_, %rstd_ : !acc
    %h = arith.mulf %dy_, %g : !acc
    %mean_hx = arith.mulf %hx_, %inv_n : !acc
    %t1 = arith.mulf %xhat, %mean_hx : !acc
    %t2 = arith.subf %h, %t1 : !acc
    %through = arith.mulf %t2, %rstd_ : !acc
    %through_gate = arith.mulf %through, %silu_ : !acc
    %dxa = arith.select %gates_first, %through_gate, %through : !acc
    %scaled = arith.mulf %xhat, %g : !acc
    %with_bias = arith.addf %scaled, %b : !acc
    %n_ = arith.select %adds_bias, %with_bias, %scaled : !acc
    %dy_or_x = arith.select %gates_first, %x_given, %dy_given : !acc
    %n_or_dv = arith.select %gates_first, %through, %n_ : !acc
    %dz_sloped = arith.mulf %dy_or_x, %slope_ : !acc
    %dza = arith.mulf %dz_sloped, %n_or_dv : !acc
    linalg.yield %dxa, %dza : !acc, !acc
  } -> (!acc_mn, !acc_mn)

  // Column sums: dgamma and dbeta, in !acc.
  %zeros_n = linalg.fill ins(%zero : !acc) outs(%empty_n : !acc_n) -> !acc_n
  %dgamma_acc, %dbeta_acc = linalg.generic {
      indexing_maps = [#nm_mn, #nm_mn, #nm_m, #nm_n, #nm_n], iterator_types = ["parallel", "reduction"]}  // without sets
      // with sets: indexing_maps = [#nm_mn, #nm_mn, #nm_m, #nm_n, #nm_n], iterator_types = ["parallel", "parallel"]}
      ins(%dya, %xa, %rstd : !acc_mn, !acc_mn, !acc_m)
      outs(%zeros_n, %zeros_n : !acc_n, !acc_n) {
  ^bb0(%dy_: !acc, %x_: !acc, %rstd_: !acc, %dg_: !acc, %db_: !acc):
    %xhat = arith.mulf %x_, %rstd_ : !acc
    %dg = arith.mulf %dy_, %xhat : !acc
    %dg1 = arith.addf %dg_, %dg : !acc
    %db1 = arith.addf %db_, %dy_ : !acc
    linalg.yield %dg1, %db1 : !acc, !acc
  } -> (!acc_n, !acc_n)

  // Results are rounded once, at the end, to the types of the caller's arrays.
  %empty_dx = tensor.empty(%rows) : !x_mn
  %empty_dgamma = tensor.empty() : !gamma_n
  %empty_dbeta = tensor.empty() : !beta_n
  %dx = linalg.copy ins(%dx_acc : !acc_mn) outs(%empty_dx : !x_mn) -> !x_mn
  %dgamma = linalg.copy ins(%dgamma_acc : !acc_n) outs(%empty_dgamma : !gamma_n) -> !gamma_n
  %dbeta = linalg.copy ins(%dbeta_acc : !acc_n) outs(%empty_dbeta : !beta_n) -> !beta_n
  %empty_dz = tensor.empty(%rows) : !z_mn
  %dz = linalg.copy ins(%dz_acc : !acc_mn) outs(%empty_dz : !z_mn) -> !z_mn
  return %dx, %dgamma, %dbeta, %dz : !x_mn, !gamma_n, !beta_n, !z_mn
}

// rstd = 1 / sqrt(mean_N(v^2) + eps) of every row, for a caller that has none.
func.func private @statistics(%x: !x_mn, %z: !z_mn) -> !acc_m {
  %zero = arith.constant 0.0 : !acc
  %one = arith.constant 1.0 : !acc
  %inv_n = arith.constant #inv_n
  %eps = arith.constant #eps
  %c0 = arith.constant 0 : index
  %rows = tensor.dim %x, %c0 : !x_mn
  %empty_m = tensor.empty(%rows) : !acc_m
  %zeros_m = linalg.fill ins(%zero : !acc) outs(%empty_m : !acc_m) -> !acc_m
  %empty_mn = tensor.empty(%rows) : !acc_mn
  %x_acc = linalg.copy ins(%x : !x_mn) outs(%empty_mn : !acc_mn) -> !acc_mn
  %z_acc = linalg.copy ins(%z : !z_mn) outs(%empty_mn : !acc_mn) -> !acc_mn
  %gates_first = arith.constant #gates_first
  %xa = linalg.generic {indexing_maps = [#mn, #mn, #mn], iterator_types = ["parallel", "parallel"]}
      ins(%x_acc, %z_acc : !acc_mn, !acc_mn) outs(%empty_mn : !acc_mn) {
  ^bb0(%x_: !acc, %z_: !acc, %unused: !acc):
    %minus_z = arith.negf %z_ : !acc
    %exp = math.exp %minus_z : !acc
    %one_exp = arith.addf %one, %exp : !acc
    %silu_ = arith.divf %z_, %one_exp : !acc
    %product = arith.mulf %x_, %silu_ : !acc
    %v_ = arith.select %gates_first, %product, %x_ : !acc
    linalg.yield %v_ : !acc
  } -> !acc_mn

  %sum_xx = linalg.generic {indexing_maps = [#mn, #m], iterator_types = ["parallel", "reduction"]}
      ins(%xa : !acc_mn) outs(%zeros_m : !acc_m) {
  ^bb0(%x_: !acc, %sum_: !acc):
    %square = arith.mulf %x_, %x_ : !acc
    %sum1 = arith.addf %sum_, %square : !acc
    linalg.yield %sum1 : !acc
  } -> !acc_m
  %rstd = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%sum_xx : !acc_m) outs(%empty_m : !acc_m) {
  ^bb0(%sum_: !acc, %unused: !acc):
    %var = arith.mulf %sum_, %inv_n : !acc
    %var_eps = arith.addf %var, %eps : !acc
    %std = math.sqrt %var_eps : !acc
    %rstd_ = arith.divf %one, %std : !acc
    linalg.yield %rstd_ : !acc
  } -> !acc_m
  return %rstd : !acc_m
}
