// Operators of torch/operators.py once more, in C++: what a call costs the host is several times less
// where nothing is left to decide.
//
// Python decides, and checks. It describes the ops and the norms, sees the first call of each kind
// (device, element types, shape, strides of rows, options) and tells `remember` what that call
// launches; later ones launch it from here, on PyTorch's current stream. Rows with more than two
// strides are copied. Whatever is unusual (memory that was freed, misaligned elements) goes to Python
// each time.

#include <ATen/FuncTorchTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/native_layer_norm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <mutex>
#include <sstream>

#include "torch_norms.h"
#include "torch_warnings.h"

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using iree_lnbwd::Given;
using iree_lnbwd::calls;
using iree_lnbwd::Op;
using iree_lnbwd::Operand;
using iree_lnbwd::Options;
using iree_lnbwd::ops;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Stack = torch::jit::Stack;

// --- what Python says ------------------------------------------------------------------------

template <typename Value>
Value one_of(const std::string& word, std::initializer_list<std::pair<const char*, Value>> known) {
  for (const auto& [name, value] : known) {
    if (word == name) return value;
  }
  TORCH_CHECK(false, "operand: expected a word of operands.py, got ", word);
}

// From the words of a row of the table: name, kind, element, access, when.
Operand operand_of(const std::string& row) {
  std::istringstream words(row);
  std::string name, kind, element, access, when;
  TORCH_CHECK(words >> name >> kind >> element >> access >> when,
              "operand: expected five words, got ", row);
  using Extent = Operand::Extent;
  using Element = Operand::Element;
  return {name,
          one_of<Extent>(kind, {{"mn", Extent::cells}, {"m", Extent::rows}, {"n", Extent::columns}}),
          one_of<Element>(element, {{"dy", Element::dy},
                                    {"x", Element::x},
                                    {"acc", Element::acc},
                                    {"gamma", Element::gamma},
                                    {"beta", Element::beta},
                                    {"residual", Element::residual},
                                    {"z", Element::gate}}),
          access == "READ",
          when == "ASKED_FOR" || when == "ASKED_FOR_WITH_BIAS",
          when == "ASKED_FOR_WITH_BIAS",
          when == "RESIDUAL_GIVEN"};
}

// Describes an op; ops are numbered in the order in which they come.
int64_t describe_op(std::string name, bool is_backward, const std::string& data,
                    const std::vector<std::string>& arguments,
                    const std::vector<std::string>& results) {
  auto op = std::make_unique<Op>();
  op->name = std::move(name);
  op->is_backward = is_backward;
  TORCH_CHECK(arguments.size() <= iree_lnbwd::kMostArguments, op->name, ": expected at most ",
              iree_lnbwd::kMostArguments, " arguments, got ", arguments.size());
  for (const auto& row : arguments) {
    const int at = static_cast<int>(op->arguments.size());
    const Operand& operand = op->arguments.emplace_back(operand_of(row));
    if (operand.name == data) op->data = at;
    if (operand.element == Operand::Element::gamma) op->weight = at;
    if (operand.element == Operand::Element::beta) op->bias = at;
    if (operand.element == Operand::Element::residual) op->residual = at;
    if (operand.element == Operand::Element::gate) op->gate = at;
    if (operand.name == "rstd") op->rstd = at;
  }
  for (const auto& row : results) op->results.push_back(operand_of(row));
  TORCH_CHECK(op->results.size() <= iree_lnbwd::kMostMasked, op->name, ": expected at most ",
              iree_lnbwd::kMostMasked, " results, got ", op->results.size());
  ops().push_back(std::move(op));
  return static_cast<int64_t>(ops().size()) - 1;
}

const Op& op_of(int64_t number) {
  TORCH_CHECK(number >= 0 && number < static_cast<int64_t>(ops().size()),
              "op: expected the number of an op that was described, got ", number);
  return *ops()[number];
}

