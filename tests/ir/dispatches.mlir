// How many kernels the algorithm comes to, where IREE tiles and fuses it by itself: one for the row
// sums and dx, one for the column sums, and one that rounds dgamma, then dbeta, where they are narrower
// than the accumulator.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=1000 --dtype=f32 --whole-tensors --target=generic > %t.f32.mlir
// RUN: iree-lnbwd compile --print-command --normalized-shape=1000 --dtype=f32 --target=generic | %{to-flow} > %t.f32.sh
// RUN: sh %t.f32.sh < %t.f32.mlir | filecheck %s --check-prefixes=CHECK,F32

// RUN: iree-lnbwd compile --print-ir --normalized-shape=1000 --dtype=bf16 --whole-tensors --target=generic > %t.bf16.mlir
// RUN: iree-lnbwd compile --print-command --normalized-shape=1000 --dtype=bf16 --target=generic | %{to-flow} > %t.bf16.sh
// RUN: sh %t.bf16.sh < %t.bf16.mlir | filecheck %s --check-prefixes=CHECK,BF16

// CHECK: flow.executable private @layer_norm_backward_dispatch_0
// CHECK: iterator_types = ["parallel", "reduction"]
// CHECK: iterator_types = ["parallel", "parallel"]
// CHECK: flow.executable private @layer_norm_backward_dispatch_1
// CHECK: iterator_types = ["parallel", "reduction"]
// CHECK-NOT: iterator_types = ["parallel", "parallel"]
// BF16: flow.executable private @layer_norm_backward_dispatch_2
// BF16: arith.truncf %{{.+}} : f32 to bf16

// F32-NOT: flow.executable
// F32: func public @layer_norm_backward
// F32: flow.dispatch @layer_norm_backward_dispatch_0::
// F32: flow.dispatch @layer_norm_backward_dispatch_1::
// F32-NOT: flow.dispatch

// BF16-NOT: flow.executable
// BF16: func public @layer_norm_backward
// BF16: flow.dispatch @layer_norm_backward_dispatch_0::
// BF16: flow.dispatch @layer_norm_backward_dispatch_1::
// BF16: flow.dispatch @layer_norm_backward_dispatch_2::
// BF16: flow.dispatch @layer_norm_backward_dispatch_2::
// BF16-NOT: flow.dispatch
