// The norms as known calls: whether one can be launched as it stands, and its results.
//
// An answer of nullopt means that somebody else has to run the call: Python, or PyTorch's kernel.

#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/SymIntArrayRef.h>

#include "torch_calls.h"

namespace iree_lnbwd {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using LayerNormGradients = std::tuple<Tensor, Tensor, Tensor>;
using RmsNormGradients = std::tuple<Tensor, Tensor>;
using LayerNormOutput = std::tuple<Tensor, Tensor, Tensor>;  // and mean, rstd
using RmsNormOutput = std::tuple<Tensor, Tensor>;            // and rstd

inline bool is_there(const OptionalTensor& tensor) { return tensor && tensor->defined(); }

inline std::optional<at::ScalarType> type_of(const OptionalTensor& tensor) {
  if (!is_there(tensor)) return std::nullopt;
  return tensor->scalar_type();
}

// Python copies what is not, and refuses what has no memory (any more).
inline bool is_usable(const Tensor& tensor) {
  const size_t bytes = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
  return tensor.is_contiguous() && tensor.const_data_ptr() != nullptr &&
         tensor.storage().nbytes() >= bytes &&
         reinterpret_cast<int64_t>(tensor.const_data_ptr()) % kAccessBytes == 0;
}

inline bool is_usable(const OptionalTensor& tensor, at::Device device, at::IntArrayRef sizes) {
  return !is_there(tensor) ||
         (tensor->device() == device && tensor->sizes() == sizes && is_usable(*tensor));
}

// The type of a row's statistics, and of sums.
inline at::ScalarType wide(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

inline bool is_statistic(const OptionalTensor& tensor, const Tensor& input, int64_t rows) {
  return is_there(tensor) && tensor->device() == input.device() &&
         tensor->scalar_type() == wide(input.scalar_type()) && tensor->numel() == rows &&
         is_usable(*tensor);
}

inline int64_t address(const OptionalTensor& tensor) {
  return is_there(tensor) ? reinterpret_cast<int64_t>(tensor->const_data_ptr()) : 0;
}

// There is nothing left to dispatch on.
inline Tensor empty(at::IntArrayRef sizes, at::ScalarType type, at::Device device) {
  return at::_ops::empty_memory_format::redispatch(
      c10::DispatchKeySet(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA),
      c10::fromIntArrayRefSlow(sizes), type, at::kStrided, device, std::nullopt, std::nullopt);
}

// What is known of any norm's call from its input and parameters, if kernels could use them.
inline std::optional<Kind> kind_of(Op op, const Tensor& input, at::IntArrayRef normalized_shape,
                                   const OptionalTensor& weight, const OptionalTensor& bias) {
  const auto sizes = input.sizes();
  const auto device = input.device();
  if (normalized_shape.empty() || sizes.size() < normalized_shape.size() ||
      sizes.slice(sizes.size() - normalized_shape.size()) != normalized_shape ||
      input.numel() == 0 || !is_usable(input) || !is_usable(weight, device, normalized_shape) ||
      (is_there(bias) && bias->device() != device)) {
    return std::nullopt;
  }
  const int64_t columns = c10::multiply_integers(normalized_shape);
  return Kind{op,
              device,
              input.numel() / columns,
              columns,
              std::nullopt,
              input.scalar_type(),
              type_of(weight),
              type_of(bias),
              {},
              std::nullopt};
}

inline std::optional<LayerNormGradients> known_layer_norm_backward(
    const Tensor& grad_output, const Tensor& input, at::IntArrayRef normalized_shape,
    const OptionalTensor& mean, const OptionalTensor& rstd, const OptionalTensor& weight,
    const OptionalTensor& bias, const std::array<bool, 3>& mask) {
  auto kind = kind_of(Op::layer_norm_backward, input, normalized_shape, weight, bias);
  if (!kind || !is_usable(grad_output, kind->device, input.sizes()) ||
      !is_statistic(mean, input, kind->rows) || !is_statistic(rstd, input, kind->rows)) {
    return std::nullopt;
  }
  kind->grad_output = grad_output.scalar_type();
  kind->output_mask = mask;
  const auto call = calls().find(*kind);
  if (!call) return std::nullopt;
  const auto of_weight = kind->weight.value_or(kind->input);
  const auto of_bias = kind->bias.value_or(of_weight);
  const auto [wants_dx, wants_dgamma, wants_dbeta] = mask;
  Tensor dx = wants_dx ? empty(input.sizes(), kind->input, kind->device) : Tensor();
  Tensor dgamma = wants_dgamma && kind->weight ? empty(normalized_shape, of_weight, kind->device)
                                               : Tensor();
  Tensor dbeta = wants_dbeta ? empty(normalized_shape, of_bias, kind->device) : Tensor();
  const int64_t gamma = kind->weight ? address(weight) : call->ones;
  launch(*call, kind->device,
         {address(grad_output), address(input), address(mean), address(rstd), gamma, address(dx),
          address(dgamma), address(dbeta)});
  return std::make_tuple(std::move(dx), std::move(dgamma), std::move(dbeta));
}

inline std::optional<RmsNormGradients> known_rms_norm_backward(
    const Tensor& grad_output, const Tensor& input, at::IntArrayRef normalized_shape,
    const OptionalTensor& rstd, const OptionalTensor& weight, const std::array<bool, 2>& mask) {
  auto kind = kind_of(Op::rms_norm_backward, input, normalized_shape, weight, std::nullopt);
  if (!kind || !is_usable(grad_output, kind->device, input.sizes()) ||
      !is_statistic(rstd, input, kind->rows)) {
    return std::nullopt;
  }
  kind->grad_output = grad_output.scalar_type();
  const auto [wants_dx, wants_dgamma] = mask;
  kind->output_mask = {wants_dx, wants_dgamma, false};
  const auto call = calls().find(*kind);
  if (!call) return std::nullopt;
  Tensor dx = wants_dx ? empty(input.sizes(), kind->input, kind->device) : Tensor();
  Tensor dgamma = wants_dgamma && kind->weight
                      ? empty(normalized_shape, *kind->weight, kind->device)
                      : Tensor();
  const int64_t gamma = kind->weight ? address(weight) : call->ones;
  launch(*call, kind->device,
         {address(grad_output), address(input), address(rstd), gamma, address(dx),
          address(dgamma)});
  return std::make_tuple(std::move(dx), std::move(dgamma));
}

// A statistic of each row, with a dimension of 1 for each that was normalized, as PyTorch has it.
inline Tensor empty_statistic(const Tensor& input, size_t normalized) {
  auto sizes = input.sizes().vec();
  std::fill(sizes.end() - static_cast<int64_t>(normalized), sizes.end(), 1);
  return empty(sizes, wide(input.scalar_type()), input.device());
}

inline std::optional<LayerNormOutput> known_layer_norm(const Tensor& input,
                                                       at::IntArrayRef normalized_shape,
                                                       const OptionalTensor& weight,
                                                       const OptionalTensor& bias, double eps) {
  auto kind = kind_of(Op::layer_norm, input, normalized_shape, weight, bias);
  if (!kind || !is_usable(bias, kind->device, normalized_shape)) return std::nullopt;
  kind->eps = eps;
  const auto call = calls().find(*kind);
  if (!call) return std::nullopt;
  Tensor y = empty(input.sizes(), kind->input, kind->device);
  Tensor mean = empty_statistic(input, normalized_shape.size());
  Tensor rstd = empty_statistic(input, normalized_shape.size());
  const int64_t gamma = kind->weight ? address(weight) : call->ones;
  launch(*call, kind->device,
         {address(input), gamma, address(bias), address(y), address(mean), address(rstd)});
  return std::make_tuple(std::move(y), std::move(mean), std::move(rstd));
}

inline std::optional<RmsNormOutput> known_rms_norm(const Tensor& input,
                                                   at::IntArrayRef normalized_shape,
                                                   const OptionalTensor& weight,
                                                   std::optional<double> eps) {
  auto kind = kind_of(Op::rms_norm, input, normalized_shape, weight, std::nullopt);
  if (!kind) return std::nullopt;
  kind->eps = eps;
  const auto call = calls().find(*kind);
  if (!call) return std::nullopt;
  Tensor y = empty(input.sizes(), kind->input, kind->device);
  Tensor rstd = empty_statistic(input, normalized_shape.size());
  const int64_t gamma = kind->weight ? address(weight) : call->ones;
  launch(*call, kind->device, {address(input), gamma, address(y), address(rstd)});
  return std::make_tuple(std::move(y), std::move(rstd));
}

}  // namespace iree_lnbwd