// Python's side of `calls`; the tensors are those of one such call.
void remember(int64_t op, const c10::List<std::optional<Tensor>>& tensors,
              at::IntArrayRef normalized_shape, const c10::List<bool>& mask,
              std::optional<double> eps, double weight_offset,
              std::optional<at::ScalarType> output_dtype, std::optional<int64_t> rows_per_set,
              at::IntArrayRef driver, int64_t ones, int64_t scratch_bytes, at::IntArrayRef scratch,
              at::IntArrayRef launches, at::IntArrayRef graph, at::IntArrayRef strides) {
  const Op& described = op_of(op);
  TORCH_CHECK(tensors.size() == described.arguments.size(), "tensors: expected ",
              described.arguments.size(), " of ", described.name, ", got ", tensors.size());
  std::vector<std::optional<Tensor>> kept(tensors.begin(), tensors.end());
  Given given = {};
  for (size_t i = 0; i < kept.size(); ++i) given[i] = iree_lnbwd::pointer_to(kept[i]);
  TORCH_CHECK(given[described.data] != nullptr, "tensors: expected ",
              described.arguments[described.data].name, " among them, got none");
  const Options options = {normalized_shape, mask_of(described, mask), eps, weight_offset,
                           output_dtype,     rows_per_set};
  const auto numbers = [](at::IntArrayRef given) {
    return iree_lnbwd::Numbers{given.data(), given.size()};
  };
  auto call = iree_lnbwd::call_of(numbers(driver), ones, scratch_bytes, numbers(scratch),
                                  numbers(launches), numbers(graph));
  const auto kind = kind_of(described, given, options);
  if (!kind) return;
  if (!strides.empty()) {  // of all rows of a call, then of each argument
    TORCH_CHECK(strides.size() == 1 + 2 * described.arguments.size(),
                "strides: expected those of the arguments, got ", strides.size(), " numbers");
    iree_lnbwd::Layout layout;
    layout.inner_count = strides[0];
    for (size_t i = 0; i < described.arguments.size(); ++i) {
      layout.strides[i] = {static_cast<int32_t>(strides[1 + 2 * i]),
                           static_cast<int32_t>(strides[2 + 2 * i])};
    }
    if (!(kind->layout == layout)) return;  // Python knows such calls by others
    call.strided = true;
  }
  calls().add(*kind, std::move(call));
}

void forget() { calls().clear(); }

void tell_of_fork() { iree_lnbwd::is_forked() = true; }

