// There is no executable @no.
func.func @calls_nothing(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = flow.dispatch @no::@where(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}
