// Our operators as the dispatcher calls them, below autograd.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <string>

#include "torch_norms.h"

namespace iree_lnbwd {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using Stack = torch::jit::Stack;

// An operator by its name in our namespace. It is looked up when it is first called, for C++ may be
// loaded before Python has defined it.
class Named {
 public:
  explicit Named(const std::string& name) : name_("iree_lnbwd::" + name) {}
  void call(Stack* stack) const {
    std::call_once(once_, [this] {
      found_ = c10::Dispatcher::singleton().findSchemaOrThrow(name_.c_str(), "");
    });
    found_->callBoxed(stack);
  }

 private:
  const std::string name_;
  mutable std::once_flag once_;
  mutable std::optional<OperatorHandle> found_;
};

// The place of a result among those of an op, or of some of them.
inline int place_of(const std::string& name, const std::vector<const Operand*>& results) {
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i]->name == name) return static_cast<int>(i);
  }
  return -1;
}

// A norm of torch/operator_table.py.
class Norm {
 public:
  Norm(const std::string& name, const Op& op, const std::string& gradients, const Op& gradients_op,
       const std::string& from_output, const Op& from_output_op, bool takes_residual,
       bool own_forward, bool takes_sets)
      : op(op),
        gradients_op(gradients_op),
        from_output_op(from_output_op),
        takes_residual(takes_residual),
        own_forward(own_forward),
        takes_sets(takes_sets),
        itself(name),
        checked(name + "_checked"),
        by_aten(name + "_by_aten"),
        gradients(gradients),
        from_output(from_output) {
    std::vector<const Operand*> returned;
    for (const Operand& result : op.results) {
      if (returns(result)) returned.push_back(&result);
    }
    mean = place_of("mean", returned);
    rstd = place_of("rstd", returned);
    residual_output = place_of("residual_output", returned);
    results = returned.size();
    for (const Operand& argument : op.arguments) taken += takes(argument);
  }

  bool takes(const Operand& argument) const { return takes_residual || !argument.needs_residual; }
  bool returns(const Operand& result) const { return takes_residual || !result.needs_residual; }

  const Op& op;
  const Op& gradients_op;
  const Op& from_output_op;
  const bool takes_residual;
  const bool own_forward;  // or PyTorch's
  const bool takes_sets;
  size_t taken = 0;        // of the op's arguments
  size_t results;          // returned
  // Places among the results; the output is the first. -1 where there is none.
  int mean, rstd, residual_output;

  Named itself;
  Named checked;
  Named by_aten;
  Named gradients;
  Named from_output;
  Named differentiable{"differentiable_gradients"};
};

// By number. Each is there before its kernels are, and never changes afterwards.
inline std::array<std::unique_ptr<const Norm>, 32>& norms() {
  static std::array<std::unique_ptr<const Norm>, 32> all;
  return all;
}

inline std::optional<double> double_of(const IValue& value) { return value.toOptional<double>(); }

inline const Tensor* pointer_to(const IValue& value) {
  return value.isNone() ? nullptr : pointer_to(value.toTensor());
}

// What a norm takes from the stack: the tensors, and then the options.
struct Taken {
  Given tensors = {};  // those of the op
  IValue normalized_shape;
  std::optional<double> eps;
  double weight_offset = 0;
  bool memory_efficient = false;
  std::optional<at::ScalarType> output_type;
  IValue rows_per_set;  // None where no weight has sets
  size_t count;

  Taken(const Norm& norm, const Stack& stack)
      : count(norm.taken + (norm.own_forward ? 5 : 2) + norm.takes_sets) {
    const IValue* next = stack.data() + stack.size() - count;
    for (size_t i = 0; i < norm.op.arguments.size(); ++i) {
      if (norm.takes(norm.op.arguments[i])) tensors[i] = pointer_to(*next++);
    }
    // PyTorch takes None for any tensor, and hands on one that is undefined.
    const Operand& data = norm.op.arguments[norm.op.data];
    TORCH_CHECK_TYPE(tensors[norm.op.data], data.name, ": expected a tensor, got None");
    normalized_shape = *next++;
    eps = double_of(*next++);
    if (norm.own_forward) {
      weight_offset = (next++)->toDouble();
      memory_efficient = (next++)->toBool();
      output_type = (next++)->toOptional<at::ScalarType>();
    }
    if (norm.takes_sets) rows_per_set = *next;
  }
};

inline c10::DimVector integers_of(const IValue& value) {
  if (value.isIntList()) return value.toDimVector();
  c10::DimVector found;
  for (const auto& each : value.toSymIntVector()) {
    found.push_back(each.guard_int(__FILE__, __LINE__));
  }
  return found;
}

inline std::optional<int64_t> integer_of(const IValue& value) {
  if (value.isNone()) return std::nullopt;
  return value.isInt() ? value.toInt() : value.toSymInt().guard_int(__FILE__, __LINE__);
}

inline bool has_module(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble;
}

