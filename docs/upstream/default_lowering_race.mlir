// Two column sums of x in one operation: sum x and sum -x.
func.func @sums(%x: tensor<?x33xf32>) -> (tensor<33xf32>, tensor<33xf32>) {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<33xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<33xf32>) -> tensor<33xf32>
  %sums:2 = linalg.generic {
    indexing_maps = [affine_map<(n, m) -> (m, n)>, affine_map<(n, m) -> (n)>, affine_map<(n, m) -> (n)>],
    iterator_types = ["parallel", "reduction"]
  } ins(%x : tensor<?x33xf32>) outs(%zeros, %zeros : tensor<33xf32>, tensor<33xf32>) {
  ^bb0(%v: f32, %a: f32, %b: f32):
    %a1 = arith.addf %a, %v : f32
    %b1 = arith.subf %b, %v : f32
    linalg.yield %a1, %b1 : f32, f32
  } -> (tensor<33xf32>, tensor<33xf32>)
  return %sums#0, %sums#1 : tensor<33xf32>, tensor<33xf32>
}
