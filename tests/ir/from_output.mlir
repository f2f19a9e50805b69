// From the forward's output, x is that output: xhat is computed from it, the bias and the weight, and no
// mean is read. The branch on #from_output is folded, and takes the other way's code with it.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=1000 --from-output --whole-tensors --target=generic > %t.whole.mlir
// RUN: filecheck %s --input-file=%t.whole.mlir --check-prefix=WHOLE
// RUN: iree-lnbwd compile --print-ir --normalized-shape=1000 --from-output --target=sm_90 > %t.mlir
// RUN: filecheck %s --input-file=%t.mlir
// RUN: iree-lnbwd compile --print-ir --normalized-shape=1000 --from-output --no-bias --target=generic > %t.cpu.mlir
// RUN: filecheck %s --input-file=%t.cpu.mlir --check-prefix=CPU
// RUN: iree-lnbwd compile --print-ir --normalized-shape=1000 --target=sm_90 | filecheck %s --check-prefix=INPUT

// WHOLE: #least_weight = 1.00000000000000008e-05 : !acc
// WHOLE: %[[SIZE:.+]] = math.absf %g : !acc
// WHOLE-NEXT: %[[SMALL:.+]] = arith.cmpf olt, %[[SIZE]], %least : !acc
// WHOLE-NEXT: %[[SIGNED:.+]] = math.copysign %least, %g : !acc
// WHOLE-NEXT: arith.select %[[SMALL]], %[[SIGNED]], %g : !acc
// WHOLE: %[[SCALED:.+]] = arith.subf %y_, %beta_ : !acc
// WHOLE-NEXT: arith.divf %[[SCALED]], %divisor_ : !acc
// WHOLE-NOT: @statistics
// WHOLE: util.func public @layer_norm_backward(
// WHOLE-NEXT: %in_dy: !hal.buffer_view,
// WHOLE-NEXT: %in_x: !hal.buffer_view,
// WHOLE-NEXT: %in_rstd: !hal.buffer_view,
// WHOLE-NEXT: %in_gamma: !hal.buffer_view,
// WHOLE-NEXT: %in_beta: !hal.buffer_view,
// WHOLE-NEXT: %out_dx

// CHECK: #adds_bias = true
// CHECK: #from_output = true
// CHECK: #rows_layout = #hal.pipeline.layout<constants = 1, bindings = [
// CHECK-NEXT: // dy [M, N]
// CHECK-NEXT: // x [M, N]
// CHECK-NEXT: // rstd [M]
// CHECK-NEXT: // gamma [N]
// CHECK-NEXT: // beta [N]
// CHECK-NEXT: // dx [M, N]
// CHECK: func.func private @reciprocal(
// CHECK: arith.divf %ones, %g fastmath<afn> : vector

// CPU: #adds_bias = false
// CPU: #from_output = true
// CPU: arith.divf %ones, %g : vector
// CPU: flow.dispatch @rows::@rows[%rows_workgroups](%rows_0, %rows_1, %dy, %x, %rstd, %gamma)

// INPUT: #from_output = false
// INPUT: #rows_layout = #hal.pipeline.layout<constants = 1, bindings = [
// INPUT-NOT: // beta [N]
// INPUT: ]>
