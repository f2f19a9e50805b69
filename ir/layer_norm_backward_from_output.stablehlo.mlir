// Layer normalization, backward, from the forward's output, in StableHLO: the same op as
// layer_norm_backward_from_output.mlir, written again from the formula with whole-tensor operations. The
// two files share no line of code. This one is the oracle that the tests compile and run beside the
// product. The tensors have M rows of N columns; M is fixed here, and the spec decides N and the types.

// What a NormSpec decides. These lines are replaced; nothing below them is.
!dy = bf16
!x = bf16
!gamma = bf16
!beta = bf16
!residual = bf16
!acc = f32
!dy_sum = bf16
!dy_mn = tensor<64x4096x!dy>
!dy_sum_mn = tensor<64x4096x!dy_sum>
!x_mn = tensor<64x4096x!x>
!residual_mn = tensor<64x4096x!residual>
!acc_mn = tensor<64x4096x!acc>
!acc_m = tensor<64x!acc>
!acc_n = tensor<4096x!acc>
!gamma_n = tensor<4096x!gamma>
!beta_n = tensor<4096x!beta>
!lanes_n = tensor<4096xi1>
#inv_n = 2.44140625e-4 : !acc
#weight_offset = -0.0 : !acc
#least_weight = 1.0e-5 : !acc
#adds_residual = false
#has_dy2 = false
#has_dy3 = false
#has_dy4 = false
// End of what is replaced.

!scalar = tensor<!acc>
!choice = tensor<i1>

func.func private @algorithm(%dy: !dy_mn, %y: !x_mn, %rstd: !acc_m, %gamma: !gamma_n, %beta: !beta_n, %dresidual: !residual_mn,
    %dy2: !dy_mn, %dy3: !dy_mn, %dy4: !dy_mn)
    -> (!x_mn, !gamma_n, !beta_n) {  // without totals  // without copies
    // with totals: -> (!x_mn, !gamma_n, !beta_n, !total_n) {
    // with copies: -> (!x_mn, !gamma_n, !beta_n, !copy_mn) {
  %zero = stablehlo.constant dense<0.0> : !scalar

  %first = stablehlo.convert %dy : (!dy_mn) -> !acc_mn
  %has_dy2 = arith.constant #has_dy2
  %of_two = call @with_dy(%first, %dy2, %has_dy2) : (!acc_mn, !dy_mn, i1) -> !acc_mn
  %has_dy3 = arith.constant #has_dy3
  %of_three = call @with_dy(%of_two, %dy3, %has_dy3) : (!acc_mn, !dy_mn, i1) -> !acc_mn
  %has_dy4 = arith.constant #has_dy4
  %dy_acc = call @with_dy(%of_three, %dy4, %has_dy4) : (!acc_mn, !dy_mn, i1) -> !acc_mn
  %gamma_acc = stablehlo.convert %gamma : (!gamma_n) -> !acc_n
  %offset = arith.constant #weight_offset
  %offset_0 = tensor.from_elements %offset : !scalar
  %offset_n = stablehlo.broadcast_in_dim %offset_0, dims = [] : (!scalar) -> !acc_n
  %weight = stablehlo.add %gamma_acc, %offset_n : !acc_n
  %weight_mn = stablehlo.broadcast_in_dim %weight, dims = [1] : (!acc_n) -> !acc_mn
  %rstd_mn = stablehlo.broadcast_in_dim %rstd, dims = [0] : (!acc_m) -> !acc_mn

  // xhat = (y - beta) / (sign(weight) * max(|weight|, least)), where zeros have a sign
  %y_acc = stablehlo.convert %y : (!x_mn) -> !acc_mn
  %beta_acc = stablehlo.convert %beta : (!beta_n) -> !acc_n
  %beta_mn = stablehlo.broadcast_in_dim %beta_acc, dims = [1] : (!acc_n) -> !acc_mn
  %without_beta = stablehlo.subtract %y_acc, %beta_mn : !acc_mn
  %divisor = call @away_from_zero(%weight) : (!acc_n) -> !acc_n
  %divisor_mn = stablehlo.broadcast_in_dim %divisor, dims = [1] : (!acc_n) -> !acc_mn
  %xhat = stablehlo.divide %without_beta, %divisor_mn : !acc_mn

  // h = dy * weight, mean_N(h), mean_N(h * xhat)
  %h = stablehlo.multiply %dy_acc, %weight_mn : !acc_mn
  %h_xhat = stablehlo.multiply %h, %xhat : !acc_mn
  %mean_h_mn = call @row_mean(%h) : (!acc_mn) -> !acc_mn
  %mean_h_xhat_mn = call @row_mean(%h_xhat) : (!acc_mn) -> !acc_mn

  // dx = rstd * (h - mean_N(h) - xhat * mean_N(h * xhat)) + dresidual
  %projected = stablehlo.multiply %xhat, %mean_h_xhat_mn : !acc_mn
  %without_mean = stablehlo.subtract %h, %mean_h_mn : !acc_mn
  %orthogonal = stablehlo.subtract %without_mean, %projected : !acc_mn
  %scaled = stablehlo.multiply %orthogonal, %rstd_mn : !acc_mn
  %dresidual_acc = stablehlo.convert %dresidual : (!residual_mn) -> !acc_mn
  %joined = stablehlo.add %scaled, %dresidual_acc : !acc_mn
  %adds_residual = arith.constant #adds_residual
  %adds_residual_0 = tensor.from_elements %adds_residual : !choice
  %dx_acc = stablehlo.select %adds_residual_0, %joined, %scaled : !choice, !acc_mn
  %dx = stablehlo.convert %dx_acc : (!acc_mn) -> !x_mn

  // dgamma = sum_M(dy * xhat),  dbeta = sum_M(dy)
  %dy_xhat = stablehlo.multiply %dy_acc, %xhat : !acc_mn
  %dgamma_acc = stablehlo.reduce(%dy_xhat init: %zero) applies stablehlo.add across dimensions = [0]  // without sets
      : (!acc_mn, !scalar) -> !acc_n  // without sets
  // with sets: %dgamma_acc = stablehlo.convert %dy_xhat : !acc_mn
  %dbeta_acc = stablehlo.reduce(%dy_acc init: %zero) applies stablehlo.add across dimensions = [0]  // without sets
      : (!acc_mn, !scalar) -> !acc_n  // without sets
  // with sets: %dbeta_acc = stablehlo.convert %dy_acc : !acc_mn
  %dgamma = stablehlo.convert %dgamma_acc : (!acc_n) -> !gamma_n
  %dbeta = stablehlo.convert %dbeta_acc : (!acc_n) -> !beta_n
  return %dx, %dgamma, %dbeta : !x_mn, !gamma_n, !beta_n  // without totals  // without copies
  // with totals: %total_acc = stablehlo.reduce(%dx_acc init: %zero) applies stablehlo.add across dimensions = [0]
  // with totals:     : (!acc_mn, !scalar) -> !acc_n
  // with totals: %total = stablehlo.convert %total_acc : (!acc_n) -> !total_n
  // with totals: return %dx, %dgamma, %dbeta, %total : !x_mn, !gamma_n, !beta_n, !total_n
  // with copies: %dx_copy = stablehlo.convert %dx_acc : (!acc_mn) -> !copy_mn
  // with copies: return %dx, %dgamma, %dbeta, %dx_copy : !x_mn, !gamma_n, !beta_n, !copy_mn
}