// --- the operators -----------------------------------------------------------------------------

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
int place_of(const std::string& name, const std::vector<const Operand*>& results) {
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
std::array<std::unique_ptr<const Norm>, 32>& norms() {
  static std::array<std::unique_ptr<const Norm>, 32> all;
  return all;
}

std::optional<double> double_of(const IValue& value) { return value.toOptional<double>(); }

const Tensor* pointer_to(const IValue& value) {
  return value.isNone() ? nullptr : iree_lnbwd::pointer_to(value.toTensor());
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

c10::DimVector integers_of(const IValue& value) {
  if (value.isIntList()) return value.toDimVector();
  c10::DimVector found;
  for (const auto& each : value.toSymIntVector()) {
    found.push_back(each.guard_int(__FILE__, __LINE__));
  }
  return found;
}

std::optional<int64_t> integer_of(const IValue& value) {
  if (value.isNone()) return std::nullopt;
  return value.isInt() ? value.toInt() : value.toSymInt().guard_int(__FILE__, __LINE__);
}

// PyTorch's own takes one element type only on GPUs; Python widens, or refuses, the others.
void forward_by_pytorch(const Norm& norm, const Taken& taken, Stack* stack) {
  const Op& op = norm.op;
  const Tensor& input = *taken.tensors[op.data];
  const auto type = input.scalar_type();
  const Tensor* weight = taken.tensors[op.weight];
  const Tensor* bias = taken.tensors[op.bias];
  const auto alike = [&](const Tensor* tensor) {
    return !tensor || (tensor->scalar_type() == type && tensor->device() == input.device());
  };
  const bool has_module =
      type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble;
  if (!has_module || !alike(weight) || !alike(bias)) return norm.by_aten.call(stack);
  const auto given = [](const Tensor* tensor) {
    return tensor ? std::optional<Tensor>(*tensor) : std::nullopt;
  };
  const IValue& dims = taken.normalized_shape;
  auto [output, mean, rstd] =
      dims.isIntList()
          ? at::native_layer_norm(input, dims.toDimVector(), given(weight), given(bias),
                                  taken.eps.value())
          : at::native_layer_norm_symint(input, dims.toSymIntVector(), given(weight), given(bias),
                                         taken.eps.value());
  torch::jit::drop(*stack, taken.count);
  torch::jit::push(*stack, std::move(output), std::move(mean), std::move(rstd));
}

// A norm, without autograd.
class Forward final : public c10::OperatorKernel {
 public:
  explicit Forward(const Norm& norm) : norm_(norm) {}

  void operator()(const OperatorHandle&, DispatchKeySet, Stack* stack) {
    const Taken taken(norm_, *stack);
    if (!norm_.own_forward) return forward_by_pytorch(norm_, taken, stack);
    const auto dims = integers_of(taken.normalized_shape);
    auto results = known(norm_.op, taken.tensors,
                         {dims,
                          {},
                          taken.eps,
                          taken.weight_offset,
                          taken.output_type,
                          integer_of(taken.rows_per_set)});
    if (!results) return norm_.checked.call(stack);
    torch::jit::drop(*stack, taken.count);
    for (size_t i = 0; i < results->size(); ++i) {
      if (norm_.returns(norm_.op.results[i])) stack->emplace_back(std::move((*results)[i]));
    }
  }

 private:
  const Norm& norm_;
};

// A backward, without autograd.
class Gradients final : public c10::OperatorKernel {
 public:
  Gradients(const std::string& name, const Op& op, bool takes_sets)
      : op_(op), checked_(name + "_checked"), takes_sets_(takes_sets) {}

  void operator()(const OperatorHandle&, DispatchKeySet, Stack* stack) {
    const size_t tensors = op_.arguments.size(), taken = tensors + 4 + takes_sets_;
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
                          std::nullopt,
                          takes_sets_ ? integer_of(options[4]) : std::nullopt});
    if (!results) return checked_.call(stack);
    torch::jit::drop(*stack, taken);
    for (auto& result : *results) stack->emplace_back(std::move(result));
  }

 private:
  const Op& op_;
  Named checked_;
  const bool takes_sets_;
};

IValue value_of(const Tensor& tensor) { return tensor.defined() ? IValue(tensor) : IValue(); }

// Below autograd.
void without_autograd(const Norm& norm, const Taken& taken, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (norm.own_forward) {
    norm.itself.call(stack);
  } else {  // ATen's in place of the operator again, so that a compiler may fuse it
    forward_by_pytorch(norm, taken, stack);
  }
}

// What a backward knows of its call, beside the tensors: one entry of autograd's, for each costs.
struct Kept {
  static constexpr const char* kName = "call";
  enum Place : size_t {
    norm,
    normalized,
    eps,
    weight_offset,
    memory_efficient,
    rows_per_set,
    types
  };

  static IValue of(int64_t norm, const Taken& taken, size_t arguments) {
    c10::impl::GenericList all(c10::AnyType::get());
    all.reserve(types + arguments);
    all.push_back(norm);
    all.push_back(static_cast<int64_t>(taken.normalized_shape.toListRef().size()));
    all.push_back(taken.eps);
    all.push_back(taken.weight_offset);
    all.push_back(taken.memory_efficient);
    all.push_back(taken.rows_per_set);
    for (size_t i = 0; i < arguments; ++i) {  // of gradients, too; -1: not there
      const Tensor* tensor = taken.tensors[i];
      all.push_back(tensor ? static_cast<int64_t>(tensor->scalar_type()) : int64_t{-1});
    }
    return all;
  }
};

