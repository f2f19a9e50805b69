// The gradients go to storage that the caller passes after the other arguments, in ATen's order.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=bf16 --weight-dtype=f32 --target=generic > %t.mlir
// RUN: filecheck %s --input-file=%t.mlir
// RUN: iree-lnbwd compile --print-command --normalized-shape=4096 --dtype=bf16 --weight-dtype=f32 --target=generic | %{to-flow} > %t.sh
// RUN: sh %t.sh < %t.mlir | filecheck %s --check-prefix=FLOW

// CHECK-LABEL: func.func @layer_norm_backward(
// CHECK-NEXT: %dy: !dy_mn,
// CHECK-NEXT: %x: !x_mn,
// CHECK-NEXT: %mean: !acc_m,
// CHECK-NEXT: %rstd: !acc_m,
// CHECK-NEXT: %gamma: !gamma_n,
// CHECK-NEXT: %out_dx: !x_mn {iree.abi.output = 0 : index},
// CHECK-NEXT: %out_dgamma: !gamma_n {iree.abi.output = 1 : index},
// CHECK-NEXT: %out_dbeta: !beta_n {iree.abi.output = 2 : index})
// CHECK-NEXT: -> (!x_mn, !gamma_n, !beta_n)
// CHECK: call @algorithm(%dy, %x, %mean, %rstd, %gamma, %x)
// CHECK: return %dx, %dgamma, %dbeta : !x_mn, !gamma_n, !beta_n

// Every result of a dispatch is tied to the caller's buffer, and what is returned is that buffer.
// FLOW-LABEL: func public @layer_norm_backward(
// FLOW-SAME: %arg4: !hal.buffer_view, %[[OUT_DX:.+]]: !hal.buffer_view, %[[OUT_DGAMMA:.+]]: !hal.buffer_view, %[[OUT_DBETA:.+]]: !hal.buffer_view) ->
// FLOW: %[[DX:.+]] = hal.tensor.alias %{{.+}} : tensor<?x4096xbf16>{%{{.+}}} to %[[OUT_DX]] : !hal.buffer_view
// FLOW: %[[DGAMMA:.+]] = hal.tensor.alias %{{.+}} : tensor<4096xf32> to %[[OUT_DGAMMA]] : !hal.buffer_view
// FLOW: %[[DBETA:.+]] = hal.tensor.alias %{{.+}} : tensor<4096xf32> to %[[OUT_DBETA]] : !hal.buffer_view
// FLOW: %[[VIEW_DX:.+]] = hal.tensor.export %[[DX]] "output0"
// FLOW: %[[VIEW_DGAMMA:.+]] = hal.tensor.export %[[DGAMMA]] "output1"
// FLOW: %[[VIEW_DBETA:.+]] = hal.tensor.export %[[DBETA]] "output2"
// FLOW: return %[[VIEW_DX]], %[[VIEW_DGAMMA]], %[[VIEW_DBETA]]
