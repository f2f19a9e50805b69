// Column sums of two tensors at once, as a finalize kernel has them. N is no multiple of the tile of
// 16 columns: the sums of its last tile are garbage. With N = 784 it is right.
!partials = tensor<8x769xf32>
!sums = tensor<769xf32>
#layout = #iree_gpu.lowering_config<{workgroup = [16, 0], partial_reduction = [0, 8], thread = [4, 1], lane_basis = [[4, 8], [0, 1]], subgroup_basis = [[1, 1], [0, 1]]}>
#kernel = #iree_codegen.translation_info<pipeline = #iree_gpu.pipeline<VectorDistribute> workgroup_size = [32, 1, 1] subgroup_size = 32, {}>
#how = #iree_codegen.compilation_info<lowering_config = #layout, translation_info = #kernel>
#in = affine_map<(n, p) -> (p, n)>
#out = affine_map<(n, p) -> (n)>

func.func @column_sums(%a: !partials, %b: !partials) -> (!sums, !sums) {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : !sums
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : !sums) -> !sums
  %sums:2 = linalg.generic {
    indexing_maps = [#in, #in, #out, #out], iterator_types = ["parallel", "reduction"]
  } ins(%a, %b : !partials, !partials) outs(%zeros, %zeros : !sums, !sums) attrs = {compilation_info = #how} {
  ^bb0(%a_pn: f32, %b_pn: f32, %a_sum: f32, %b_sum: f32):
    %a_more = arith.addf %a_sum, %a_pn : f32
    %b_more = arith.addf %b_sum, %b_pn : f32
    linalg.yield %a_more, %b_more : f32, f32
  } -> (!sums, !sums)
  return %sums#0, %sums#1 : !sums, !sums
}
