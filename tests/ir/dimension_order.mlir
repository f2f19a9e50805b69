// A reduction's parallel dimensions come before its reduced ones: IREE's GPU code generation expects
// that, of the column sums too. They therefore read x and dy through a transposed map.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=4096 --recompute-statistics=1e-5 --whole-tensors --target=generic | %{to-input} > %t
// RUN: filecheck %s --input-file=%t
// RUN: filecheck %s --input-file=%t --check-prefix=NEVER

// CHECK-LABEL: func private @algorithm(
// The row sums: of a row, over its columns.
// CHECK: linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>
// CHECK-SAME: iterator_types = ["parallel", "reduction"]}
// dx.
// CHECK: linalg.generic
// CHECK-SAME: iterator_types = ["parallel", "parallel"]}
// The column sums: of a column, over its rows.
// CHECK: linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d1, d0)>, affine_map<(d0, d1) -> (d1, d0)>, affine_map<(d0, d1) -> (d1)>, affine_map<(d0, d1) -> (d1)>, affine_map<(d0, d1) -> (d0)>, affine_map<(d0, d1) -> (d0)>]
// CHECK-SAME: iterator_types = ["parallel", "reduction"]}
// The statistics.
// CHECK-LABEL: func private @statistics(
// CHECK: linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>
// CHECK-SAME: iterator_types = ["parallel", "reduction"]}
// CHECK: linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>
// CHECK-SAME: iterator_types = ["parallel", "reduction"]}

// NEVER: func private @algorithm(
// NEVER-NOT: "reduction", "parallel"
