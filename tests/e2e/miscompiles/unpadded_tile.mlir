// Column sums of two tensors at once, as a finalize kernel has them. Where N is no multiple of the
// tile of 16 columns, partial sums are read from a stack frame that nobody wrote.
#layout = #iree_gpu.lowering_config<{workgroup = [16, 0], partial_reduction = [0, 8], thread = [4, 1], lane_basis = [[4, 8], [0, 1]], subgroup_basis = [[1, 1], [0, 1]]}>
#kernel = #iree_codegen.translation_info<pipeline = #iree_gpu.pipeline<VectorDistribute> workgroup_size = [32, 1, 1] subgroup_size = 32, {}>
#how = #iree_codegen.compilation_info<lowering_config = #layout, translation_info = #kernel>
#in = affine_map<(n, p) -> (p, n)>
#out = affine_map<(n, p) -> (n)>

func.func @wrong(%a: tensor<8x769xf32>, %b: tensor<8x769xf32>) -> (tensor<769xf32>, tensor<769xf32>) {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<769xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<769xf32>) -> tensor<769xf32>
  %sums:2 = linalg.generic {
    indexing_maps = [#in, #in, #out, #out], iterator_types = ["parallel", "reduction"]
  } ins(%a, %b : tensor<8x769xf32>, tensor<8x769xf32>) outs(%zeros, %zeros : tensor<769xf32>, tensor<769xf32>)
     attrs = {compilation_info = #how} {
  ^bb0(%a_pn: f32, %b_pn: f32, %a_sum: f32, %b_sum: f32):
    %a_more = arith.addf %a_sum, %a_pn : f32
    %b_more = arith.addf %b_sum, %b_pn : f32
    linalg.yield %a_more, %b_more : f32, f32
  } -> (tensor<769xf32>, tensor<769xf32>)
  return %sums#0, %sums#1 : tensor<769xf32>, tensor<769xf32>
}

// Padded to the tile.
func.func @right(%a: tensor<8x784xf32>, %b: tensor<8x784xf32>) -> (tensor<784xf32>, tensor<784xf32>) {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<784xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<784xf32>) -> tensor<784xf32>
  %sums:2 = linalg.generic {
    indexing_maps = [#in, #in, #out, #out], iterator_types = ["parallel", "reduction"]
  } ins(%a, %b : tensor<8x784xf32>, tensor<8x784xf32>) outs(%zeros, %zeros : tensor<784xf32>, tensor<784xf32>)
     attrs = {compilation_info = #how} {
  ^bb0(%a_pn: f32, %b_pn: f32, %a_sum: f32, %b_sum: f32):
    %a_more = arith.addf %a_sum, %a_pn : f32
    %b_more = arith.addf %b_sum, %b_pn : f32
    linalg.yield %a_more, %b_more : f32, f32
  } -> (tensor<784xf32>, tensor<784xf32>)
  return %sums#0, %sums#1 : tensor<784xf32>, tensor<784xf32>
}
