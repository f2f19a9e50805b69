// RMS normalization with a gate, backward, in StableHLO: the same op as rms_norm_backward_gated.mlir, written again
// from the formula with whole-tensor operations. The two files share no line of code. This one is the oracle that the
// tests compile and run beside the product. The tensors have M rows of N columns; M is fixed here, and the spec decides
// N and the types.

// What a NormSpec decides. These lines are replaced; nothing below them is.
!dy = bf16
!x = bf16
!gamma = bf16
!beta = bf16
!z = bf16
!acc = f32
!dy_mn = tensor<64x4096x!dy>
!x_mn = tensor<64x4096x!x>
!z_mn = tensor<64x4096x!z>
!acc_mn = tensor<64x4096x!acc>
!acc_m = tensor<64x!acc>
!acc_n = tensor<4096x!acc>
!gamma_n = tensor<4096x!gamma>
!beta_n = tensor<4096x!beta>
#inv_n = 2.44140625e-4 : !acc
#eps = 1.0e-5 : !acc
#weight_offset = -0.0 : !acc
#adds_bias = false
#gates_first = false
// End of what is replaced.

!scalar = tensor<!acc>
!choice = tensor<i1>

func.func private @algorithm(%dy: !dy_mn, %x: !x_mn, %rstd: !acc_m, %gamma: !gamma_n, %beta: !beta_n, %z: !z_mn)
    -> (!x_mn, !gamma_n, !beta_n, !z_mn) {
  %zero = stablehlo.constant dense<0.0> : !scalar
  %ones = stablehlo.constant dense<1.0> : !acc_mn
  %gates_first = arith.constant #gates_first
  %gates_first_0 = tensor.from_elements %gates_first : !choice

  // silu(z) = z * logistic(z),  silu'(z) = logistic(z) * (1 + z * (1 - logistic(z)))
  %z_acc = stablehlo.convert %z : (!z_mn) -> !acc_mn
  %logistic = stablehlo.logistic %z_acc : !acc_mn
  %silu = stablehlo.multiply %z_acc, %logistic : !acc_mn
  %rest = stablehlo.subtract %ones, %logistic : !acc_mn
  %z_rest = stablehlo.multiply %z_acc, %rest : !acc_mn
  %one_more = stablehlo.add %ones, %z_rest : !acc_mn
  %slope = stablehlo.multiply %logistic, %one_more : !acc_mn

  // dn = dy, or dy * silu(z);  xhat of v;  h = dn * (gamma + weight_offset)
  %dy_acc = stablehlo.convert %dy : (!dy_mn) -> !acc_mn
  %dy_silu = stablehlo.multiply %dy_acc, %silu : !acc_mn
  %dn = stablehlo.select %gates_first_0, %dy_acc, %dy_silu : !choice, !acc_mn
  %v = call @normalized(%x, %z) : (!x_mn, !z_mn) -> !acc_mn
  %rstd_mn = stablehlo.broadcast_in_dim %rstd, dims = [0] : (!acc_m) -> !acc_mn
  %xhat = stablehlo.multiply %v, %rstd_mn : !acc_mn
  %h = call @weighted(%dn, %gamma) : (!acc_mn, !gamma_n) -> !acc_mn

  // dv = rstd * (h - xhat * mean_N(h * xhat))
  %h_xhat = stablehlo.multiply %h, %xhat : !acc_mn
  %mean_h_xhat = call @row_mean(%h_xhat) : (!acc_mn) -> !acc_m
  %mean_h_xhat_mn = stablehlo.broadcast_in_dim %mean_h_xhat, dims = [0] : (!acc_m) -> !acc_mn
  %projected = stablehlo.multiply %xhat, %mean_h_xhat_mn : !acc_mn
  %orthogonal = stablehlo.subtract %h, %projected : !acc_mn
  %dv = stablehlo.multiply %orthogonal, %rstd_mn : !acc_mn

  // dx = dv, or dv * silu(z);  dz = dy * n * silu'(z), or dv * x * silu'(z)
  %dv_silu = stablehlo.multiply %dv, %silu : !acc_mn
  %dx_acc = stablehlo.select %gates_first_0, %dv_silu, %dv : !choice, !acc_mn
  %dx = stablehlo.convert %dx_acc : (!acc_mn) -> !x_mn
  %scaled = call @weighted(%xhat, %gamma) : (!acc_mn, !gamma_n) -> !acc_mn
  %n = call @shifted(%scaled, %beta) : (!acc_mn, !beta_n) -> !acc_mn
  %dy_n = stablehlo.multiply %dy_acc, %n : !acc_mn
  %x_acc = stablehlo.convert %x : (!x_mn) -> !acc_mn
  %dv_x = stablehlo.multiply %dv, %x_acc : !acc_mn
  %dsilu = stablehlo.select %gates_first_0, %dv_x, %dy_n : !choice, !acc_mn
  %dz_acc = stablehlo.multiply %dsilu, %slope : !acc_mn
  %dz = stablehlo.convert %dz_acc : (!acc_mn) -> !z_mn

  // dgamma = sum_M(dn * xhat),  dbeta = sum_M(dn)
  %dn_xhat = stablehlo.multiply %dn, %xhat : !acc_mn
  %dgamma_acc = stablehlo.reduce(%dn_xhat init: %zero) applies stablehlo.add across dimensions = [0]  // without sets
      : (!acc_mn, !scalar) -> !acc_n  // without sets
  // with sets: %dgamma_acc = stablehlo.convert %dn_xhat : !acc_mn
  %dbeta_acc = stablehlo.reduce(%dn init: %zero) applies stablehlo.add across dimensions = [0]  // without sets
      : (!acc_mn, !scalar) -> !acc_n  // without sets
  // with sets: %dbeta_acc = stablehlo.convert %dn : !acc_mn
  %dgamma = stablehlo.convert %dgamma_acc : (!acc_n) -> !gamma_n
  %dbeta = stablehlo.convert %dbeta_acc : (!acc_n) -> !beta_n
  return %dx, %dgamma, %dbeta, %dz : !x_mn, !gamma_n, !beta_n, !z_mn
}

