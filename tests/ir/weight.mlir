// Without a weight gamma is one, no multiplication by it is left, and there is no dgamma.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=1000 --no-weight --whole-tensors --target=generic > %t.mlir
// RUN: filecheck %s --input-file=%t.mlir
// RUN: iree-lnbwd compile --print-command --normalized-shape=1000 --no-weight --target=generic | %{to-flow} > %t.sh
// RUN: sh %t.sh < %t.mlir | filecheck %s --check-prefix=FLOW

// CHECK-LABEL: util.func public @layer_norm_backward(
// CHECK-NEXT: %in_dy: !hal.buffer_view,
// CHECK-NEXT: %in_x: !hal.buffer_view,
// CHECK-NEXT: %in_mean: !hal.buffer_view,
// CHECK-NEXT: %in_rstd: !hal.buffer_view,
// CHECK-NEXT: %out_dx: !hal.buffer_view,
// CHECK-NEXT: %out_dbeta: !hal.buffer_view)
// CHECK: %gamma = arith.constant dense<1.0> : !gamma_n
// CHECK: util.return %dx_view, %dbeta_view

// The row sums see no gamma: sum_N(dy) and sum_N(dy * xhat).
// FLOW: iterator_types = ["parallel", "reduction"]
// FLOW-SAME: outs(%[[ZEROS:.+]], %[[ZEROS]] : tensor<?xf32>, tensor<?xf32>)
// FLOW-NEXT: ^bb0(%[[DY:.+]]: f32, %[[X:.+]]: f32, %[[MEAN:.+]]: f32, %[[RSTD:.+]]: f32, %[[SUM_H:.+]]: f32, %[[SUM_HX:.+]]: f32):
// FLOW-NEXT: %[[CENTRED:.+]] = arith.subf %[[X]], %[[MEAN]] : f32
// FLOW-NEXT: %[[XHAT:.+]] = arith.mulf %[[CENTRED]], %[[RSTD]] : f32
// FLOW-NEXT: %[[HX:.+]] = arith.mulf %[[DY]], %[[XHAT]] : f32
// FLOW-NEXT: arith.addf %[[SUM_H]], %[[DY]] : f32
// FLOW-NEXT: arith.addf %[[SUM_HX]], %[[HX]] : f32
