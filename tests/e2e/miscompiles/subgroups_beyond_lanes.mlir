// Column sums. The reduced dimension has 4 lanes and 8 subgroups: behind the exchange through shared
// memory, only the partial sum of the first subgroup is read. With 8 lanes it is right.
#layout = #iree_gpu.lowering_config<{workgroup = [32, 0], partial_reduction = [0, 32], thread = [4, 1], lane_basis = [[8, 4], [0, 1]], subgroup_basis = [[1, 8], [0, 1]]}>
#kernel = #iree_codegen.translation_info<pipeline = #iree_gpu.pipeline<VectorDistribute> workgroup_size = [256, 1, 1] subgroup_size = 32, {}>
#how = #iree_codegen.compilation_info<lowering_config = #layout, translation_info = #kernel>

func.func @column_sums(%x: tensor<32x1024xf32>) -> tensor<1024xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<1024xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<1024xf32>) -> tensor<1024xf32>
  %sums = linalg.generic {
    indexing_maps = [affine_map<(n, m) -> (m, n)>, affine_map<(n, m) -> (n)>],
    iterator_types = ["parallel", "reduction"]
  } ins(%x : tensor<32x1024xf32>) outs(%zeros : tensor<1024xf32>) attrs = {compilation_info = #how} {
  ^bb0(%x_mn: f32, %sum: f32):
    %more = arith.addf %sum, %x_mn : f32
    linalg.yield %more : f32
  } -> tensor<1024xf32>
  return %sums : tensor<1024xf32>
}