using Needs = std::array<bool, iree_lnbwd::kMostArguments>;

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

// A norm in autograd's graph.
//
// `apply` is the base's without what a norm has no use for: results that are arguments, or views, or
// have no gradient; what these lists take can be measured.
class Differentiated : public torch::autograd::Function<Differentiated> {
 public:
  static constexpr bool is_traceable = true;

  // Takes the norm's arguments from the stack, and leaves its results there. The tensors are the
  // arguments that are there, once more.
  static void apply(int64_t number, Stack* stack, at::TensorList there) {
    if (const auto& tls = at::functorch::functorchTLSAccessor()) {
      tls->checkSupportsCppAutogradFunction();
    }
    const Norm& norm = *norms()[number];
    auto node = new_node<torch::autograd::CppNode<Differentiated>>();
    torch::autograd::edge_list edges;
    edges.reserve(there.size());
    for (const Tensor& each : there) {
      edges.push_back(torch::autograd::impl::gradient_edge(each));
    }
    node->is_variable_input_.assign(there.size(), true);
    node->set_ctx_grad_fn(node);
    node->set_next_edges(std::move(edges));
    {
      const at::AutoGradMode without_gradients(false);
      forward(&node->ctx_, number, stack, there);
    }
    torch::autograd::set_history((*stack)[0].toTensor(), node);
    if (norm.takes_residual) {
      torch::autograd::set_history((*stack)[norm.residual_output].toTensor(), node);
    }
    node->save_variables_to_ctx();
  }

 private:
  static void forward(AutogradContext* ctx, int64_t number, Stack* stack, at::TensorList there) {
    const Norm& norm = *norms()[number];
    const Op& op = norm.op;
    const Taken taken(norm, *stack);
    // The stack gives its own up.
    Given given = {};
    for (size_t i = 0, next = 0; i < op.arguments.size(); ++i) {
      if (taken.tensors[i]) given[i] = &there[next++];
    }
    const auto memory_efficient = taken.memory_efficient;
    TORCH_CHECK_VALUE(!memory_efficient || &norm.from_output_op != &norm.gradients_op,
                      "memory_efficient: expected False of a norm with a gate, got True");
    ctx->saved_data[Kept::kName] = Kept::of(number, taken, op.arguments.size());
    without_autograd(norm, taken, stack);
    static const Tensor none;
    const auto result = [&](int at) -> const Tensor& {
      return at < 0 ? none : (*stack)[at].toTensor();
    };
    const Tensor &output = result(0), &residual_output = result(norm.residual_output);
    const Tensor* data = norm.takes_residual ? &residual_output : given[op.data];
    const Tensor *mean = &result(norm.mean), *rstd = &result(norm.rstd);
    ctx->set_materialize_grads(false);
    if (memory_efficient) {
      data = &output;
      mean = &none;
    } else if (at::isReducedFloatingType(rstd->scalar_type())) {
      // PyTorch's on the CPU; too coarse to be of use, so the backward recomputes them.
      mean = rstd = &none;
    }
    const auto argument = [&](int at) { return at < 0 || !given[at] ? &none : given[at]; };
    variable_list saved;  // a list in braces would copy each tensor twice
    saved.reserve(6);
    for (const Tensor* each : {data, mean, rstd, argument(op.weight), argument(op.bias),
                               argument(op.gate)}) {
      saved.push_back(*each);
    }
    ctx->save_for_backward(std::move(saved));
  }