// PyTorch's own takes one element type only on GPUs; Python widens, or refuses, the others.
inline void forward_by_pytorch(const Norm& norm, const Taken& taken, Stack* stack) {
  const Op& op = norm.op;
  const Tensor& input = *taken.tensors[op.data];
  const auto type = input.scalar_type();
  const Tensor* weight = taken.tensors[op.weight];
  const Tensor* bias = taken.tensors[op.bias];
  const auto alike = [&](const Tensor* tensor) {
    return !tensor || (tensor->scalar_type() == type && tensor->device() == input.device());
  };
  if (!has_module(type) || !alike(weight) || !alike(bias)) return norm.by_aten.call(stack);
  const auto given = [](const Tensor* tensor) {
    return tensor ? std::optional<Tensor>(*tensor) : std::nullopt;
  };
  const IValue& dims = taken.normalized_shape;
  [[maybe_unused]] const OwnThreadIfForked own_thread;
  auto [output, mean, rstd] =
      dims.isIntList()
          ? at::native_layer_norm(input, dims.toDimVector(), given(weight), given(bias),
                                  taken.eps.value())
          : at::native_layer_norm_symint(input, dims.toSymIntVector(), given(weight), given(bias),
                                         taken.eps.value());
  torch::jit::drop(*stack, taken.count);
  torch::jit::push(*stack, std::move(output), std::move(mean), std::move(rstd));
}

// Launches a norm of ours, if the call is known, and leaves the results on the stack.
inline bool launched(const Norm& norm, const Taken& taken, Stack* stack) {
  const auto dims = integers_of(taken.normalized_shape);
  auto results = known(norm.op, taken.tensors,
                       {dims,
                        {},
                        taken.eps,
                        taken.weight_offset,
                        taken.output_type,
                        integer_of(taken.rows_per_set)});
  if (!results) return false;
  torch::jit::drop(*stack, taken.count);
  for (size_t i = 0; i < results->size(); ++i) {
    if (norm.returns(norm.op.results[i])) stack->emplace_back(std::move((*results)[i]));
  }
  return true;
}

// A norm, without autograd.
class Forward final : public c10::OperatorKernel {
 public:
  explicit Forward(const Norm& norm) : norm_(norm) {}

  void operator()(const OperatorHandle&, DispatchKeySet, Stack* stack) {
    const Taken taken(norm_, *stack);
    if (!norm_.own_forward) return forward_by_pytorch(norm_, taken, stack);
    if (!launched(norm_, taken, stack)) norm_.checked.call(stack);
  }

 private:
  const Norm& norm_;
};

// A backward, without autograd.
class Gradients final : public c10::OperatorKernel {
 public:
  Gradients(const std::string& name, const Op& op, bool takes_sets)
      : op_(op),
        checked_(name + "_checked"),
        takes_sets_(takes_sets),
        has_own_type_(op.results.back().element == Operand::Element::copy ||
                      op.results.back().element == Operand::Element::total) {}

  void operator()(const OperatorHandle&, DispatchKeySet, Stack* stack) {
    const size_t tensors = op_.arguments.size(), taken = tensors + 4 + takes_sets_ + has_own_type_;
    const IValue* values = stack->data() + stack->size() - taken;
    Given given = {};
    for (size_t i = 0; i < tensors; ++i) given[i] = pointer_to(values[i]);
    const IValue* options = values + tensors;
    const auto dims = integers_of(options[0]);
    auto results = known(op_, given,
                         {dims,
                          mask_of(op_, options[1].toBoolList()),
                          double_of(options[2]),
                          options[3].toDouble(),
                          has_own_type_ ? options[4 + takes_sets_].toOptional<at::ScalarType>()
                                        : std::nullopt,
                          takes_sets_ ? integer_of(options[4]) : std::nullopt});
    if (!results) return checked_.call(stack);
    torch::jit::drop(*stack, taken);
    for (auto& result : *results) stack->emplace_back(std::move(result));
  }

 private:
  const Op& op_;
  Named checked_;
  const bool takes_sets_;
  const bool has_own_type_;  // one of its results
};

inline IValue value_of(const Tensor& tensor) { return tensor.defined() ? IValue(tensor) : IValue(); }

// What the dispatcher would call for an operator of ours; undefined while a profiler is on.
inline DispatchKey first_key(const Given& given) {
  if (at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION)) return DispatchKey::Undefined;
  DispatchKeySet keys;
  for (const Tensor* tensor : given) {
    if (tensor) keys = keys | tensor->key_set();
  }
  const auto of_thread = c10::impl::tls_local_dispatch_key_set();
  keys = (keys | of_thread.included_) - of_thread.excluded_;
  // None of ours changes a tensor in place, or returns a view.
  keys = keys - DispatchKeySet({DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView});
  return keys.highestPriorityTypeId();
}

// Whether the dispatcher would come to our own kernel at once: no mode, no subclass of Tensor and no
// profiler is between. To call it takes longer than a few rows do.
inline bool comes_to_ours(const Given& given) {
  const auto first = first_key(given);
  return first == DispatchKey::CPU || first == DispatchKey::CUDA;
}

// Below autograd.
inline void without_autograd(const Norm& norm, const Taken& taken, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  // ATen's in place of the operator again, so that a compiler may fuse it.
  if (!norm.own_forward) return forward_by_pytorch(norm, taken, stack);
  if (!comes_to_ours(taken.tensors) || !launched(norm, taken, stack)) norm.itself.call(stack);
}

}  // namespace iree_lnbwd
