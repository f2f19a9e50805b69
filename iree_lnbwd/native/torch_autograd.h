// Norms in autograd's graph, and under autocast.

#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "torch_operators.h"

namespace iree_lnbwd {
struct Context;
}

// A friend of the context's: what it saves can be put where it is kept, without lists of tensors that
// are copied twice.
template <>
struct torch::autograd::CppNode<iree_lnbwd::Context> {
  static auto& saved(AutogradContext& context) { return context.saved_variables_; }
};

namespace iree_lnbwd {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What a backward knows of its call, beside the tensors.
struct Kept {
  static constexpr const char* kName = "call";  // among what compiled autograd sees of a node

  int64_t norm = 0;
  int64_t normalized = 0;  // dimensions
  std::optional<double> eps;
  double weight_offset = 0;
  bool memory_efficient = false;
  IValue rows_per_set;
  c10::SmallVector<int64_t, kMostArguments> types;  // of arguments, and of gradients; -1: not there

  Kept() = default;

  Kept(int64_t norm, const Taken& taken, size_t arguments)
      : norm(norm),
        normalized(static_cast<int64_t>(
            taken.normalized_shape.isIntList() ? taken.normalized_shape.toIntList().size()
                                               : taken.normalized_shape.toListRef().size())),
        eps(taken.eps),
        weight_offset(taken.weight_offset),
        memory_efficient(taken.memory_efficient),
        rows_per_set(taken.rows_per_set) {
    for (size_t i = 0; i < arguments; ++i) {
      const Tensor* tensor = taken.tensors[i];
      types.push_back(tensor ? static_cast<int64_t>(tensor->scalar_type()) : int64_t{-1});
    }
  }

  explicit Kept(const IValue& value) {
    const auto all = value.toListRef();
    norm = all[0].toInt();
    normalized = all[1].toInt();
    eps = double_of(all[2]);
    weight_offset = all[3].toDouble();
    memory_efficient = all[4].toBool();
    rows_per_set = all[5];
    for (const IValue& type : all.slice(6)) types.push_back(type.toInt());
  }

  IValue value() const {
    c10::impl::GenericList all(c10::AnyType::get());
    all.reserve(6 + types.size());
    for (IValue each : {IValue(norm), IValue(normalized), IValue(eps), IValue(weight_offset),
                        IValue(memory_efficient), rows_per_set}) {
      all.push_back(std::move(each));
    }
    for (int64_t type : types) all.push_back(type);
    return all;
  }
};

using Needs = std::array<bool, kMostArguments>;

template <class Result, class Class, class Pointer>
std::decay_t<Pointer> taken_by(Result (Class::*)(Pointer));

// A node of autograd's graph. PyTorch has changed what points to them.
template <class Node>
auto new_node() {
  using Pointer = decltype(taken_by(&Node::set_ctx_grad_fn));
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<Node>(new Node(), [](Node* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Node>();
  }
}

// A norm in autograd's graph, as compiled autograd sees it.
class Differentiated : public torch::autograd::Function<Differentiated> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return gradients(ctx, Kept(ctx->saved_data[Kept::kName]), grads);
  }

  // The gradients of the arguments that are there.
  static variable_list gradients(AutogradContext* ctx, const Kept& kept, const variable_list& grads) {
    const Norm& norm = *norms()[kept.norm];
    const Op& op = norm.op;
    const size_t arguments = kept.types.size();
    Needs needs = {};
    for (size_t i = 0, edge = 0; i < arguments; ++i) {  // only what is there has an edge
      needs[i] = kept.types[i] >= 0 && ctx->needs_input_grad(edge++);
    }
    const bool of_sum = norm.takes_residual;
    const bool needs_dx = needs[op.data] || (of_sum && needs[op.residual]);  // one gradient
    const Tensor dresidual = of_sum && needs_dx ? grads[1] : Tensor();

    variable_list found(arguments);
    found[op.data] = dresidual;
    if (const Tensor& dy = grads[0]; dy.defined()) {  // else the gradient went past the norm
      auto needed = needs;
      needed[op.data] = needs_dx;
      compute(ctx, kept, norm, dy, dresidual, needed, &found);
    }
    if (of_sum) found[op.residual] = found[op.data];

    variable_list returned;
    returned.reserve(arguments);
    for (size_t i = 0; i < arguments; ++i) {
      if (kept.types[i] < 0) continue;
      const auto type = static_cast<at::ScalarType>(kept.types[i]);
      const bool is_cast = needs[i] && found[i].defined() && found[i].scalar_type() != type;
      returned.push_back(!needs[i] ? Tensor() : is_cast ? found[i].to(type) : std::move(found[i]));
    }
    return returned;
  }

