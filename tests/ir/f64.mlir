// f64 stays f64: nothing on the way is narrower, and the compiler is told not to demote it.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=1000 --dtype=f64 --recompute-statistics=1e-5 --whole-tensors --target=generic > %t.mlir
// RUN: filecheck %s --input-file=%t.mlir
// RUN: iree-lnbwd compile --print-command --normalized-shape=1000 --dtype=f64 --recompute-statistics=1e-5 --target=generic | %{to-flow} > %t.sh
// RUN: sh %t.sh < %t.mlir > %t.flow
// RUN: filecheck %s --input-file=%t.flow --check-prefix=FLOW

// The text names f32 in no type (the comment at its top may).
// CHECK: !dy = f64
// CHECK-NOT: {{(: |x|= )f32}}
// CHECK: util.func public @layer_norm_backward(
// CHECK-NOT: {{(: |x|= )f32}}

// FLOW-NOT: f32
// FLOW: flow.executable
// FLOW-NOT: f32
// FLOW: arith.addf %{{.+}}, %{{.+}} : f64
// FLOW-NOT: f32
// FLOW: func public @layer_norm_backward
// FLOW-NOT: f32

// On GPUs the kernels of every type; IREE's sums over a subgroup know no f64 on CUDA, and are spelled out.
// RUN: iree-lnbwd compile --print-ir --normalized-shape=1000 --dtype=f64 --target=sm_90 > %t.gpu.mlir
// RUN: filecheck %s --input-file=%t.gpu.mlir --check-prefix=GPU
// RUN: filecheck %s --input-file=%t.gpu.mlir --check-prefix=SHUFFLES

// GPU: !acc = f64
// GPU: hal.executable.source private @rows {
// GPU: hal.executable.source private @few_rows {
// SHUFFLES-NOT: gpu.subgroup_reduce
// SHUFFLES: %{{.+}}, %{{.+}} = gpu.shuffle xor %{{.+}}, %{{.+}}, %{{.+}} : !acc
// SHUFFLES-NOT: gpu.subgroup_reduce
