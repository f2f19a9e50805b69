// mean and rstd are arguments, or recomputed from the input, with the spec's eps, of centred values.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=1000 --whole-tensors --target=generic > %t.given.mlir
// RUN: filecheck %s --input-file=%t.given.mlir --check-prefix=GIVEN
// RUN: iree-lnbwd compile --print-command --normalized-shape=1000 --target=generic | %{to-flow} > %t.given.sh
// RUN: sh %t.given.sh < %t.given.mlir | filecheck %s --check-prefix=GIVEN-FLOW

// GIVEN: func.func private @statistics(
// GIVEN: util.func public @layer_norm_backward(
// GIVEN: %in_mean: !hal.buffer_view
// GIVEN: %in_rstd: !hal.buffer_view
// GIVEN-NOT: call @statistics
// GIVEN: call @algorithm(

// GIVEN-FLOW: flow.executable
// GIVEN-FLOW-NOT: math.sqrt
// GIVEN-FLOW-NOT: arith.divf
// GIVEN-FLOW: func public @layer_norm_backward(

// RUN: iree-lnbwd compile --print-ir --normalized-shape=1000 --recompute-statistics=0.125 --whole-tensors --target=generic > %t.mlir
// RUN: filecheck %s --input-file=%t.mlir
// RUN: %{to-input} < %t.mlir | filecheck %s --check-prefix=INPUT
// RUN: iree-lnbwd compile --print-command --normalized-shape=1000 --recompute-statistics=0.125 --target=generic | %{to-flow} > %t.sh
// RUN: sh %t.sh < %t.mlir | filecheck %s --check-prefix=FLOW

// CHECK-LABEL: util.func public @layer_norm_backward(
// CHECK-NEXT: %in_dy: !hal.buffer_view,
// CHECK-NEXT: %in_x: !hal.buffer_view,
// CHECK-NEXT: %in_gamma: !hal.buffer_view,
// CHECK-NEXT: %out_dx
// CHECK: %mean, %rstd = func.call @statistics(%x) : (!x_mn) -> (!acc_m, !acc_m)
// CHECK-NEXT: func.call @algorithm(%dy, %x, %mean, %rstd, %gamma, %x, %dy, %dy, %dy)

// INPUT-LABEL: func private @statistics(
// INPUT: %[[EPS:.+]] = arith.constant 1.250000e-01 : f32
// INPUT: linalg.generic
// INPUT: linalg.generic
// INPUT: linalg.generic
// INPUT: ^bb0(%[[X:.+]]: f32, %[[MEAN:.+]]: f32, %[[SUM:.+]]: f32):
// INPUT-NEXT: %[[CENTRED:.+]] = arith.subf %[[X]], %[[MEAN]] : f32
// INPUT-NEXT: %[[SQUARE:.+]] = arith.mulf %[[CENTRED]], %[[CENTRED]] : f32
// INPUT-NEXT: %[[SUM1:.+]] = arith.addf %[[SUM]], %[[SQUARE]] : f32
// INPUT: linalg.generic
// INPUT: %[[VAR:.+]] = arith.mulf
// INPUT-NEXT: %[[VAR_EPS:.+]] = arith.addf %[[VAR]], %[[EPS]] : f32
// INPUT-NEXT: %[[STD:.+]] = math.sqrt %[[VAR_EPS]] : f32
// INPUT-NEXT: arith.divf %{{.+}}, %[[STD]] : f32

// FLOW: math.sqrt
// FLOW: func public @layer_norm_backward(