 private:
  // The place of what a gradient is of, among a forward's arguments.
  static size_t argument_of(const Op& op, Operand::Element element) {
    switch (element) {
      case Operand::Element::gamma:
        return op.weight;
      case Operand::Element::beta:
        return op.bias;
      case Operand::Element::gate:
        return op.gate;
      default:
        return op.data;
    }
  }

  // The gradients of the op's arguments that are needed, by the norm's backward.
  static void compute(AutogradContext* ctx, const Kept& kept, const Norm& norm, const Tensor& dy,
                      const Tensor& dresidual, const Needs& needed, variable_list* found) {
    const auto saved = ctx->get_saved_variables();
    const Op& used = kept.memory_efficient ? norm.from_output_op : norm.gradients_op;
    c10::SmallVector<size_t, kMostMasked> places;  // of what the gradients are of, among the
                                                   // op's arguments
    c10::SmallVector<bool, kMostMasked> asked;
    for (const Operand& gradient : used.results) {
      places.push_back(argument_of(norm.op, gradient.element));
      asked.push_back(needed[places.back()]);
    }
    if (at::GradMode::is_enabled()) {
      auto computed = differentiably(kept, norm, saved, dy, dresidual, asked);
      for (size_t i = 0, next = 0; i < places.size(); ++i) {
        if (asked[i]) (*found)[places[i]] = std::move(computed[next++]);
      }
      return;
    }
    Given given = {};
    for (size_t i = 0; i < used.arguments.size(); ++i) {
      given[i] = pointer_to(argument(used.arguments[i], saved, dy, dresidual));
    }
    // Without autograd's fallback for operators that it has no formula of.
    const at::AutoDispatchBelowADInplaceOrView below;
    if (comes_to_ours(given)) {
      const auto dims = saved[data].sizes().slice(saved[data].dim() - kept.normalized);
      auto results = known(used, given,
                           {dims, mask_of(used, asked), kept.eps, kept.weight_offset, std::nullopt,
                            integer_of(kept.rows_per_set)});
      if (results) {
        for (size_t i = 0; i < places.size(); ++i) {
          if (asked[i]) (*found)[places[i]] = std::move((*results)[i]);
        }
        return;
      }
    }
    Stack stack;
    stack.reserve(used.arguments.size() + 5);
    for (size_t i = 0; i < used.arguments.size(); ++i) {
      stack.push_back(given[i] ? IValue(*given[i]) : IValue());
    }
    torch::jit::push(stack, dims_of(kept, saved), list_of(asked), kept.eps, kept.weight_offset);
    if (norm.takes_sets) stack.push_back(kept.rows_per_set);
    (kept.memory_efficient ? norm.from_output : norm.gradients).call(&stack);
    for (size_t i = 0; i < places.size(); ++i) {
      if (asked[i] && pointer_to(stack[i])) (*found)[places[i]] = std::move(stack[i]).toTensor();
    }
  }

  // What was saved of a forward, in this order.
  enum Saved : size_t { data, mean, rstd, weight, bias, gate };

  // An argument of the norm's backward; undefined where it has none.
  static const Tensor& argument(const Operand& operand, const variable_list& saved,
                                const Tensor& dy, const Tensor& dresidual) {
    static const Tensor none;
    switch (operand.element) {
      case Operand::Element::dy:  // autograd has added up those of several uses
        return operand.name == "grad_output" ? dy : none;
      case Operand::Element::acc:
        return saved[operand.name == "mean" ? mean : rstd];
      case Operand::Element::gamma:
        return saved[weight];
      case Operand::Element::beta:
        return saved[bias];
      case Operand::Element::residual:
        return dresidual;
      case Operand::Element::gate:
        return saved[gate];
      default:
        return saved[data];
    }
  }

