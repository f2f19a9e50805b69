// Sums are f32 whatever the data is: accumulators are f32, and so is all arithmetic. The data is
// widened as it is read, and gradients are narrowed once, as they are stored.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=bf16 --whole-tensors --target=generic | %{to-input} > %t.bf16
// RUN: filecheck %s --input-file=%t.bf16
// RUN: filecheck %s --input-file=%t.bf16 --check-prefix=NARROW
// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=f16 --whole-tensors --target=generic | %{to-input} | filecheck %s --check-prefix=NARROW

// CHECK-LABEL: func private @algorithm(
// CHECK-SAME: %[[DY:[^:]+]]: tensor<?x4096xbf16>, %[[X:[^:]+]]: tensor<?x4096xbf16>, %{{[^:]+}}: tensor<?xf32>, %{{[^:]+}}: tensor<?xf32>, %[[GAMMA:[^:]+]]: tensor<4096xbf16>
// CHECK: linalg.copy ins(%[[DY]] : tensor<?x4096xbf16>) outs({{.*}} : tensor<?x4096xf32>)
// CHECK: call @plus_dy(
// CHECK: call @plus_dy(
// CHECK: %[[DYA:.+]] = {{.*}}call @plus_dy({{.*}}) : (tensor<?x4096xf32>, tensor<?x4096xbf16>, i1) -> tensor<?x4096xf32>
// CHECK-NEXT: %[[XA:.+]] = linalg.copy ins(%[[X]] : tensor<?x4096xbf16>) outs({{.*}} : tensor<?x4096xf32>)
// CHECK: %[[WIDE:.+]] = linalg.copy ins(%[[GAMMA]] : tensor<4096xbf16>) outs({{.*}} : tensor<4096xf32>)
// CHECK: %[[GA:.+]] = linalg.generic
// CHECK-SAME: iterator_types = ["parallel"]
// CHECK-SAME: ins(%[[WIDE]] : tensor<4096xf32>)

// The row sums.
// CHECK: linalg.generic
// CHECK-SAME: iterator_types = ["parallel", "reduction"]
// CHECK-SAME: ins(%[[DYA]], %[[XA]], {{.*}}, %[[GA]] : tensor<?x4096xf32>, tensor<?x4096xf32>, tensor<?xf32>, tensor<?xf32>, tensor<4096xf32>)
// CHECK-SAME: outs(%[[ROWS:.+]], %[[ROWS]] : tensor<?xf32>, tensor<?xf32>)
// CHECK-NEXT: ^bb0(%[[DY1:.+]]: f32, %[[X1:.+]]: f32, %[[MEAN:.+]]: f32, %[[RSTD:.+]]: f32, %[[GAMMA1:.+]]: f32, %[[SUM_H:.+]]: f32, %[[SUM_HX:.+]]: f32):
// CHECK-NEXT: %[[CENTRED:.+]] = arith.subf %[[X1]], %[[MEAN]] : f32
// CHECK-NEXT: %[[XHAT:.+]] = arith.mulf %[[CENTRED]], %[[RSTD]] : f32
// CHECK-NEXT: %[[H:.+]] = arith.mulf %[[DY1]], %[[GAMMA1]] : f32
// CHECK-NEXT: %[[HX:.+]] = arith.mulf %[[H]], %[[XHAT]] : f32
// CHECK-NEXT: %[[H1:.+]] = arith.addf %[[SUM_H]], %[[H]] : f32
// CHECK-NEXT: %[[HX1:.+]] = arith.addf %[[SUM_HX]], %[[HX]] : f32
// CHECK-NEXT: linalg.yield %[[H1]], %[[HX1]] : f32, f32

// dx.
// CHECK: %[[DX:.+]] = linalg.generic
// CHECK-SAME: iterator_types = ["parallel", "parallel"]

// The column sums.
// CHECK: %[[COLUMNS:.+]]:2 = linalg.generic
// CHECK-SAME: iterator_types = ["parallel", "reduction"]
// CHECK-SAME: outs({{.*}} : tensor<4096xf32>, tensor<4096xf32>)
// CHECK: %[[DGAMMA1:.+]] = arith.addf %{{.+}}, %{{.+}} : f32
// CHECK-NEXT: %[[DBETA1:.+]] = arith.addf %{{.+}}, %{{.+}} : f32
// CHECK-NEXT: linalg.yield %[[DGAMMA1]], %[[DBETA1]] : f32, f32

// Everything is narrowed last.
// CHECK: linalg.copy ins(%[[DX]] : tensor<?x4096xf32>) outs({{.*}} : tensor<?x4096xbf16>)
// CHECK: linalg.copy ins(%[[COLUMNS]]#0 : tensor<4096xf32>) outs({{.*}} : tensor<4096xbf16>)
// CHECK: linalg.copy ins(%[[COLUMNS]]#1 : tensor<4096xf32>) outs({{.*}} : tensor<4096xbf16>)

// NARROW: func private @algorithm(
// NARROW-NOT: {{(addf|subf|mulf|divf|sqrt|fma) .*: b?f16}}
// NARROW-NOT: linalg.fill {{.*}}f16
