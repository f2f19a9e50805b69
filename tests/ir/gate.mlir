// A sigmoid is one power of 2 and one reciprocal for each element on GPUs, without what a subnormal number would
// need. f64 takes none of these.

// RUN: iree-lnbwd compile --print-ir --op=rms_norm --normalized-shape=4096 --dtype=bf16 --gate=after --target=sm_90 | filecheck %s
// RUN: iree-lnbwd compile --print-ir --op=rms_norm --normalized-shape=4096 --dtype=f32 --gate=before --target=sm_80 | filecheck %s
// RUN: iree-lnbwd compile --print-ir --op=rms_norm --normalized-shape=4096 --dtype=f64 --gate=after --target=sm_90 | filecheck %s --check-prefix=OTHER
// RUN: iree-lnbwd compile --print-ir --op=rms_norm --normalized-shape=4096 --dtype=bf16 --gate=after --target=gfx942 | filecheck %s --check-prefix=AMD

// CHECK: func.func private @exp2_of_z(
// CHECK: arith.constant {{[248]}} : index
// CHECK: func.func private @power_of_z(
// CHECK: llvm.nvvm.ex2.approx.ftz.f
// CHECK: func.func private @reciprocal_from_1_to_2_of_z(
// CHECK: arith.constant {{[248]}} : index
// CHECK: llvm.nvvm.rcp.approx.ftz.f
// AMD: func.func private @power_of_z(
// AMD: llvm.amdgcn.exp2
// OTHER: func.func private @silu_of_z(
// OTHER-NOT: @power_of_z(