  static IValue dims_of(const Kept& kept, const variable_list& saved) {
    const auto sizes = saved[data].sym_sizes();
    return sizes.slice(sizes.size() - kept.normalized);
  }

  static c10::List<bool> list_of(const c10::SmallVector<bool, kMostMasked>& asked) {
    c10::List<bool> all;
    for (bool each : asked) all.push_back(each);
    return all;
  }

  // The gradients that are asked for, by operators that can be differentiated themselves.
  static std::vector<Tensor> differentiably(const Kept& kept, const Norm& norm,
                                            const variable_list& saved, const Tensor& dy,
                                            const Tensor& dresidual,
                                            const c10::SmallVector<bool, kMostMasked>& asked) {
    TORCH_CHECK(!kept.memory_efficient,
                "memory_efficient: expected a backward that is not differentiated itself, got "
                "create_graph=True; the input was not saved");
    Stack stack = {kept.norm,
                   dy,
                   value_of(dresidual),
                   saved[data],
                   value_of(saved[weight]),
                   value_of(saved[bias]),
                   value_of(saved[gate]),
                   dims_of(kept, saved),
                   kept.eps,
                   kept.weight_offset,
                   kept.rows_per_set,
                   list_of(asked)};
    norm.differentiable.call(&stack);
    return stack.back().toTensorVector();
  }
};

// The node itself, which keeps what is not a tensor in a plain struct.
class NormNode final : public torch::autograd::CppNode<Differentiated> {
 public:
  Kept kept;

  // As profilers and `grad_fn` show it.
  std::string name() const override { return "IreeNormBackward"; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return Differentiated::gradients(&ctx_, kept, grads);
  }

  // Compiled autograd asks for these first, and then calls Differentiated::backward.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    const_cast<AutogradContext&>(ctx_).saved_data[Kept::kName] = kept.value();
    const_cast<std::vector<bool>&>(is_variable_input_).assign(num_outputs(), true);
    CppNode::compiled_args(args);
  }
};

// Computes a norm, and puts it into autograd's graph.
//
// It takes the norm's arguments from the stack, and leaves its results there. The tensors are the
// arguments that are there, once more. This is what autograd's Function does, without what a norm
// has no use for: results that are arguments, or views, or have no gradient; what these lists take
// can be measured.
inline void differentiate(int64_t number, const Taken& taken, at::TensorList there, Stack* stack) {
  if (const auto& tls = at::functorch::functorchTLSAccessor()) {
    tls->checkSupportsCppAutogradFunction();
  }
  const Norm& norm = *norms()[number];
  const Op& op = norm.op;
  TORCH_CHECK_VALUE(!taken.memory_efficient || &norm.from_output_op != &norm.gradients_op,
                    "memory_efficient: expected False of a norm with a gate, got True");
  auto node = new_node<NormNode>();
  torch::autograd::edge_list edges;
  edges.reserve(there.size());
  for (const Tensor& each : there) edges.push_back(torch::autograd::impl::gradient_edge(each));
  node->set_ctx_grad_fn(node);
  node->set_next_edges(std::move(edges));
  node->kept = Kept(number, taken, op.arguments.size());
  Given given = {};  // the stack gives its own up
  for (size_t i = 0, next = 0; i < op.arguments.size(); ++i) {
    if (taken.tensors[i]) given[i] = &there[next++];
  }
  const size_t first = stack->size() - taken.count;  // result
  const bool memory_efficient = taken.memory_efficient;
  {
    const at::AutoGradMode without_gradients(false);
    without_autograd(norm, taken, stack);
  }
  static const Tensor none;
  const auto result = [&](int at) -> const Tensor& {
    return at < 0 ? none : (*stack)[first + at].toTensor();
  };
  const Tensor &output = result(0), &residual_output = result(norm.residual_output);
  const Tensor* data = norm.takes_residual ? &residual_output : given[op.data];
  const Tensor *mean = &result(norm.mean), *rstd = &result(norm.rstd);
  if (memory_efficient) {
    data = &output;
    mean = &none;
  } else if (at::isReducedFloatingType(rstd->scalar_type())) {
    // PyTorch's on the CPU; too coarse to be of use, so the backward recomputes them.
    mean = rstd = &none;
  }
  const auto argument = [&](int at) { return at < 0 || !given[at] ? &none : given[at]; };
  node->ctx_.set_materialize_grads(false);
  torch::autograd::set_history(output, node);
  if (norm.takes_residual) torch::autograd::set_history(residual_output, node);
  auto& saved = torch::autograd::CppNode<Context>::saved(node->ctx_);
  saved.reserve(6);
  for (const Tensor* each : {data, mean, rstd, argument(op.weight), argument(op.bias),
                             argument(op.gate)}) {  // as Differentiated::Saved
    if (each->defined()) {
      saved.emplace_back(*each, each == &output || each == &residual_output);
    } else {
      saved.emplace_back();
    }
  }
}

