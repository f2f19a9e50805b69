// The gradients go to storage that the caller passes after the other arguments, in ATen's order.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=bf16 --weight-dtype=f32 --target=generic > %t.mlir
// RUN: filecheck %s --input-file=%t.mlir
// RUN: iree-lnbwd compile --print-command --normalized-shape=4096 --dtype=bf16 --weight-dtype=f32 --target=generic | %{to-flow} > %t.sh
// RUN: sh %t.sh < %t.mlir | filecheck %s --check-prefix=FLOW

// CHECK-LABEL: util.func public @layer_norm_backward(
// CHECK-NEXT: %in_dy: !hal.buffer_view,
// CHECK-NEXT: %in_x: !hal.buffer_view,
// CHECK-NEXT: %in_mean: !hal.buffer_view,
// CHECK-NEXT: %in_rstd: !hal.buffer_view,
// CHECK-NEXT: %in_gamma: !hal.buffer_view,
// CHECK-NEXT: %out_dx: !hal.buffer_view,
// CHECK-NEXT: %out_dgamma: !hal.buffer_view,
// CHECK-NEXT: %out_dbeta: !hal.buffer_view)
// CHECK-NEXT: -> (!hal.buffer_view, !hal.buffer_view, !hal.buffer_view)
// CHECK: %dx, %partial_dgamma, %partial_dbeta = flow.dispatch @rows::@rows[%rows_workgroups](%rows_0, %rows_1, %dy, %x, %mean, %rstd, %gamma)
// CHECK: %dgamma, %dbeta = flow.dispatch @finalize::@finalize[%m](%finalize_0, %partial_dgamma, %partial_dbeta)
// CHECK: hal.tensor.alias %dx : !x_mn{%m} to %out_dx
// CHECK: hal.tensor.alias %dgamma : !gamma_n to %out_dgamma
// CHECK: hal.tensor.alias %dbeta : !beta_n to %out_dbeta
// CHECK: util.return %dx_view, %dgamma_view, %dbeta_view

// Every result of a dispatch is tied to the caller's buffer, and what is returned is that buffer.
// FLOW-LABEL: func public @layer_norm_backward(
// FLOW-SAME: %arg4: !hal.buffer_view, %[[OUT_DX:.+]]: !hal.buffer_view, %[[OUT_DGAMMA:.+]]: !hal.buffer_view, %[[OUT_DBETA:.+]]: !hal.buffer_view) ->
// FLOW: %[[NONE:.+]] = arith.cmpi eq
// FLOW: %[[DX:.+]] = hal.tensor.alias %{{.+}} : tensor<?x4096xbf16>{%{{.+}}} to %[[OUT_DX]] : !hal.buffer_view
// FLOW-NEXT: %[[VIEW_DX:.+]] = hal.tensor.export %[[DX]] :
// FLOW-NEXT: %[[DGAMMA:.+]] = hal.tensor.alias %{{.+}} : tensor<4096xf32> to %[[OUT_DGAMMA]] : !hal.buffer_view
// FLOW-NEXT: %[[VIEW_DGAMMA:.+]] = hal.tensor.export %[[DGAMMA]] :
// FLOW-NEXT: %[[DBETA:.+]] = hal.tensor.alias %{{.+}} : tensor<4096xf32> to %[[OUT_DBETA]] : !hal.buffer_view
// FLOW-NEXT: %[[VIEW_DBETA:.+]] = hal.tensor.export %[[DBETA]] :
// FLOW: return %[[VIEW_DX]], %[[VIEW_DGAMMA]], %[[VIEW_DBETA]]
