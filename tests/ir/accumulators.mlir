// Sums are f32 whatever the data is: accumulators are f32, and so is all arithmetic. The data is
// widened as it is read, and gradients are narrowed once, as they are stored.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=bf16 --whole-tensors --target=generic | %{to-input} > %t.bf16
// RUN: filecheck %s --input-file=%t.bf16
// RUN: filecheck %s --input-file=%t.bf16 --check-prefix=NARROW
// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=f16 --whole-tensors --target=generic | %{to-input} | filecheck %s --check-prefix=NARROW

// CHECK-LABEL: func private @backward(

// The row sums.
// CHECK: %[[ZERO:.+]] = arith.constant 0.000000e+00 : f32
// CHECK: %[[ROWS:.+]] = linalg.fill ins(%[[ZERO]] : f32) outs({{.*}} : tensor<?xf32>)
// CHECK: linalg.generic
// CHECK-SAME: iterator_types = ["parallel", "reduction"]
// CHECK-SAME: outs(%[[ROWS]], %[[ROWS]] : tensor<?xf32>, tensor<?xf32>)
// CHECK-NEXT: ^bb0(%[[DY:.+]]: bf16, %[[X:.+]]: bf16, %[[MEAN:.+]]: f32, %[[RSTD:.+]]: f32, %[[GAMMA:.+]]: bf16, %[[SUM_H:.+]]: f32, %[[SUM_HX:.+]]: f32):
// CHECK-NEXT: %[[DYA:.+]] = arith.extf %[[DY]] : bf16 to f32
// CHECK-NEXT: %[[XA:.+]] = arith.extf %[[X]] : bf16 to f32
// CHECK-NEXT: %[[GA:.+]] = arith.extf %[[GAMMA]] : bf16 to f32
// CHECK-NEXT: %[[CENTRED:.+]] = arith.subf %[[XA]], %[[MEAN]] : f32
// CHECK-NEXT: %[[XHAT:.+]] = arith.mulf %[[CENTRED]], %[[RSTD]] : f32
// CHECK-NEXT: %[[H:.+]] = arith.mulf %[[DYA]], %[[GA]] : f32
// CHECK-NEXT: %[[HX:.+]] = arith.mulf %[[H]], %[[XHAT]] : f32
// CHECK-NEXT: %[[H1:.+]] = arith.addf %[[SUM_H]], %[[H]] : f32
// CHECK-NEXT: %[[HX1:.+]] = arith.addf %[[SUM_HX]], %[[HX]] : f32
// CHECK-NEXT: linalg.yield %[[H1]], %[[HX1]] : f32, f32

// dx is narrowed last.
// CHECK: linalg.generic
// CHECK-SAME: iterator_types = ["parallel", "parallel"]
// CHECK: %[[DX:.+]] = arith.truncf %{{.+}} : f32 to bf16
// CHECK-NEXT: linalg.yield %[[DX]] : bf16

// The column sums.
// CHECK: %[[COLUMNS:.+]] = linalg.fill ins(%[[ZERO]] : f32) outs({{.*}} : tensor<4096xf32>)
// CHECK: linalg.generic
// CHECK-SAME: iterator_types = ["parallel", "reduction"]
// CHECK-SAME: outs(%[[COLUMNS]], %[[COLUMNS]] : tensor<4096xf32>, tensor<4096xf32>)
// CHECK-NEXT: ^bb0({{.*}}: bf16, {{.*}}: bf16, {{.*}}: f32, {{.*}}: f32, %[[DGAMMA:.+]]: f32, %[[DBETA:.+]]: f32):
// CHECK: %[[DGAMMA1:.+]] = arith.addf %[[DGAMMA]], %{{.+}} : f32
// CHECK-NEXT: %[[DBETA1:.+]] = arith.addf %[[DBETA]], %{{.+}} : f32
// CHECK-NEXT: linalg.yield %[[DGAMMA1]], %[[DBETA1]] : f32, f32

// NARROW: func private @backward(
// NARROW-NOT: {{(addf|subf|mulf|divf|sqrt|fma) .*: b?f16}}
// NARROW-NOT: linalg.fill {{.*}}f16
