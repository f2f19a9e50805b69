// On a CPU rows come from memory once: one kernel over blocks of rows, and one that adds up partial
// rows. Sums are f32 whatever the data is, and nothing is assumed of the caller's memory but that
// elements are aligned to their own size.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=1000 --dtype=bf16 --target=generic > %t.mlir
// RUN: filecheck %s --input-file=%t.mlir
// RUN: filecheck %s --input-file=%t.mlir --check-prefix=NEVER
// RUN: iree-lnbwd compile --print-command --normalized-shape=1000 --dtype=bf16 --target=generic | %{to-flow} > %t.sh
// RUN: sh %t.sh < %t.mlir | filecheck %s --check-prefix=FLOW

// CHECK: !acc = f32
// CHECK: #columns = 1000 : index
// CHECK: #vector = 16 : index
// CHECK: #fetches_ahead = true
// CHECK: #dy_line = 32 : index
// CHECK: #x_line = 32 : index
// CHECK: #span = 2048 : index
// CHECK: #block = 1 : index
// CHECK: #wants_dx = true
// CHECK: !acc_pn = tensor<?x1000x!acc>
// CHECK: !chunk = vector<16x!acc>
// The operands of this spec alone, and P workgroups.
// CHECK: #rows_layout = #hal.pipeline.layout<constants = 2, bindings = [
// CHECK-NEXT: // dy [M, N]
// CHECK-NEXT: // x [M, N]
// CHECK-NEXT: // mean [M]
// CHECK-NEXT: // rstd [M]
// CHECK-NEXT: // gamma [N]
// CHECK-NEXT: // dx [M, N]
// CHECK-NEXT: // partial_dgamma [P, N]
// CHECK-NEXT: // partial_dbeta [P, N]
// CHECK: #rows_x = affine_map<()[p] -> (p)>
// CHECK: #finalize_x = affine_map<()[m] -> (16)>
// CHECK: hal.executable.source private @rows {
// The row sums: a chunk that overlaps the one before counts what is new.
// CHECK: %col = arith.minui %chunk, %last_chunk : index
// CHECK: %seen = arith.subi %chunk, %col : index
// CHECK-NEXT: %again = vector.create_mask %seen : !lanes
// Where dx goes, is fetched for writing meanwhile.
// CHECK: func.call @fetch_dx(%dx, %row, %col)
// CHECK: func.call @sum_of_dy(%dy, %dy2, %dy3, %dy4, %row, %col)
// CHECK: arith.select %again, %zeros, %dya : !lanes, !chunk
// CHECK: arith.addf {{.*}} : !chunk
// The next block is fetched while this one is worked on.
// CHECK: func.call @fetch_dy(%dy, %next_row, %col)
// CHECK: func.call @fetch_x(%x, %next_row, %col)
// dx is narrowed as it is stored, and the row is read from the cache for it.
// CHECK: func.call @sum_of_dy(%dy, %dy2, %dy3, %dy4, %row, %col)
// CHECK: %[[DX:.+]] = func.call @round_of_x(%dx_sum) : (!chunk) -> !x_chunk
// CHECK-NEXT: vector.store %[[DX]], %dx[%row, %col]
// The rows of a workgroup: the share of each of 64, but at most 512, unless that took more than 4096.
// CHECK: %rows_share_few = affine.max affine_map<()[m] -> (8, (m ceildiv 1) ceildiv 64 * 1)>()[%m]
// CHECK: %rows_share_many = affine.max affine_map<()[m] -> (512, (m ceildiv 1) ceildiv 4096 * 1)>()[%m]

// NEVER: hal.executable.source private @rows {
// NEVER-NOT: alignment({{.*}})
// NEVER-NOT: {{(addf|subf|mulf|fma) .*b?f16}}

// FLOW: func public @layer_norm_backward(
// FLOW: flow.dispatch @rows::@rows[
// FLOW: flow.dispatch @finalize::@finalize[
// FLOW-NOT: flow.dispatch