// One more gradient of the output, if there is one: the sum has the output's type.
func.func private @with_dy(%before: !acc_mn, %more: !dy_mn, %is_there: i1) -> !acc_mn {
  %after = scf.if %is_there -> !acc_mn {
    %more_acc = stablehlo.convert %more : (!dy_mn) -> !acc_mn
    %both = stablehlo.add %before, %more_acc : !acc_mn
    %rounded = stablehlo.convert %both : (!acc_mn) -> !dy_sum_mn
    %stored = util.optimization_barrier %rounded : !dy_sum_mn
    %read = stablehlo.convert %stored : (!dy_sum_mn) -> !acc_mn
    scf.yield %read : !acc_mn
  } else {
    scf.yield %before : !acc_mn
  }
  return %after : !acc_mn
}

func.func private @away_from_zero(%weight: !acc_n) -> !acc_n {
  %least = arith.constant #least_weight
  %least_0 = tensor.from_elements %least : !scalar
  %least_n = stablehlo.broadcast_in_dim %least_0, dims = [] : (!scalar) -> !acc_n
  %minus_least_n = stablehlo.negate %least_n : !acc_n
  %zero = stablehlo.constant dense<0.0> : !scalar
  %zero_n = stablehlo.broadcast_in_dim %zero, dims = [] : (!scalar) -> !acc_n
  %above = stablehlo.maximum %weight, %least_n : !acc_n
  %below = stablehlo.minimum %weight, %minus_least_n : !acc_n
  %one = stablehlo.constant dense<1.0> : !scalar
  %one_n = stablehlo.broadcast_in_dim %one, dims = [] : (!scalar) -> !acc_n
  %inverse = stablehlo.divide %one_n, %weight : !acc_n  // of -0: -Inf
  %is_below = stablehlo.compare LT, %weight, %zero_n : (!acc_n, !acc_n) -> !lanes_n
  %inverse_is_below = stablehlo.compare LT, %inverse, %zero_n : (!acc_n, !acc_n) -> !lanes_n
  %is_negative = stablehlo.or %is_below, %inverse_is_below : !lanes_n
  %divisor = stablehlo.select %is_negative, %below, %above : !lanes_n, !acc_n
  return %divisor : !acc_n
}

// A row's mean, in each of its columns.
func.func private @row_mean(%v: !acc_mn) -> !acc_mn {
  %zero = stablehlo.constant dense<0.0> : !scalar
  %inv_n = arith.constant #inv_n
  %inv_n_0 = tensor.from_elements %inv_n : !scalar
  %inv_n_m = stablehlo.broadcast_in_dim %inv_n_0, dims = [] : (!scalar) -> !acc_m
  %sum = stablehlo.reduce(%v init: %zero) applies stablehlo.add across dimensions = [1]
      : (!acc_mn, !scalar) -> !acc_m
  %mean = stablehlo.multiply %sum, %inv_n_m : !acc_m
  %mean_mn = stablehlo.broadcast_in_dim %mean, dims = [0] : (!acc_m) -> !acc_mn
  return %mean_mn : !acc_mn
}
