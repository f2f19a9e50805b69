// Operators of torch/operators.py once more, in C++: what a call costs the host is several times less
// where nothing is left to decide.
//
// Python decides, and checks. It sees the first backward of each kind (device, element types,
// shape, output mask) and tells `remember` what that call launches; later ones launch it from here,
// on PyTorch's current stream. Whatever is unusual (strides, a misaligned address) goes to Python
// each time.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/native_layer_norm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/library.h>

#include "torch_norms.h"

namespace {

using at::Tensor;
using iree_lnbwd::calls;
using iree_lnbwd::is_there;
using iree_lnbwd::LayerNormOutput;
using iree_lnbwd::OptionalTensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Gradients = iree_lnbwd::LayerNormGradients;

// Python's side of `calls`.
void remember(int64_t op, at::Device device, int64_t rows, int64_t columns,
              std::optional<at::ScalarType> grad_output, at::ScalarType input,
              std::optional<at::ScalarType> weight, std::optional<at::ScalarType> bias,
              std::array<bool, 3> output_mask, std::optional<double> eps, at::IntArrayRef driver,
              int64_t ones, int64_t scratch_bytes, at::IntArrayRef scratch,
              at::IntArrayRef launches, at::IntArrayRef graph) {
  TORCH_CHECK(op >= 0 && op < static_cast<int64_t>(iree_lnbwd::kOps),
              "op: expected one of operands.OPS, got ", op);
  const auto numbers = [](at::IntArrayRef given) {
    return iree_lnbwd::Numbers{given.data(), given.size()};
  };
  calls().add({static_cast<iree_lnbwd::Op>(op), device, rows, columns, grad_output, input, weight,
               bias, output_mask, eps},
              iree_lnbwd::call_of(numbers(driver), ones, scratch_bytes, numbers(scratch),
                                  numbers(launches), numbers(graph)));
}

void forget() { calls().clear(); }

// The operators.

template <typename Signature>
c10::TypedOperatorHandle<Signature> operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

using Backward = Gradients(const Tensor&, const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                           std::array<bool, 3>, double);
using Forward = LayerNormOutput(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                                const OptionalTensor&, double);

Gradients backward(const Tensor& grad_output, const Tensor& input,
                   c10::SymIntArrayRef normalized_shape, const OptionalTensor& mean,
                   const OptionalTensor& rstd, const OptionalTensor& weight,
                   const OptionalTensor& bias, std::array<bool, 3> mask, double eps) {
  const auto dims = C10_AS_INTARRAYREF_SLOW(normalized_shape);
  auto known = iree_lnbwd::known_layer_norm_backward(grad_output, input, dims, mean, rstd, weight,
                                                     bias, mask);
  if (known) return *std::move(known);
  static const auto in_python = operator_of<Backward>("iree_lnbwd::layer_norm_backward_checked");
  return in_python.call(grad_output, input, normalized_shape, mean, rstd, weight, bias, mask, eps);
}

bool has_module(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble;
}

// PyTorch's own takes one element type only on GPUs; Python widens, or refuses, the others.
LayerNormOutput forward(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                        const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  const auto alike = [&](const OptionalTensor& tensor) {
    return !is_there(tensor) ||
           (tensor->scalar_type() == input.scalar_type() && tensor->device() == input.device());
  };
  if (has_module(input.scalar_type()) && alike(weight) && alike(bias)) {
    return at::native_layer_norm_symint(input, normalized_shape, weight, bias, eps);
  }
  static const auto in_python = operator_of<Forward>("iree_lnbwd::layer_norm_forward");
  return in_python.call(input, normalized_shape, weight, bias, eps);
}

// The gradients by PyTorch's own operators, which can be differentiated again.
variable_list differentiable_backward(const Tensor& grad_output, const variable_list& inputs,
                                      c10::SymIntArrayRef normalized_shape, double eps,
                                      const std::array<bool, 3>& mask) {
  const auto [output, mean, rstd] =
      forward(inputs[0], normalized_shape, inputs[1], inputs[2], eps);
  variable_list wanted;
  for (size_t i = 0; i < mask.size(); ++i) {
    if (mask[i]) wanted.push_back(inputs[i]);
  }
  auto found = torch::autograd::grad({output}, wanted, {grad_output}, std::nullopt, true);
  variable_list gradients(mask.size());
  auto next = found.begin();
  for (size_t i = 0; i < mask.size(); ++i) {
    if (mask[i]) gradients[i] = *next++;
  }
  return gradients;
}

class LayerNorm : public torch::autograd::Function<LayerNorm> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input,
                        c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [output, mean, rstd] = ::forward(input, normalized_shape, weight, bias, eps);
    if (at::isReducedFloatingType(mean.scalar_type())) {
      // On the CPU, and too coarse to be of use: the backward recomputes them.
      mean = rstd = Tensor();
    }
    ctx->save_for_backward(
        {input, weight.value_or(Tensor()), bias.value_or(Tensor()), mean, rstd});
    ctx->saved_data["dims"] = static_cast<int64_t>(normalized_shape.size());
    ctx->saved_data["eps"] = eps;
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto sizes = saved[0].sym_sizes();
    const auto normalized_shape = sizes.slice(sizes.size() - ctx->saved_data["dims"].toInt());
    const double eps = ctx->saved_data["eps"].toDouble();
    std::array<bool, 3> mask = {false, false, false};
    for (size_t i = 0, edge = 0; i < mask.size(); ++i) {  // only what is there has an edge
      mask[i] = saved[i].defined() && ctx->needs_input_grad(edge++);
    }
    if (at::GradMode::is_enabled()) {
      const auto gradients = differentiable_backward(
          grad_outputs[0], {saved.begin(), saved.begin() + 3}, normalized_shape, eps, mask);
      return {gradients[0], Tensor(), gradients[1], gradients[2], Tensor()};
    }
    // Without autograd's fallback for operators that it has no formula of.
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = operator_of<Backward>("iree_lnbwd::layer_norm_backward");
    auto [dx, dgamma, dbeta] = op.call(grad_outputs[0], saved[0], normalized_shape, saved[3],
                                       saved[4], saved[1], saved[2], mask, eps);
    return {dx, Tensor(), dgamma, dbeta, Tensor()};
  }
};

