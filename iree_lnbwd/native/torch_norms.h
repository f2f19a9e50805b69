// The norms as known calls: whether one can be launched, and its results.
//
// An answer of nullopt means that somebody else has to run the call: Python, or PyTorch's kernel.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>

#include <algorithm>
#include <numeric>

#include "torch_calls.h"

namespace iree_lnbwd {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Mask = std::array<bool, kMostMasked>;

// The arguments of an op; nullptr where one is not given.
using Given = std::array<const Tensor*, kMostArguments>;
// The results of an op; undefined where one is not computed.
using Results = c10::SmallVector<Tensor, 4>;

inline const Tensor* pointer_to(const Tensor& tensor) {
  return tensor.defined() ? &tensor : nullptr;
}

inline const Tensor* pointer_to(const OptionalTensor& tensor) {
  return tensor ? pointer_to(*tensor) : nullptr;
}

// What a caller asks for beside the tensors.
struct Options {
  at::IntArrayRef normalized_shape;
  Mask mask;                  // of backwards
  std::optional<double> eps;  // None as in rms_norm
  double weight_offset;
  // Of the result that has a type of its own: a forward's output, where None means the input's, or
  // a backward's copy of grad_input, or its sum.
  std::optional<at::ScalarType> result_type = std::nullopt;
  std::optional<int64_t> rows_per_set = std::nullopt;  // None where no weight has sets
};

// A caller's mask, as the op's results that it chooses among; the bool of a bias may be missing.
template <class Bools>
Mask mask_of(const Op& op, const Bools& said) {
  size_t all = 0, of_bias = 0;
  for (const Operand& result : op.results) {
    all += result.is_masked;
    of_bias += result.is_masked && result.needs_bias;
  }
  TORCH_CHECK(said.size() == all || said.size() == all - of_bias, "output_mask: expected ", all,
              " bools, got ", said.size());
  Mask mask = {};
  size_t next = 0, at = 0;
  for (const Operand& result : op.results) {
    if (!result.is_masked) continue;
    if (said.size() == all || !result.needs_bias) mask[at] = said[next++];
    ++at;
  }
  return mask;
}

inline int64_t address(const Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.const_data_ptr());
}

// Whether the elements are there (still), and lie as their type wants it. Python refuses others.
inline bool is_there(const Tensor& tensor) {
  const int64_t size = tensor.itemsize(), begin = tensor.storage_offset();
  const size_t bytes =
      tensor.is_contiguous()
          ? (begin + tensor.numel()) * size
          : at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), size, begin);
  return address(tensor) && address(tensor) % size == 0 && tensor.storage().nbytes() >= bytes;
}

// Whether kernels can use it where it lies.
inline bool is_usable(const Tensor& tensor) {
  return tensor.is_contiguous() && (tensor.is_cpu() || address(tensor) % kAccessBytes == 0);
}

// One that kernels can use, for a call alone.
inline Tensor copy_of(const Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  return tensor.clone(at::MemoryFormat::Contiguous);
}

// The type of a row's statistics, and of sums.
inline at::ScalarType wide(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

// Without the dispatcher, whose part of a small call can be measured: there is nothing left to
// dispatch on.
inline Tensor empty(at::IntArrayRef sizes, at::ScalarType type, at::Device device) {
  if (device.is_cpu()) {
    Tensor tensor = at::detail::empty_cpu(sizes, type);
    use_large_pages(tensor);
    return tensor;
  }
  const c10::DeviceGuard guard(device);  // the allocator takes the memory of the current device
  return at::detail::empty_generic(sizes, c10::GetAllocator(device.type()),
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), type,
                                   std::nullopt);
}

inline bool has_rows_where_they_lie(const Operand& operand, const Tensor* tensor) {
  return tensor && operand.is_read && operand.extent == Operand::Extent::cells;
}

// The stride of dimensions that one walks over; nothing if there is more than one.
inline std::optional<int64_t> one_stride(at::IntArrayRef sizes, at::IntArrayRef strides) {
  for (size_t i = 0; i + 1 < sizes.size(); ++i) {
    if (strides[i] != sizes[i + 1] * strides[i + 1]) return std::nullopt;
  }
  return strides.empty() ? 0 : strides.back();
}

