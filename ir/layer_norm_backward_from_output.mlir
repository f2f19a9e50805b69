// Layer normalization, backward, from the forward's output y in place of its input: the algorithm on whole
// tensors, for no particular target and without a schedule. The tensors have M rows of N columns.
//
//   xhat   = (y - beta) / g'                               g' is g, or +-#least_weight if g is smaller
//   h      = dy * g                                        g = gamma + weight_offset
//   dx     = rstd * (h - mean_N(h) - xhat * mean_N(h * xhat)) + dresidual     row sums
//   dgamma = sum_M(dy * xhat)                                                 column sums
//   dbeta  = sum_M(dy)
//
// An output does not tell rstd. It was rounded; where g is small, much of xhat is lost with that.
// Every sum is an !acc, for data of any type. A spec without a beta gives zeros. One without dresidual
// gives another tensor in its place, and does not add it. The output may have up to four gradients, which are added up to dy one after the
// other, each sum rounded to !dy_sum; a spec with fewer gives another tensor for the others, too.

// What a NormSpec decides. These lines are replaced; nothing below them is.
!dy = bf16
!x = bf16
!gamma = bf16
!beta = bf16
!residual = bf16
!acc = f32
!dy_sum = bf16
!dy_mn = tensor<?x4096x!dy>
!dy_sum_mn = tensor<?x4096x!dy_sum>
!x_mn = tensor<?x4096x!x>
!residual_mn = tensor<?x4096x!residual>
!acc_mn = tensor<?x4096x!acc>
!acc_m = tensor<?x!acc>
!acc_n = tensor<4096x!acc>
!gamma_n = tensor<4096x!gamma>
!beta_n = tensor<4096x!beta>
#inv_n = 2.44140625e-4 : !acc
#weight_offset = -0.0 : !acc  // added to gamma; -0.0 changes no number
#adds_residual = false        // dresidual is added
#has_dy2 = false              // the output has a second gradient, which is added to dy
#has_dy3 = false
#has_dy4 = false
#least_weight = 1.0e-5 : !acc // of what an output is divided by
// End of what is replaced.

#mn = affine_map<(m, n) -> (m, n)>
#m  = affine_map<(m, n) -> (m)>
#n  = affine_map<(m, n) -> (n)>  // without sets
// with sets: #n  = affine_map<(m, n) -> (m, n)>
// Column sums: IREE wants a reduction's parallel dimensions first.
#nm_mn = affine_map<(n, m) -> (m, n)>
#nm_n  = affine_map<(n, m) -> (n)>  // without sets
// with sets: #nm_n  = affine_map<(n, m) -> (m, n)>
#id = affine_map<(n) -> (n)>

