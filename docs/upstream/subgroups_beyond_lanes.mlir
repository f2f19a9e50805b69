// Column sums of x. Where the reduced dimension has fewer lanes (here 4) than subgroups (8), only the
// partial sum of the first subgroup is read behind the exchange through shared memory.
#kernel = #iree_codegen.translation_info<pipeline = #iree_gpu.pipeline<VectorDistribute> workgroup_size = [256, 1, 1] subgroup_size = 32, {}>
#wrong = #iree_codegen.compilation_info<lowering_config = #iree_gpu.lowering_config<{workgroup = [32, 0], partial_reduction = [0, 32], thread = [4, 1], lane_basis = [[8, 4], [0, 1]], subgroup_basis = [[1, 8], [0, 1]]}>, translation_info = #kernel>
#right = #iree_codegen.compilation_info<lowering_config = #iree_gpu.lowering_config<{workgroup = [32, 0], partial_reduction = [0, 32], thread = [4, 1], lane_basis = [[4, 8], [0, 1]], subgroup_basis = [[1, 8], [0, 1]]}>, translation_info = #kernel>
#in = affine_map<(n, m) -> (m, n)>
#out = affine_map<(n, m) -> (n)>

func.func @wrong(%x: tensor<32x1024xf32>) -> tensor<1024xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<1024xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<1024xf32>) -> tensor<1024xf32>
  %sums = linalg.generic {
    indexing_maps = [#in, #out], iterator_types = ["parallel", "reduction"]
  } ins(%x : tensor<32x1024xf32>) outs(%zeros : tensor<1024xf32>) attrs = {compilation_info = #wrong} {
  ^bb0(%x_mn: f32, %sum: f32):
    %more = arith.addf %sum, %x_mn : f32
    linalg.yield %more : f32
  } -> tensor<1024xf32>
  return %sums : tensor<1024xf32>
}

func.func @right(%x: tensor<32x1024xf32>) -> tensor<1024xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<1024xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<1024xf32>) -> tensor<1024xf32>
  %sums = linalg.generic {
    indexing_maps = [#in, #out], iterator_types = ["parallel", "reduction"]
  } ins(%x : tensor<32x1024xf32>) outs(%zeros : tensor<1024xf32>) attrs = {compilation_info = #right} {
  ^bb0(%x_mn: f32, %sum: f32):
    %more = arith.addf %sum, %x_mn : f32
    linalg.yield %more : f32
  } -> tensor<1024xf32>
  return %sums : tensor<1024xf32>
}
