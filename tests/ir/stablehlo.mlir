// The StableHLO specification: whole-tensor operations, sums in f32, and no control over lowering.

// RUN: filecheck %s --input-file=%{ir}/layer_norm_backward.stablehlo.mlir
// RUN: sed 's/func private/func/' %{ir}/layer_norm_backward.stablehlo.mlir | iree-compile - --iree-input-type=stablehlo --compile-to=input | filecheck %s --check-prefix=INPUT

// CHECK-NOT: linalg.
// CHECK: func.func private @algorithm(
// CHECK-NOT: linalg.
// CHECK: %[[XHAT:.+]] = stablehlo.multiply %{{.+}}, %rstd_mn : !acc_mn
// CHECK: %[[H:.+]] = stablehlo.multiply %{{.+}}, %weight_mn : !acc_mn
// CHECK-NOT: linalg.
// Row sums stay within a row, column sums within a column.
// CHECK: stablehlo.reduce(%{{.+}} init: %zero) applies stablehlo.add across dimensions = [0]
// CHECK-NEXT: : (!acc_mn, !scalar) -> !acc_n
// CHECK: stablehlo.reduce(%{{.+}} init: %zero) applies stablehlo.add across dimensions = [0]
// CHECK-NEXT: : (!acc_mn, !scalar) -> !acc_n
// CHECK: func.func private @row_mean(
// CHECK: stablehlo.reduce(%v init: %zero) applies stablehlo.add across dimensions = [1]
// CHECK-NEXT: : (!acc_mn, !scalar) -> !acc_m
// CHECK-NOT: linalg.

// INPUT-NOT: stablehlo
// INPUT-NOT: addf {{.*}} : bf16
// INPUT: func public @algorithm(
// INPUT-NOT: addf {{.*}} : bf16
// INPUT: arith.addf %{{.+}}, %{{.+}} : f32
// INPUT-NOT: addf {{.*}} : bf16
// INPUT: func public @row_mean(
// INPUT-NOT: {{stablehlo|bf16}}
