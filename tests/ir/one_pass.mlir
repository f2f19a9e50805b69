// On a GPU a row is read once: one kernel over the rows, the same text for all, and one that adds up its
// partial rows. How rows are fetched is a matter of constants. Sums are f32 whatever the data is.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=2048 --dtype=bf16 --target=sm_90 | filecheck %s --check-prefixes=CHECK,CUDA
// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=bf16 --target=sm_90 | filecheck %s --check-prefixes=CHECK,BULK
// RUN: iree-lnbwd compile --print-ir --normalized-shape=11264 --dtype=f32 --target=sm_90 | filecheck %s --check-prefixes=CHECK,PLACE
// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=bf16 --target=gfx942 | filecheck %s --check-prefixes=CHECK,ROCM
// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=bf16 --target=gfx942 --output-mask=011 | filecheck %s --check-prefixes=CHECK,NODX
// RUN: iree-lnbwd compile --print-ir --normalized-shape=65536 --dtype=bf16 --target=gfx942 | filecheck %s --check-prefix=WIDE

// CHECK: !acc = f32
// CUDA-DAG: #slots = 2 : index
// CUDA-DAG: #ahead_i32 = 1 : i32
// CUDA-DAG: #wants_dx = true
// BULK-DAG: #slots = {{[1-9]}} : index
// PLACE-DAG: #slots = 1 : index
// PLACE-DAG: #ahead_i32 = 1 : i32
// PLACE-DAG: #rereads = true
// ROCM-DAG: #slots = 0 : index
// NODX-DAG: #wants_dx = false
// NODX-DAG: #rereads = false
// CUDA-DAG: !chunk = vector<{{[48]}}x!acc>
// CHECK: hal.executable.source private @rows {
// CUDA: gpu.subgroup_reduce add {{.*}} cluster(size = 32) : (f32) -> f32
// ROCM: gpu.subgroup_reduce add {{.*}} cluster(size = 64) : (f32) -> f32
// CUDA: "nvgpu.device_async_copy"(%dy_rows,
// BULK: cp.async.bulk.shared::cluster.global
// CHECK: func.call @dx(
// CHECK: math.fma {{.*}} : !chunk
// CHECK: hal.executable.source private @finalize {
// CHECK: flow.dispatch @rows::@rows[
// CHECK: flow.dispatch @finalize::@finalize[
// CHECK-NOT: flow.dispatch

// WIDE: hal.executable.source private @row_sums {
// WIDE: hal.executable.source private @columns {
// WIDE: flow.dispatch @row_sums::@row_sums[
// WIDE: flow.dispatch @columns::@columns[
// WIDE: flow.dispatch @finalize::@finalize[
// WIDE-NOT: flow.dispatch
