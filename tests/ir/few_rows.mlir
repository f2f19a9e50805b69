// On a GPU few rows take one kernel, and M decides: each branch ties its gradients to the caller's
// storage, so that nothing is copied, and that of few rows allocates nothing. A module of fixed rows has
// the one form that they take.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=bf16 --target=sm_90 > %t.mlir
// RUN: filecheck %s < %t.mlir
// RUN: iree-lnbwd compile --print-command --normalized-shape=4096 --dtype=bf16 --target=sm_90 | sed 's/ -o [^ ]* / --compile-to=stream -o - /' > %t.sh
// RUN: sh %t.sh < %t.mlir | filecheck %s --check-prefix=STREAM
// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=bf16 --target=gfx942 | filecheck %s --check-prefix=ROCM
// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=bf16 --target=sm_90 --output-mask=100 | filecheck %s --check-prefix=ROWS
// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=bf16 --target=sm_90 --output-mask=011 | filecheck %s --check-prefix=COLUMNS
// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=bf16 --target=sm_90 --rows=37 | filecheck %s --check-prefix=FEW
// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=bf16 --target=sm_90 --rows=5000 | filecheck %s --check-prefix=MANY

// CHECK: #few_rows_x = affine_map<()[m] -> (m + 128)>
// CHECK: hal.executable.source private @few_rows {
// CHECK: cluster(size = 8) : (!acc) -> !acc
// CHECK: cluster(size = 32) : (!acc) -> !acc
// CHECK: %most_few = arith.constant 1024 : index
// CHECK: %are_few = arith.cmpi ule, %m, %most_few : index
// CHECK: ^few:
// CHECK: flow.dispatch @few_rows::
// CHECK-COUNT-3: hal.tensor.alias
// CHECK: return
// CHECK: ^many:
// CHECK: flow.dispatch @rows::
// CHECK: flow.dispatch @finalize::
// CHECK-COUNT-3: hal.tensor.alias
// CHECK: return

// STREAM: util.func public @layer_norm_backward(
// STREAM: cf.cond_br
// STREAM-COUNT-2: stream.cmd.fill
// STREAM: cf.cond_br
// STREAM-NOT: stream.resource.alloca
// STREAM: stream.cmd.dispatch @few_rows::
// STREAM: util.return
// STREAM: stream.resource.alloca
// STREAM-NOT: stream.resource.alloca
// STREAM: stream.cmd.dispatch @rows::
// STREAM: stream.cmd.dispatch @finalize::
// STREAM-NOT: stream.cmd.copy
// STREAM: util.return

// ROCM: cluster(size = 8) : (!acc) -> !acc
// ROCM: cluster(size = 64) : (!acc) -> !acc

// ROWS: #few_rows_x = affine_map<()[m] -> (m)>
// COLUMNS: #few_rows_x = affine_map<()[m] -> (128)>

// FEW-NOT: @rows
// FEW: flow.dispatch @few_rows::
// FEW-NOT: flow.dispatch
// MANY-NOT: @few_rows
// MANY: flow.dispatch @rows::
