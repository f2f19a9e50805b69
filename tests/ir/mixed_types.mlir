// Each argument is widened from its own type, each gradient narrowed to its own; a copy of
// equal types is none. Here: f16 input, bf16 grad_output, f32 weight, bf16 bias.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=64 --dtype=f16 --grad-output-dtype=bf16 --weight-dtype=f32 --bias-dtype=bf16 --whole-tensors --target=generic | %{to-input} | filecheck %s

// CHECK-LABEL: func private @algorithm(
// CHECK-SAME: -> (tensor<?x64xf16>, tensor<64xf32>, tensor<64xbf16>)
// CHECK: linalg.copy ins(%{{.+}} : tensor<?x64xbf16>) outs(%{{.+}} : tensor<?x64xf32>)
// CHECK: call @plus_dy(
// CHECK: call @plus_dy(
// CHECK: %[[DYA:.+]] = {{.*}}call @plus_dy({{.*}}) : (tensor<?x64xf32>, tensor<?x64xbf16>, i1) -> tensor<?x64xf32>
// CHECK-NEXT: %[[XA:.+]] = linalg.copy ins(%{{.+}} : tensor<?x64xf16>) outs(%{{.+}} : tensor<?x64xf32>)
// CHECK: iterator_types = ["parallel", "reduction"]
// CHECK-SAME: ins(%[[DYA]], %[[XA]],
// CHECK: %[[DX:.+]] = linalg.generic
// CHECK-SAME: iterator_types = ["parallel", "parallel"]
// CHECK: %[[SUMS:.+]]:2 = linalg.generic
// CHECK-SAME: iterator_types = ["parallel", "reduction"]
// CHECK: linalg.copy ins(%[[DX]] : tensor<?x64xf32>) outs(%{{.+}} : tensor<?x64xf16>)
// CHECK: linalg.copy ins(%[[SUMS]]#1 : tensor<64xf32>) outs(%{{.+}} : tensor<64xbf16>)
