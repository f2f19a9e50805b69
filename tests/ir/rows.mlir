// The number of rows is dynamic unless the spec fixes it; then no type is dynamic any more.

// RUN: iree-lnbwd compile --print-ir --normalized-shape=64 --whole-tensors --target=generic | %{to-input} | filecheck %s --check-prefix=DYNAMIC
// RUN: iree-lnbwd compile --print-ir --normalized-shape=64 --rows=37 --whole-tensors --target=generic | %{to-input} | filecheck %s

// DYNAMIC: func private @algorithm(%{{.+}}: tensor<?x64xf32>, %{{.+}}: tensor<?x64xf32>, %{{.+}}: tensor<?xf32>, %{{.+}}: tensor<?xf32>, %{{.+}}: tensor<64xf32>, %{{.+}}: tensor<?x64xf32>)
// DYNAMIC: %[[M:.+]] = tensor.dim %{{.+}}, %{{.+}} : tensor<?x64xf32>
// DYNAMIC: tensor.empty(%[[M]]) : tensor<?xf32>

// CHECK-NOT: tensor<?
// CHECK: func private @algorithm(%{{.+}}: tensor<37x64xf32>, %{{.+}}: tensor<37x64xf32>, %{{.+}}: tensor<37xf32>, %{{.+}}: tensor<37xf32>, %{{.+}}: tensor<64xf32>, %{{.+}}: tensor<37x64xf32>)
// CHECK-NOT: tensor<?
// CHECK: tensor.empty() : tensor<37xf32>
// CHECK-NOT: tensor<?
// CHECK: func public @layer_norm_backward
// CHECK-NOT: tensor<?
