// What the mask does not ask for is neither computed nor returned.

// dx alone: no column sums.
// RUN: iree-lnbwd compile --print-ir --normalized-shape=1000 --output-mask=100 --whole-tensors --target=generic > %t.100.mlir
// RUN: iree-lnbwd compile --print-command --normalized-shape=1000 --output-mask=100 --target=generic | %{to-flow} > %t.100.sh
// RUN: sh %t.100.sh < %t.100.mlir | filecheck %s --check-prefix=DX

// DX-NOT: affine_map<(d0, d1) -> (d1, d0)>
// DX: iterator_types = ["parallel", "reduction"]
// DX-NOT: affine_map<(d0, d1) -> (d1, d0)>
// DX: iterator_types = ["parallel", "parallel"]
// DX-NOT: iterator_types
// DX: func public @layer_norm_backward({{.*}}) -> !hal.buffer_view attributes
// DX: flow.dispatch @
// DX-NOT: flow.dispatch

// dgamma and dbeta: no row sums, no dx.
// RUN: iree-lnbwd compile --print-ir --normalized-shape=1000 --output-mask=011 --whole-tensors --target=generic > %t.011.mlir
// RUN: iree-lnbwd compile --print-command --normalized-shape=1000 --output-mask=011 --target=generic | %{to-flow} > %t.011.sh
// RUN: sh %t.011.sh < %t.011.mlir | filecheck %s --check-prefix=PARAMETERS

// PARAMETERS-NOT: iterator_types = ["parallel", "parallel"]
// PARAMETERS-NOT: indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>
// PARAMETERS: indexing_maps = [affine_map<(d0, d1) -> (d1, d0)>, affine_map<(d0, d1) -> (d1, d0)>
// PARAMETERS-SAME: iterator_types = ["parallel", "reduction"]
// PARAMETERS-NOT: iterator_types
// PARAMETERS: func public @layer_norm_backward({{.*}}) -> (!hal.buffer_view, !hal.buffer_view) attributes
// PARAMETERS: flow.dispatch @
// PARAMETERS-NOT: flow.dispatch

// dbeta alone: the columns of dy are summed, and x is not read.
// RUN: iree-lnbwd compile --print-ir --normalized-shape=1000 --output-mask=001 --whole-tensors --target=generic > %t.001.mlir
// RUN: iree-lnbwd compile --print-command --normalized-shape=1000 --output-mask=001 --target=generic | %{to-flow} > %t.001.sh
// RUN: sh %t.001.sh < %t.001.mlir | filecheck %s --check-prefix=DBETA

// DBETA: func.func @{{.+}}(%{{.+}}: !iree_tensor_ext.dispatch.tensor<readonly:tensor<?x1000xf32>>, %{{.+}}: index, %{{.+}}: !iree_tensor_ext.dispatch.tensor<writeonly:tensor<1000xf32>>)
// DBETA-NOT: arith.mulf
// DBETA: func public @layer_norm_backward(%{{.+}}: !hal.buffer_view, %[[X:.+]]: !hal.buffer_view, %{{.+}}: !hal.buffer_view, %{{.+}}: !hal.buffer_view, %{{.+}}: !hal.buffer_view, %{{.+}}: !hal.buffer_view) -> !hal.buffer_view attributes
// DBETA-NOT: hal.tensor.import %[[X]]
// DBETA: flow.dispatch @
// DBETA-NOT: flow.dispatch