// The strides of a tensor's first dimensions that have more than one element; nothing if kernels
// cannot use its rows where they lie: these are not dense, or begin where no access does.
inline std::optional<c10::DimVector> strides_of_rows(const Tensor& tensor, size_t leading) {
  if (!tensor.is_cpu() && address(tensor) % kAccessBytes != 0) return std::nullopt;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > leading;) {
    if (sizes[i] > 1 && strides[i] != expected) return std::nullopt;
    expected *= sizes[i];
  }
  c10::DimVector found;
  for (size_t i = 0; i < leading; ++i) {
    if (sizes[i] > 1) found.push_back(strides[i]);
  }
  return found;
}

// As `arranged` of ops/strides.py: Python's answer to a call of this kind has the same.
inline Layout layout_of(const Op& op, const Given& given, at::IntArrayRef leading,
                        int64_t columns) {
  Layout best;
  c10::SmallVector<size_t, kMostArguments> odd;
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    if (has_rows_where_they_lie(op.arguments[i], given[i]) && !given[i]->is_contiguous()) {
      odd.push_back(i);
    }
  }
  if (odd.empty()) return best;
  c10::DimVector sizes;
  for (int64_t size : leading) {
    if (size > 1) sizes.push_back(size);
  }
  size_t most = 0;
  for (size_t split = 0; split < sizes.size(); ++split) {
    const auto outer = at::IntArrayRef(sizes).slice(0, split);
    const auto inner = at::IntArrayRef(sizes).slice(split);
    const int64_t count = c10::multiply_integers(inner);
    if (split && count * columns > Layout::kMostStride) continue;
    Layout found;
    found.inner_count = split ? count : std::max<int64_t>(count, 2);
    size_t used = 0;
    for (size_t i : odd) {
      const auto strides = strides_of_rows(*given[i], leading.size());
      if (!strides) continue;
      const auto of_outer = one_stride(outer, at::IntArrayRef(*strides).slice(0, split));
      const auto of_inner = one_stride(inner, at::IntArrayRef(*strides).slice(split));
      if (!of_outer || !of_inner) continue;
      const int64_t size = given[i]->itemsize();
      const int64_t multiple =
          given[i]->is_cpu() ? 1 : std::gcd(kAccessBytes, columns * size) / size;
      const auto fits = [&](int64_t stride) {
        return stride <= Layout::kMostStride && stride % multiple == 0;
      };
      if (!fits(*of_outer) || !fits(*of_inner)) continue;
      found.strides[i] = {static_cast<int32_t>(*of_outer), static_cast<int32_t>(*of_inner)};
      ++used;
    }
    if (used > most) {
      most = used;
      best = found;
    }
  }
  return best;
}

// What is known of a call from its arguments, if they belong together.
inline std::optional<Kind> kind_of(const Op& op, const Given& given, const Options& options) {
  const Tensor& data = *given[op.data];
  const auto sizes = data.sizes();
  const auto dims = options.normalized_shape;
  if (dims.empty() || sizes.size() < dims.size() ||
      sizes.slice(sizes.size() - dims.size()) != dims || data.numel() == 0) {
    return std::nullopt;
  }
  const auto leading = sizes.slice(0, sizes.size() - dims.size());
  const int64_t columns = c10::multiply_integers(dims);
  auto parameters = dims;  // the shape of weight and bias
  if (options.rows_per_set) {
    if (!given[op.weight]) return std::nullopt;
    parameters = given[op.weight]->sizes();
    if (parameters.size() != dims.size() + 1 || parameters.slice(1) != dims) return std::nullopt;
  }
  const bool eps_counts = !op.is_backward || op.rstd < 0 || !given[op.rstd];
  Kind kind = {&op,
               data.device(),
               data.numel() / columns,
               columns,
               {},
               {},
               eps_counts ? options.eps : std::nullopt,
               options.weight_offset,
               options.result_type,
               options.rows_per_set ? parameters.front() : 0,
               options.rows_per_set.value_or(0),
               {}};
  kind.types.fill(Kind::kAbsent);
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    if (!given[i]) continue;
    const Operand& operand = op.arguments[i];
    const Tensor& tensor = *given[i];
    bool fits = tensor.device() == kind.device;
    switch (operand.extent) {
      case Operand::Extent::cells:
        fits &= tensor.sizes() == sizes;
        break;
      case Operand::Extent::rows:
        fits &= tensor.numel() == kind.rows && tensor.sizes().size() >= leading.size() &&
                tensor.sizes().slice(0, leading.size()) == leading &&
                tensor.scalar_type() == wide(data.scalar_type());
        break;
      case Operand::Extent::columns:
        fits &= tensor.sizes() == parameters;
        break;
    }
    if (!fits) return std::nullopt;
    kind.types[i] = static_cast<int8_t>(tensor.scalar_type());
  }
  size_t masked = 0;
  for (const Operand& result : op.results) {
    if (!result.is_masked) continue;
    const bool has_gradient =
        (result.element != Operand::Element::gamma || given[op.weight] != nullptr) &&
        (!result.needs_bias || given[op.bias] != nullptr);
    kind.mask[masked] = options.mask[masked] && has_gradient;
    ++masked;
  }
  kind.layout = layout_of(op, given, leading, columns);
  return kind;
}