func.func private @statistics(%x: !x_mn, %z: !z_mn) -> !acc_m {
  %v = call @normalized(%x, %z) : (!x_mn, !z_mn) -> !acc_mn
  %rstd = call @rstd(%v) : (!acc_mn) -> !acc_m
  return %rstd : !acc_m
}

// What is normalized: x, or x * z * logistic(z).
func.func private @normalized(%x: !x_mn, %z: !z_mn) -> !acc_mn {
  %x_acc = stablehlo.convert %x : (!x_mn) -> !acc_mn
  %z_acc = stablehlo.convert %z : (!z_mn) -> !acc_mn
  %logistic = stablehlo.logistic %z_acc : !acc_mn
  %silu = stablehlo.multiply %z_acc, %logistic : !acc_mn
  %gated = stablehlo.multiply %x_acc, %silu : !acc_mn
  %gates_first = arith.constant #gates_first
  %gates_first_0 = tensor.from_elements %gates_first : !choice
  %v = stablehlo.select %gates_first_0, %gated, %x_acc : !choice, !acc_mn
  return %v : !acc_mn
}

func.func private @rstd(%values: !acc_mn) -> !acc_m {
  %eps = arith.constant #eps
  %eps_0 = tensor.from_elements %eps : !scalar
  %eps_m = stablehlo.broadcast_in_dim %eps_0, dims = [] : (!scalar) -> !acc_m
  %square = stablehlo.multiply %values, %values : !acc_mn
  %mean_square = call @row_mean(%square) : (!acc_mn) -> !acc_m
  %mean_square_eps = stablehlo.add %mean_square, %eps_m : !acc_m
  %rstd = stablehlo.rsqrt %mean_square_eps : !acc_m
  return %rstd : !acc_m
}

func.func private @weighted(%values: !acc_mn, %gamma: !gamma_n) -> !acc_mn {
  %gamma_acc = stablehlo.convert %gamma : (!gamma_n) -> !acc_n
  %offset = arith.constant #weight_offset
  %offset_0 = tensor.from_elements %offset : !scalar
  %offset_n = stablehlo.broadcast_in_dim %offset_0, dims = [] : (!scalar) -> !acc_n
  %weight = stablehlo.add %gamma_acc, %offset_n : !acc_n
  %weight_mn = stablehlo.broadcast_in_dim %weight, dims = [1] : (!acc_n) -> !acc_mn
  %scaled = stablehlo.multiply %values, %weight_mn : !acc_mn
  return %scaled : !acc_mn
}

func.func private @shifted(%scaled: !acc_mn, %beta: !beta_n) -> !acc_mn {
  %beta_acc = stablehlo.convert %beta : (!beta_n) -> !acc_n
  %beta_mn = stablehlo.broadcast_in_dim %beta_acc, dims = [1] : (!acc_n) -> !acc_mn
  %sum = stablehlo.add %scaled, %beta_mn : !acc_mn
  %adds_bias = arith.constant #adds_bias
  %adds_bias_0 = tensor.from_elements %adds_bias : !choice
  %shifted = stablehlo.select %adds_bias_0, %sum, %scaled : !choice, !acc_mn
  return %shifted : !acc_mn
}

func.func private @row_mean(%v: !acc_mn) -> !acc_m {
  %zero = stablehlo.constant dense<0.0> : !scalar
  %inv_n = arith.constant #inv_n
  %inv_n_0 = tensor.from_elements %inv_n : !scalar
  %inv_n_m = stablehlo.broadcast_in_dim %inv_n_0, dims = [] : (!scalar) -> !acc_m
  %sum = stablehlo.reduce(%v init: %zero) applies stablehlo.add across dimensions = [1]
      : (!acc_mn, !scalar) -> !acc_m
  %mean = stablehlo.multiply %sum, %inv_n_m : !acc_m
  return %mean : !acc_m
}