func.func private @algorithm(%dy: !dy_mn, %y: !x_mn, %rstd: !acc_m, %gamma: !gamma_n, %beta: !beta_n, %dresidual: !residual_mn,
    %dy2: !dy_mn, %dy3: !dy_mn, %dy4: !dy_mn)
    -> (!x_mn, !gamma_n, !beta_n) {  // without totals  // without copies
    // with totals: -> (!x_mn, !gamma_n, !beta_n, !total_n) {
    // with copies: -> (!x_mn, !gamma_n, !beta_n, !copy_mn) {
  %zero = arith.constant 0.0 : !acc
  %inv_n = arith.constant #inv_n
  %offset = arith.constant #weight_offset
  %least = arith.constant #least_weight
  %adds_residual = arith.constant #adds_residual
  %c0 = arith.constant 0 : index
  %rows = tensor.dim %y, %c0 : !x_mn

  %empty_mn = tensor.empty(%rows) : !acc_mn
  %empty_n = tensor.empty() : !acc_n
  %dya_1 = linalg.copy ins(%dy : !dy_mn) outs(%empty_mn : !acc_mn) -> !acc_mn
  %has_dy2 = arith.constant #has_dy2
  %dya_2 = call @plus_dy(%dya_1, %dy2, %has_dy2) : (!acc_mn, !dy_mn, i1) -> !acc_mn
  %has_dy3 = arith.constant #has_dy3
  %dya_3 = call @plus_dy(%dya_2, %dy3, %has_dy3) : (!acc_mn, !dy_mn, i1) -> !acc_mn
  %has_dy4 = arith.constant #has_dy4
  %dya = call @plus_dy(%dya_3, %dy4, %has_dy4) : (!acc_mn, !dy_mn, i1) -> !acc_mn
  %ya = linalg.copy ins(%y : !x_mn) outs(%empty_mn : !acc_mn) -> !acc_mn
  %gamma_acc = linalg.copy ins(%gamma : !gamma_n) outs(%empty_n : !acc_n) -> !acc_n
  %ba = linalg.copy ins(%beta : !beta_n) outs(%empty_n : !acc_n) -> !acc_n
  %dra = linalg.copy ins(%dresidual : !residual_mn) outs(%empty_mn : !acc_mn) -> !acc_mn

  // The weight, and g'.
  %ga, %divisor = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel"]}  // without sets
  // with sets: %ga, %divisor = linalg.generic {indexing_maps = [#mn, #mn, #mn], iterator_types = ["parallel", "parallel"]}
      ins(%gamma_acc : !acc_n) outs(%empty_n, %empty_n : !acc_n, !acc_n) {
  ^bb0(%gamma_: !acc, %unused_g: !acc, %unused_divisor: !acc):
    %g = arith.addf %gamma_, %offset : !acc
    %size = math.absf %g : !acc
    %is_small = arith.cmpf olt, %size, %least : !acc
    %signed_least = math.copysign %least, %g : !acc
    %divisor_ = arith.select %is_small, %signed_least, %g : !acc
    linalg.yield %g, %divisor_ : !acc, !acc
  } -> (!acc_n, !acc_n)

  %xhat = linalg.generic {indexing_maps = [#mn, #n, #n, #mn], iterator_types = ["parallel", "parallel"]}
      ins(%ya, %ba, %divisor : !acc_mn, !acc_n, !acc_n) outs(%empty_mn : !acc_mn) {
  ^bb0(%y_: !acc, %beta_: !acc, %divisor_: !acc, %unused: !acc):
    %scaled = arith.subf %y_, %beta_ : !acc
    %xhat_ = arith.divf %scaled, %divisor_ : !acc
    linalg.yield %xhat_ : !acc
  } -> !acc_mn

  // Row sums: sum_N(h) and sum_N(h * xhat).
  %empty_m = tensor.empty(%rows) : !acc_m
  %zeros_m = linalg.fill ins(%zero : !acc) outs(%empty_m : !acc_m) -> !acc_m
  %sum_h, %sum_hx = linalg.generic {
      indexing_maps = [#mn, #mn, #n, #m, #m], iterator_types = ["parallel", "reduction"]}
      ins(%dya, %xhat, %ga : !acc_mn, !acc_mn, !acc_n) outs(%zeros_m, %zeros_m : !acc_m, !acc_m) {
  ^bb0(%dy_: !acc, %xhat_: !acc, %g: !acc, %h_: !acc, %hx_: !acc):
    %h = arith.mulf %dy_, %g : !acc
    %hx = arith.mulf %h, %xhat_ : !acc
    %h1 = arith.addf %h_, %h : !acc
    %hx1 = arith.addf %hx_, %hx : !acc
    linalg.yield %h1, %hx1 : !acc, !acc
  } -> (!acc_m, !acc_m)

  // dx, from the row sums.
  %dx_acc = linalg.generic {
      indexing_maps = [#mn, #mn, #m, #n, #m, #m, #mn, #mn], iterator_types = ["parallel", "parallel"]}
      ins(%dya, %xhat, %rstd, %ga, %sum_h, %sum_hx, %dra
          : !acc_mn, !acc_mn, !acc_m, !acc_n, !acc_m, !acc_m, !acc_mn)
      outs(%empty_mn : !acc_mn) {
  ^bb0(%dy_: !acc, %xhat_: !acc, %rstd_: !acc, %g: !acc, %h_: !acc, %hx_: !acc, %dr_: !acc, %unused: !acc):
    %h = arith.mulf %dy_, %g : !acc
    %mean_h = arith.mulf %h_, %inv_n : !acc
    %mean_hx = arith.mulf %hx_, %inv_n : !acc
    %t0 = arith.subf %h, %mean_h : !acc
    %t1 = arith.mulf %xhat_, %mean_hx : !acc
    %t2 = arith.subf %t0, %t1 : !acc
    %through = arith.mulf %t2, %rstd_ : !acc
    %with_residual = arith.addf %through, %dr_ : !acc
    %dxa = arith.select %adds_residual, %with_residual, %through : !acc
    linalg.yield %dxa : !acc
  } -> !acc_mn

  // Column sums: dgamma and dbeta, in !acc.
  %zeros_n = linalg.fill ins(%zero : !acc) outs(%empty_n : !acc_n) -> !acc_n
  %dgamma_acc, %dbeta_acc = linalg.generic {
      indexing_maps = [#nm_mn, #nm_mn, #nm_n, #nm_n], iterator_types = ["parallel", "reduction"]}  // without sets
      // with sets: indexing_maps = [#nm_mn, #nm_mn, #nm_n, #nm_n], iterator_types = ["parallel", "parallel"]}
      ins(%dya, %xhat : !acc_mn, !acc_mn) outs(%zeros_n, %zeros_n : !acc_n, !acc_n) {
  ^bb0(%dy_: !acc, %xhat_: !acc, %dg_: !acc, %db_: !acc):
    %dg = arith.mulf %dy_, %xhat_ : !acc
    %dg1 = arith.addf %dg_, %dg : !acc
    %db1 = arith.addf %db_, %dy_ : !acc
    linalg.yield %dg1, %db1 : !acc, !acc
  } -> (!acc_n, !acc_n)

  %empty_dx = tensor.empty(%rows) : !x_mn
  %empty_dgamma = tensor.empty() : !gamma_n
  %empty_dbeta = tensor.empty() : !beta_n
  %dx = linalg.copy ins(%dx_acc : !acc_mn) outs(%empty_dx : !x_mn) -> !x_mn
  %dgamma = linalg.copy ins(%dgamma_acc : !acc_n) outs(%empty_dgamma : !gamma_n) -> !gamma_n
  %dbeta = linalg.copy ins(%dbeta_acc : !acc_n) outs(%empty_dbeta : !beta_n) -> !beta_n
  return %dx, %dgamma, %dbeta : !x_mn, !gamma_n, !beta_n  // without totals  // without copies
  // with totals: %total_acc = linalg.generic {indexing_maps = [#nm_mn, #nm_n], iterator_types = ["parallel", "reduction"]}
  // with totals:     ins(%dx_acc : !acc_mn) outs(%zeros_n : !acc_n) {
  // with totals: ^bb0(%dx_: !acc, %total_: !acc):
  // with totals:   %total1 = arith.addf %total_, %dx_ : !acc
  // with totals:   linalg.yield %total1 : !acc
  // with totals: } -> !acc_n
  // with totals: %empty_total = tensor.empty() : !total_n
  // with totals: %total = linalg.copy ins(%total_acc : !acc_n) outs(%empty_total : !total_n) -> !total_n
  // with totals: return %dx, %dgamma, %dbeta, %total : !x_mn, !gamma_n, !beta_n, !total_n
  // with copies: %empty_copy = tensor.empty(%rows) : !copy_mn
  // with copies: %dx_copy = linalg.copy ins(%dx_acc : !acc_mn) outs(%empty_copy : !copy_mn) -> !copy_mn
  // with copies: return %dx, %dgamma, %dbeta, %dx_copy : !x_mn, !gamma_n, !beta_n, !copy_mn
}

// A sum of gradients of the output and one more, rounded as an addition rounds it. Without the barrier, IREE
// drops a rounding to bf16 whose result is widened at once.
func.func private @plus_dy(%sum: !acc_mn, %more: !dy_mn, %counts: i1) -> !acc_mn {
  %after = scf.if %counts -> !acc_mn {
    %c0 = arith.constant 0 : index
    %rows = tensor.dim %more, %c0 : !dy_mn
    %empty_mn = tensor.empty(%rows) : !acc_mn
    %empty_sum = tensor.empty(%rows) : !dy_sum_mn
    %wide = linalg.copy ins(%more : !dy_mn) outs(%empty_mn : !acc_mn) -> !acc_mn
    %exact = linalg.generic {indexing_maps = [#mn, #mn, #mn], iterator_types = ["parallel", "parallel"]}
        ins(%sum, %wide : !acc_mn, !acc_mn) outs(%empty_mn : !acc_mn) {
    ^bb0(%sum_: !acc, %more_: !acc, %unused: !acc):
      %both_ = arith.addf %sum_, %more_ : !acc
      linalg.yield %both_ : !acc
    } -> !acc_mn
    %rounded = linalg.copy ins(%exact : !acc_mn) outs(%empty_sum : !dy_sum_mn) -> !dy_sum_mn
    %stored = util.optimization_barrier %rounded : !dy_sum_mn
    %sized = flow.tensor.tie_shape %stored : !dy_sum_mn{%rows}
    %both = linalg.copy ins(%sized : !dy_sum_mn) outs(%empty_mn : !acc_mn) -> !acc_mn
    scf.yield %both : !acc_mn
  } else {
    scf.yield %sum : !acc_mn
  }
  return %after : !acc_mn
}