 public:
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto kept = ctx->saved_data[Kept::kName].toListRef();
    const Norm& norm = *norms()[kept[Kept::norm].toInt()];
    const Op& op = norm.op;
    const auto types = kept.slice(Kept::types);
    const size_t arguments = types.size();
    Needs needs = {};
    for (size_t i = 0, edge = 0; i < arguments; ++i) {  // only what is there has an edge
      needs[i] = types[i].toInt() >= 0 && ctx->needs_input_grad(edge++);
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
      if (types[i].toInt() < 0) continue;
      const auto type = static_cast<at::ScalarType>(types[i].toInt());
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
  static void compute(AutogradContext* ctx, at::ArrayRef<IValue> kept, const Norm& norm,
                      const Tensor& dy, const Tensor& dresidual, const Needs& needed,
                      variable_list* found) {
    const auto saved = ctx->get_saved_variables();
    const bool memory_efficient = kept[Kept::memory_efficient].toBool();
    const IValue &eps = kept[Kept::eps], &weight_offset = kept[Kept::weight_offset],
                 &rows_per_set = kept[Kept::rows_per_set];
    const Op& used = memory_efficient ? norm.from_output_op : norm.gradients_op;
    const auto sizes = saved[0].sym_sizes();
    const IValue dims(sizes.slice(sizes.size() - kept[Kept::normalized].toInt()));

    c10::SmallVector<size_t, iree_lnbwd::kMostMasked> places;  // of what the gradients are of,
                                                               // among the op's arguments
    c10::List<bool> mask;
    mask.reserve(iree_lnbwd::kMostMasked);
    for (const Operand& gradient : used.results) {
      places.push_back(argument_of(norm.op, gradient.element));
      mask.push_back(needed[places.back()]);
    }
    if (at::GradMode::is_enabled()) {
      TORCH_CHECK(!memory_efficient,
                  "memory_efficient: expected a backward that is not differentiated itself, got "
                  "create_graph=True; the input was not saved");
      Stack stack = {kept[Kept::norm],
                     dy,
                     value_of(dresidual),
                     saved[0],
                     value_of(saved[3]),
                     value_of(saved[4]),
                     value_of(saved[5]),
                     dims,
                     eps,
                     weight_offset,
                     rows_per_set,
                     mask};
      norm.differentiable.call(&stack);
      auto computed = stack.back().toTensorVector();
      auto next = computed.begin();
      for (size_t i = 0; i < places.size(); ++i) {
        if (mask[i]) (*found)[places[i]] = *next++;
      }
      return;
    }
    Stack stack;
    const Tensor none;
    stack.reserve(used.arguments.size() + 5);
    for (size_t i = 0; i < used.arguments.size(); ++i) {
      const Operand& argument = used.arguments[i];
      const auto& value = [&]() -> const Tensor& {
        switch (argument.element) {
          case Operand::Element::dy:  // autograd has added up those of several uses
            return argument.name == "grad_output" ? dy : none;
          case Operand::Element::acc:
            return argument.name == "mean" ? saved[1] : saved[2];
          case Operand::Element::gamma:
            return saved[3];
          case Operand::Element::beta:
            return saved[4];
          case Operand::Element::residual:
            return dresidual;
          case Operand::Element::gate:
            return saved[5];
          default:
            return saved[0];
        }
      }();
      stack.push_back(value_of(value));
    }
    torch::jit::push(stack, dims, mask, eps, weight_offset);
    if (norm.takes_sets) stack.push_back(rows_per_set);
    {
      // Without autograd's fallback for operators that it has no formula of.
      const at::AutoDispatchBelowADInplaceOrView below;
      (memory_efficient ? norm.from_output : norm.gradients).call(&stack);
    }
    for (size_t i = 0; i < places.size(); ++i) {
      if (mask[i] && pointer_to(stack[i])) (*found)[places[i]] = std::move(stack[i]).toTensor();
    }
  }
};

// A norm with autograd on.
class WithAutograd final : public c10::OperatorKernel {
 public:
  explicit WithAutograd(int64_t number) : number_(number), norm_(*norms()[number]) {}

