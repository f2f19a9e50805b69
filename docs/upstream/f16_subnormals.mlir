// Rounds to f16.
func.func @rounded(%x: tensor<4xf32>) -> tensor<4xf16> {
  %empty = tensor.empty() : tensor<4xf16>
  %y = linalg.generic {indexing_maps = [affine_map<(n) -> (n)>, affine_map<(n) -> (n)>], iterator_types = ["parallel"]}
    ins(%x : tensor<4xf32>) outs(%empty : tensor<4xf16>) {
  ^bb0(%v: f32, %o: f16):
    %r = arith.truncf %v : f32 to f16
    linalg.yield %r : f16
  } -> tensor<4xf16>
  return %y : tensor<4xf16>
}
