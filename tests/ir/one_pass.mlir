// On a GPU a row is read once: one kernel over the rows, the one that the target can run, and one that
// adds up its partial rows. Sums are f32 whatever the data is.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=bf16 --target=sm_90 | filecheck %s --check-prefix=CUDA
// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --dtype=bf16 --target=gfx942 | filecheck %s --check-prefix=ROCM
// RUN: iree-lnbwd compile --print-ir --normalized-shape=65536 --dtype=bf16 --target=gfx942 | filecheck %s --check-prefix=WIDE

// CUDA: !acc = f32
// CUDA: !chunk = vector<8x!acc>
// CUDA-NOT: hal.executable.source private @rows {
// CUDA: hal.executable.source private @rows_cp_async {
// CUDA: "nvgpu.device_async_copy"(%dy_staged,
// CUDA: gpu.subgroup_reduce add {{.*}} cluster(size = 32) : (!acc) -> !acc
// CUDA: math.fma {{.*}} : !chunk
// CUDA: flow.dispatch @rows_cp_async::@rows_cp_async[
// CUDA-NEXT: : (i32, !dy_mn{%m}, !x_mn{%m}, !acc_m{%m}, !acc_m{%m}, !gamma_n) -> (!x_mn{%m}, !partials_pn, !partials_pn)
// CUDA: flow.dispatch @finalize::@finalize(
// CUDA-NOT: flow.dispatch
// CUDA: hal.executable.source private @finalize {

// ROCM-NOT: device_async_copy
// ROCM: hal.executable.source private @rows {
// ROCM: %dy_read_0 = vector.load %dy[
// ROCM: %dy_read_1 = vector.load %dy[
// ROCM-NOT: vector.load %dy[
// ROCM: gpu.subgroup_reduce add {{.*}} cluster(size = 64) : (!acc) -> !acc
// ROCM: flow.dispatch @rows::@rows[
// ROCM: flow.dispatch @finalize::@finalize(
// ROCM-NOT: flow.dispatch

// WIDE: hal.executable.source private @row_sums {
// WIDE: hal.executable.source private @columns {
// WIDE: flow.dispatch @row_sums::@row_sums[
// WIDE: flow.dispatch @columns::@columns[
// WIDE: flow.dispatch @finalize::@finalize(
// WIDE-NOT: flow.dispatch