// A norm with autograd on.
inline void with_autograd(int64_t number, const Norm& norm, const Taken& taken, Stack* stack) {
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
      torch::autograd::ForwardADLevel::try_get_by_idx(0)) {
    // torch.func differentiates and batches ATen's operators, and so does forward mode.
    return norm.by_aten.call(stack);
  }
  const bool requires_grad = std::any_of(
      taken.tensors.begin(), taken.tensors.end(),
      [](const Tensor* tensor) { return tensor && tensor->requires_grad(); });
  if (!requires_grad || !at::GradMode::is_enabled()) {  // no graph, then
    return without_autograd(norm, taken, stack);
  }
  c10::SmallVector<Tensor, kMostArguments> there;
  for (const Tensor* tensor : taken.tensors) {
    if (tensor) there.push_back(*tensor);
  }
  differentiate(number, taken, at::TensorList(there), stack);
}

class WithAutograd final : public c10::OperatorKernel {
 public:
  explicit WithAutograd(int64_t number) : number_(number), norm_(*norms()[number]) {}

  void operator()(const OperatorHandle&, DispatchKeySet, Stack* stack) {
    with_autograd(number_, norm_, Taken(norm_, *stack), stack);
  }

 private:
  const int64_t number_;
  const Norm& norm_;
};

// A norm's output alone, if nothing is between a caller and the norm's kernel; whether it is so.
inline bool output_alone(int64_t number, Stack* stack) {
  const Norm& norm = *norms()[number];
  const Taken taken(norm, *stack);
  switch (first_key(taken.tensors)) {
    case DispatchKey::AutogradCPU:
    case DispatchKey::AutogradCUDA:
      with_autograd(number, norm, taken, stack);
      break;
    case DispatchKey::CPU:
    case DispatchKey::CUDA:
      without_autograd(norm, taken, stack);
      break;
    default:
      return false;
  }
  torch::jit::drop(*stack, norm.results - 1);
  return true;
}

// The same: by the norm's kernel if nothing is between, else by its operator.
class Output final : public c10::OperatorKernel {
 public:
  explicit Output(int64_t number) : number_(number), norm_(*norms()[number]) {}

  void operator()(const OperatorHandle&, DispatchKeySet, Stack* stack) {
    if (output_alone(number_, stack)) return;
    norm_.itself.call(stack);
    torch::jit::drop(*stack, norm_.results - 1);
  }

 private:
  const int64_t number_;
  const Norm& norm_;
};

// A norm under autocast, in f32; with an output of a type that is said, in the given types.
class Autocast final : public c10::OperatorKernel {
 public:
  explicit Autocast(const Norm& norm) : norm_(norm) {}

  void operator()(const OperatorHandle&, DispatchKeySet, Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard without(
        at::autocast::get_autocast_dispatch_key_from_device_type(c10::DeviceType::CUDA));
    const Taken taken(norm_, *stack);
    IValue* values = stack->data() + stack->size() - taken.count;
    for (size_t i = 0; i < norm_.taken; ++i) {
      if (!values[i].isTensor() || taken.output_type) continue;
      values[i] = at::autocast::cached_cast(at::kFloat, values[i].toTensor(), c10::DeviceType::CUDA);
    }
    norm_.itself.call(stack);
  }

 private:
  const Norm& norm_;
};

}  // namespace iree_lnbwd
