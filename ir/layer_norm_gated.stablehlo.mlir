// Layer normalization with a gate, in StableHLO: the same op as layer_norm_gated.mlir, written again
// from the formula with whole-tensor operations. The two files share no line of code. This one is the oracle that the
// tests compile and run beside the product. The tensors have M rows of N columns; M is fixed here, and the spec decides
// N and the types.

// What a NormSpec decides. These lines are replaced; nothing below them is.
!x = bf16
!y = bf16
!gamma = bf16
!beta = bf16
!z = bf16
!acc = f32
!x_mn = tensor<64x4096x!x>
!y_mn = tensor<64x4096x!y>
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

func.func private @algorithm(%x: !x_mn, %gamma: !gamma_n, %beta: !beta_n, %z: !z_mn) -> (!y_mn, !acc_m, !acc_m) {
  // v, mean_N(v), rstd, and xhat
  %v = call @normalized(%x, %z) : (!x_mn, !z_mn) -> !acc_mn
  %mean = call @row_mean(%v) : (!acc_mn) -> !acc_m
  %mean_mn = stablehlo.broadcast_in_dim %mean, dims = [0] : (!acc_m) -> !acc_mn
  %centred = stablehlo.subtract %v, %mean_mn : !acc_mn
  %rstd = call @rstd(%centred) : (!acc_mn) -> !acc_m
  %rstd_mn = stablehlo.broadcast_in_dim %rstd, dims = [0] : (!acc_m) -> !acc_mn
  %xhat = stablehlo.multiply %centred, %rstd_mn : !acc_mn

  // n = xhat * (gamma + weight_offset) + beta, and y
  %scaled = call @weighted(%xhat, %gamma) : (!acc_mn, !gamma_n) -> !acc_mn
  %n = call @shifted(%scaled, %beta) : (!acc_mn, !beta_n) -> !acc_mn
  %z_acc = stablehlo.convert %z : (!z_mn) -> !acc_mn
  %logistic = stablehlo.logistic %z_acc : !acc_mn
  %silu = stablehlo.multiply %z_acc, %logistic : !acc_mn
  %gated = stablehlo.multiply %n, %silu : !acc_mn
  %gates_first = arith.constant #gates_first
  %gates_first_0 = tensor.from_elements %gates_first : !choice
  %y_acc = stablehlo.select %gates_first_0, %n, %gated : !choice, !acc_mn
  %y = stablehlo.convert %y_acc : (!acc_mn) -> !y_mn
  return %y, %mean, %rstd : !y_mn, !acc_m, !acc_m
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
