// y = x + sum_N(x) + 1, row after row in one workgroup. Where the rank changes between two vectorised
// operations of a kernel, what is between them stays in one thread: all others read from a stack frame that
// nobody wrote.
#layout_n = #iree_gpu.lowering_config<{thread = [4], lane_basis = [[32], [0]], subgroup_basis = [[4], [0]]}>
#layout_mn = #iree_gpu.lowering_config<{thread = [1, 4], lane_basis = [[1, 32], [0, 1]], subgroup_basis = [[1, 4], [0, 1]]}>
#kernel = #iree_codegen.translation_info<pipeline = #iree_gpu.pipeline<VectorDistribute> workgroup_size = [128, 1, 1] subgroup_size = 32, {}>
#how = #iree_codegen.compilation_info<lowering_config = #layout_n, translation_info = #kernel>
#n = affine_map<(n) -> (n)>
#mn = affine_map<(m, n) -> (m, n)>
#scalar = affine_map<(n) -> ()>

func.func @wrong(%x: tensor<4x512xf32>) -> tensor<4x512xf32> {
  %zero = arith.constant 0.0 : f32
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c4 = arith.constant 4 : index
  %y = flow.dispatch.region -> (tensor<4x512xf32>) {
    %one = arith.constant 1.0 : f32
    %y_init = tensor.empty() : tensor<4x512xf32>
    %rows = scf.for %m = %c0 to %c4 step %c1 iter_args(%y_mn = %y_init) -> (tensor<4x512xf32>) {
      %row = tensor.extract_slice %x[%m, 0] [1, 512] [1, 1] : tensor<4x512xf32> to tensor<512xf32>
      %empty = tensor.empty() : tensor<f32>
      %sum_init = linalg.fill ins(%zero : f32) outs(%empty : tensor<f32>) -> tensor<f32>
      %sum = linalg.generic {indexing_maps = [#n, #scalar], iterator_types = ["reduction"]}
        ins(%row : tensor<512xf32>) outs(%sum_init : tensor<f32>) attrs = {compilation_info = #how} {
      ^bb0(%v: f32, %s: f32):
        %more = arith.addf %s, %v : f32
        linalg.yield %more : f32
      } -> tensor<f32>
      %y_n = tensor.empty() : tensor<512xf32>
      %added = linalg.generic {indexing_maps = [#n, #scalar, #n], iterator_types = ["parallel"]}
        ins(%row, %sum : tensor<512xf32>, tensor<f32>) outs(%y_n : tensor<512xf32>) attrs = {lowering_config = #layout_n} {
      ^bb0(%v: f32, %s: f32, %o: f32):
        %more = arith.addf %s, %v : f32
        linalg.yield %more : f32
      } -> tensor<512xf32>
      %flat = tensor.expand_shape %added [[0, 1]] output_shape [1, 512] : tensor<512xf32> into tensor<1x512xf32>
      %y_1n = tensor.empty() : tensor<1x512xf32>
      %y_row = linalg.generic {indexing_maps = [#mn, #mn], iterator_types = ["parallel", "parallel"]}
        ins(%flat : tensor<1x512xf32>) outs(%y_1n : tensor<1x512xf32>) attrs = {lowering_config = #layout_mn} {
      ^bb0(%v: f32, %o: f32):
        %more = arith.addf %v, %one : f32
        linalg.yield %more : f32
      } -> tensor<1x512xf32>
      %with_row = tensor.insert_slice %y_row into %y_mn[%m, 0] [1, 512] [1, 1] : tensor<1x512xf32> into tensor<4x512xf32>
      scf.yield %with_row : tensor<4x512xf32>
    }
    flow.return %rows : tensor<4x512xf32>
  }
  return %y : tensor<4x512xf32>
}

// The same in one operation.
func.func @right(%x: tensor<4x512xf32>) -> tensor<4x512xf32> {
  %zero = arith.constant 0.0 : f32
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c4 = arith.constant 4 : index
  %y = flow.dispatch.region -> (tensor<4x512xf32>) {
    %one = arith.constant 1.0 : f32
    %y_init = tensor.empty() : tensor<4x512xf32>
    %rows = scf.for %m = %c0 to %c4 step %c1 iter_args(%y_mn = %y_init) -> (tensor<4x512xf32>) {
      %row = tensor.extract_slice %x[%m, 0] [1, 512] [1, 1] : tensor<4x512xf32> to tensor<512xf32>
      %empty = tensor.empty() : tensor<f32>
      %sum_init = linalg.fill ins(%zero : f32) outs(%empty : tensor<f32>) -> tensor<f32>
      %sum = linalg.generic {indexing_maps = [#n, #scalar], iterator_types = ["reduction"]}
        ins(%row : tensor<512xf32>) outs(%sum_init : tensor<f32>) attrs = {compilation_info = #how} {
      ^bb0(%v: f32, %s: f32):
        %more = arith.addf %s, %v : f32
        linalg.yield %more : f32
      } -> tensor<f32>
      %y_n = tensor.empty() : tensor<512xf32>
      %added = linalg.generic {indexing_maps = [#n, #scalar, #n], iterator_types = ["parallel"]}
        ins(%row, %sum : tensor<512xf32>, tensor<f32>) outs(%y_n : tensor<512xf32>) attrs = {lowering_config = #layout_n} {
      ^bb0(%v: f32, %s: f32, %o: f32):
        %more = arith.addf %s, %v : f32
        %last = arith.addf %more, %one : f32
        linalg.yield %last : f32
      } -> tensor<512xf32>
      %with_row = tensor.insert_slice %added into %y_mn[%m, 0] [1, 512] [1, 1] : tensor<512xf32> into tensor<4x512xf32>
      scf.yield %with_row : tensor<4x512xf32>
    }
    flow.return %rows : tensor<4x512xf32>
  }
  return %y : tensor<4x512xf32>
}