// Launches a call, if it is known.
inline std::optional<Results> known(const Op& op, const Given& given, const Options& options) {
  if (!given[op.data]) return std::nullopt;  // Python says what is wrong
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    if (!given[i] || !op.arguments[i].is_read) continue;
    if (!is_there(*given[i])) return std::nullopt;
    // PyTorch may copy on threads that a child of fork has not.
    if (!is_usable(*given[i]) && is_forked()) return std::nullopt;
  }
  const auto kind = kind_of(op, given, options);
  if (!kind) return std::nullopt;
  const auto call = calls().find(*kind);
  if (!call) return std::nullopt;

  c10::SmallVector<int64_t, 16> pointers;
  c10::SmallVector<Tensor, 2> copies;
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    if (!op.arguments[i].is_read) continue;
    const bool in_place = call->strided && kind->layout.has(i);
    if (given[i] && !in_place && !is_usable(*given[i])) {
      pointers.push_back(address(copies.emplace_back(copy_of(*given[i]))));
      continue;
    }
    const int64_t absent = static_cast<int>(i) == op.weight ? call->ones : 0;
    pointers.push_back(given[i] ? address(*given[i]) : absent);
  }

  const Tensor& data = *given[op.data];
  const auto type_or = [&](int argument, at::ScalarType otherwise) {
    return argument >= 0 && given[argument] ? given[argument]->scalar_type() : otherwise;
  };
  const auto type_of = [&](Operand::Element element) {
    const auto of_data = data.scalar_type();
    switch (element) {
      case Operand::Element::acc:
        return wide(of_data);
      case Operand::Element::gamma:
        return type_or(op.weight, of_data);
      case Operand::Element::beta:
        return type_or(op.bias, type_or(op.weight, of_data));
      case Operand::Element::residual:
        return type_or(op.residual, of_data);
      case Operand::Element::gate:
        return type_or(op.gate, of_data);
      case Operand::Element::copy:
      case Operand::Element::total:
        return options.result_type.value();
      default:
        return of_data;
    }
  };
  const auto new_result = [&](const Operand& result) {
    const bool is_output = !op.is_backward && &result == &op.results.front();
    const auto type =
        is_output ? options.result_type.value_or(data.scalar_type()) : type_of(result.element);
    switch (result.extent) {
      case Operand::Extent::cells:
        return empty(data.sizes(), type, kind->device);
      case Operand::Extent::columns:
        return empty(kind->sets ? given[op.weight]->sizes() : options.normalized_shape, type,
                     kind->device);
      default: {  // a dimension of 1 for each that was normalized, as PyTorch has it
        c10::DimVector sizes(data.sizes());
        std::fill(sizes.end() - options.normalized_shape.size(), sizes.end(), 1);
        return empty(sizes, type, kind->device);
      }
    }
  };
  Results results;
  size_t masked = 0;
  for (const Operand& result : op.results) {
    const bool is_there = result.is_masked        ? kind->mask[masked++]
                          : result.needs_residual ? given[op.residual] != nullptr
                                                  : true;
    results.push_back(is_there ? new_result(result) : Tensor());
    pointers.push_back(is_there ? address(results.back()) : 0);
  }
  launch(*call, kind->device, std::move(pointers));
  return results;
}

}  // namespace iree_lnbwd
