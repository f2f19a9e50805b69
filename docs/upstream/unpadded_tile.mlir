// Column sums of x, by a tile of 16 columns. Where the number of columns is no multiple of 16, partial sums
// are read from a stack frame that nobody wrote.
#layout = #iree_gpu.lowering_config<{workgroup = [16, 0], partial_reduction = [0, 8], thread = [4, 1], lane_basis = [[4, 8], [0, 1]], subgroup_basis = [[1, 1], [0, 1]]}>
#kernel = #iree_codegen.translation_info<pipeline = #iree_gpu.pipeline<VectorDistribute> workgroup_size = [32, 1, 1] subgroup_size = 32, {}>
#how = #iree_codegen.compilation_info<lowering_config = #layout, translation_info = #kernel>
#in = affine_map<(n, p) -> (p, n)>
#out = affine_map<(n, p) -> (n)>

func.func @wrong(%x: tensor<8x17xf32>) -> tensor<17xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<17xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<17xf32>) -> tensor<17xf32>
  %sums = linalg.generic {indexing_maps = [#in, #out], iterator_types = ["parallel", "reduction"]}
    ins(%x : tensor<8x17xf32>) outs(%zeros : tensor<17xf32>) attrs = {compilation_info = #how} {
  ^bb0(%v: f32, %sum: f32):
    %more = arith.addf %sum, %v : f32
    linalg.yield %more : f32
  } -> tensor<17xf32>
  return %sums : tensor<17xf32>
}

// Padded to the tile.
func.func @right(%x: tensor<8x32xf32>) -> tensor<32xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<32xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<32xf32>) -> tensor<32xf32>
  %sums = linalg.generic {indexing_maps = [#in, #out], iterator_types = ["parallel", "reduction"]}
    ins(%x : tensor<8x32xf32>) outs(%zeros : tensor<32xf32>) attrs = {compilation_info = #how} {
  ^bb0(%v: f32, %sum: f32):
    %more = arith.addf %sum, %v : f32
    linalg.yield %more : f32
  } -> tensor<32xf32>
  return %sums : tensor<32xf32>
}
