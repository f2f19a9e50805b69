// A module checks every argument against M and N before it uses one, has a name of its own, and says
// what its CPU must have. Where M is 0, it launches nothing.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=64 --op=layer_norm --eps=1e-5 --target=generic > %t.mlir
// RUN: filecheck %s --input-file=%t.mlir
// RUN: iree-lnbwd compile --print-ir --normalized-shape=64 --dtype=bf16 --rows=7 --target=gfx942 | filecheck %s --check-prefix=FIXED

// CHECK: module @layer_norm_n64_f32_eps1em05_generic {
// CHECK: util.initializer {
// CHECK: key("hal.cpu" :: "f16c")
// CHECK: cf.assert %there_0, "device: expected a CPU with f16c
// CHECK: util.func public @layer_norm(
// CHECK: %m = hal.buffer_view.dim<%in_x : !hal.buffer_view>[0]
// CHECK: hal.buffer_view.assert<%in_x : !hal.buffer_view> message("input")
// CHECK-NEXT: shape([%m, %n]) type(%type_x) encoding(%dense)
// CHECK: hal.buffer_view.assert<%in_gamma : !hal.buffer_view> message("weight")
// CHECK-NEXT: shape([%n]) type(%type_gamma)
// CHECK: hal.buffer_view.assert<%in_beta : !hal.buffer_view> message("bias")
// CHECK: hal.buffer_view.assert<%out_y : !hal.buffer_view> message("out.output")
// CHECK-NEXT: shape([%m, %n])
// CHECK: hal.buffer_view.assert<%out_mean : !hal.buffer_view> message("out.mean")
// CHECK-NEXT: shape([%m])
// CHECK: hal.buffer_view.assert<%out_rstd : !hal.buffer_view> message("out.rstd")
// CHECK: cf.assert %are_countable, "input: expected at most 2146435072 rows"
// CHECK: hal.tensor.import %in_x "input"
// CHECK: cf.cond_br %is_empty, ^empty, ^some
// CHECK: ^empty:
// CHECK-NEXT: util.return %out_y, %out_mean, %out_rstd
// CHECK: ^some:

// FIXED: module @layer_norm_backward_n64_bf16_m7_gfx942 {
// FIXED-NOT: hal.cpu
// FIXED: %m = arith.constant 7 : index
// FIXED: hal.buffer_view.assert<%in_dy : !hal.buffer_view> message("grad_output")
// FIXED-NOT: ^empty