Tensor layer_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                  const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  return std::get<0>(forward(input, normalized_shape, weight, bias, eps));
}

Tensor layer_norm_with_autograd(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                                const OptionalTensor& weight, const OptionalTensor& bias,
                                double eps) {
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
      torch::autograd::ForwardADLevel::try_get_by_idx(0)) {
    // torch.func differentiates and batches ATen's operators, and so does forward mode.
    return layer_norm(input, normalized_shape, weight, bias, eps);
  }
  return LayerNorm::apply(input, normalized_shape, weight, bias, eps);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(iree_lnbwd, library) {
  library.def(
      "remember(int op, Device device, int rows, int columns, ScalarType? grad_output, "
      "ScalarType input, ScalarType? weight, ScalarType? bias, bool[3] output_mask, float? eps, "
      "int[] driver, int ones, int scratch_bytes, int[] scratch, int[] launches, int[] graph) "
      "-> ()",
      remember);
  library.def("forget() -> ()", forget);
}

TORCH_LIBRARY_IMPL(iree_lnbwd, CPU, library) { library.impl("layer_norm", layer_norm); }

TORCH_LIBRARY_IMPL(iree_lnbwd, CUDA, library) {
  library.impl("layer_norm", layer_norm);
  library.impl("layer_norm_backward", backward);
}

TORCH_LIBRARY_IMPL(iree_lnbwd, AutogradCPU, library) {
  library.impl("layer_norm", layer_norm_with_autograd);
}

TORCH_LIBRARY_IMPL(iree_lnbwd, AutogradCUDA, library) {
  library.impl("layer_norm", layer_norm_with_autograd);
}
