// Each argument is widened from its own type, each gradient narrowed to its own; equal types need no
// cast. Here: f16 input, bf16 grad_output, f32 weight, bf16 bias.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=64 --dtype=f16 --grad-output-dtype=bf16 --weight-dtype=f32 --bias-dtype=bf16 --whole-tensors --target=generic | %{to-input} | filecheck %s

// CHECK-LABEL: func private @backward(
// CHECK-SAME: -> (tensor<?x64xf16>, tensor<64xf32>, tensor<64xbf16>)
// CHECK: iterator_types = ["parallel", "reduction"]
// CHECK-NEXT: ^bb0(%[[DY:.+]]: bf16, %[[X:.+]]: f16, %{{.+}}: f32, %{{.+}}: f32, %[[GAMMA:.+]]: f32, %{{.+}}: f32, %{{.+}}: f32):
// CHECK-NEXT: %[[DYA:.+]] = arith.extf %[[DY]] : bf16 to f32
// CHECK-NEXT: %[[XA:.+]] = arith.extf %[[X]] : f16 to f32
// CHECK-NEXT: arith.subf %[[XA]],
// CHECK: arith.mulf %[[DYA]], %[[GAMMA]] : f32
// CHECK: iterator_types = ["parallel", "parallel"]
// CHECK: arith.truncf %{{.+}} : f32 to f16
// CHECK: %[[SUMS:.+]]:2 = linalg.generic
// CHECK-SAME: iterator_types = ["parallel", "reduction"]
// CHECK: ins(%[[SUMS]]#1 : tensor<64xf32>) outs(%{{.+}} : tensor<64xbf16>)
// CHECK: arith.truncf %{{.+}} : f32 to bf16