  void operator()(const OperatorHandle&, DispatchKeySet, Stack* stack) {
    if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
        torch::autograd::ForwardADLevel::try_get_by_idx(0)) {
      // torch.func differentiates and batches ATen's operators, and so does forward mode.
      return norm_.by_aten.call(stack);
    }
    const Taken taken(norm_, *stack);
    const bool requires_grad = std::any_of(
        taken.tensors.begin(), taken.tensors.end(),
        [](const Tensor* tensor) { return tensor && tensor->requires_grad(); });
    if (!requires_grad || !at::GradMode::is_enabled()) {  // no graph, then
      return without_autograd(norm_, taken, stack);
    }
    c10::SmallVector<Tensor, iree_lnbwd::kMostArguments> there;
    for (const Tensor* tensor : taken.tensors) {
      if (tensor) there.push_back(*tensor);
    }
    Stack own(std::make_move_iterator(stack->end() - taken.count),
              std::make_move_iterator(stack->end()));  // `taken` is of no use any more
    stack->resize(stack->size() - own.size());
    Differentiated::apply(number_, &own, at::TensorList(there));
    std::move(own.begin(), own.end(), std::back_inserter(*stack));
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

// --- their registration, in place of Python's ---------------------------------------------------

void put_in_place(const std::string& name, DispatchKey key, torch::CppFunction kernel) {
  static auto* const libraries = new std::map<DispatchKey, torch::Library>;
  const auto found =
      libraries->try_emplace(key, torch::Library::IMPL, "iree_lnbwd", key, __FILE__, __LINE__);
  const iree_lnbwd::WithoutOverrideWarning without;
  found.first->second.impl(name.c_str(), std::move(kernel));
}

template <class Kernel, class... Arguments>
void put_in_place(const std::string& name, std::initializer_list<DispatchKey> keys,
                  Arguments&&... arguments) {
  for (const DispatchKey key : keys) {
    put_in_place(name, key, torch::CppFunction::makeFromBoxedFunctor(
                                std::make_unique<Kernel>(arguments...)));
  }
}

void register_gradients(const std::string& name, int64_t op, bool takes_sets) {
  put_in_place<Gradients>(name, {DispatchKey::CPU, DispatchKey::CUDA}, name, op_of(op),
                          takes_sets);
}

void register_norm(int64_t number, const std::string& name, int64_t op, const std::string& gradients,
                   int64_t gradients_op, const std::string& from_output, int64_t from_output_op,
                   bool takes_residual, bool own_forward, bool takes_sets, bool autocast) {
  TORCH_CHECK(number >= 0 && number < static_cast<int64_t>(norms().size()) && !norms()[number],
              "number: expected one below ", norms().size(), " that is free, got ", number);
  norms()[number] =
      std::make_unique<const Norm>(name, op_of(op), gradients, op_of(gradients_op), from_output,
                                   op_of(from_output_op), takes_residual, own_forward, takes_sets);
  const Norm& norm = *norms()[number];
  put_in_place<Forward>(name, {DispatchKey::CPU, DispatchKey::CUDA}, norm);
  put_in_place<WithAutograd>(name, {DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA}, number);
  if (autocast) put_in_place<Autocast>(name, {DispatchKey::AutocastCUDA}, norm);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(iree_lnbwd, library) {
  library.def("describe_op(str name, bool is_backward, str data, str[] arguments, str[] results) "
              "-> int",
              describe_op);
  library.def("register_gradients(str name, int op, bool takes_sets) -> ()", register_gradients);
  library.def(
      "register_norm(int number, str name, int op, str gradients, int gradients_op, "
      "str from_output, int from_output_op, bool takes_residual, bool own_forward, "
      "bool takes_sets, bool autocast) -> ()",
      register_norm);
  library.def(
      "remember(int op, Tensor?[] tensors, int[] normalized_shape, bool[] mask, float? eps, "
      "float weight_offset, ScalarType? output_dtype, int? rows_per_set, int[] driver, int ones, "
      "int scratch_bytes, int[] scratch, int[] launches, int[] graph, int[] strides=[]) -> ()",
      remember);
  library.def("forget() -> ()", forget);
  library.def("tell_of_fork() -> ()", tell_of_fork);
}
