// Operators of torch/operators.py once more, in C++: what a call costs the host is several times less
// where nothing is left to decide.
//
// Python decides, and checks. It sees the first backward of each kind (device, element types,
// shape, output mask) and tells `remember` what that call launches; later ones launch it from here,
// on PyTorch's current stream. Whatever is unusual (strides, a misaligned address) goes to Python
// each time.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/native_layer_norm.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/hash.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/library.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;
using Statistics = std::tuple<Tensor, Tensor, Tensor>;  // output, mean, rstd

// What one call launches.

// What a graph is told of a kernel: CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h.
struct KernelNode {
  void* function;
  unsigned workgroups[3];
  unsigned threads[3];
  unsigned shared_bytes;
  void** parameters;
  void** extra;
  void* kernel;
  void* context;
};

// A GPU's context, and functions of its driver: CUDA's, or HIP's, whose signatures are the same.
// Those of graphs are CUDA's alone.
struct Driver {
  void* context;
  int (*get_context)(void**);
  int (*push_context)(void*);
  int (*pop_context)(void**);
  int (*launch)(void* function, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                unsigned threads_y, unsigned threads_z, unsigned shared_bytes, void* stream,
                void** parameters, void** extra);
  int (*is_capturing)(void* stream, int* status);
  int (*set_node)(void* graph, void* node, const KernelNode* kernel);
  int (*launch_graph)(void* graph, void* stream);
};

// Kernels one after another that the driver takes at once, which is faster.
struct Graph {
  std::mutex mutex;  // of its nodes' arguments
  void* runnable;
  std::vector<void*> nodes;
};

struct Launch {
  void* function;
  std::array<unsigned, 3> workgroups;
  std::array<unsigned, 3> threads;
  unsigned shared_bytes;
  std::vector<int64_t> places;      // of its pointers, among those of the call
  std::vector<uint32_t> constants;  // behind them
};

struct Call {
  Driver driver;
  int64_t ones;  // address of a weight of ones, for an op that has none
  int64_t scratch_bytes;
  std::vector<int64_t> scratch;  // where each piece begins
  std::vector<Launch> launches;
  std::shared_ptr<Graph> graph;  // of these launches, if there is one
};

// What calls have in common that launch the same kernels.
struct Kind {
  at::Device device;
  int64_t rows;
  int64_t columns;
  at::ScalarType grad_output;
  at::ScalarType input;
  std::optional<at::ScalarType> weight;
  std::optional<at::ScalarType> bias;
  std::array<bool, 3> output_mask;

  bool operator==(const Kind& other) const {
    const auto fields = [](const Kind& kind) {
      return std::tie(kind.device, kind.rows, kind.columns, kind.grad_output, kind.input,
                      kind.weight, kind.bias, kind.output_mask);
    };
    return fields(*this) == fields(other);
  }
};

struct HashOfKind {
  size_t operator()(const Kind& kind) const {
    const auto& [dx, dgamma, dbeta] = kind.output_mask;
    return c10::get_hash(kind.device, kind.rows, kind.columns, kind.grad_output, kind.input,
                         kind.weight, kind.bias, dx, dgamma, dbeta);
  }
};

constexpr int64_t kAccessBytes = 16;  // what kernels may assume of the address of a row

class Calls {
 public:
  std::shared_ptr<const Call> find(const Kind& kind) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = calls_.find(kind);
    return found == calls_.end() ? nullptr : found->second;
  }
  void add(const Kind& kind, Call call) {
    std::lock_guard<std::mutex> lock(mutex_);
    calls_[kind] = std::make_shared<const Call>(std::move(call));
  }
  std::shared_ptr<Graph> graph(at::IntArrayRef handles) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& graph = graphs_[handles[0]];
    if (!graph) {
      graph = std::make_shared<Graph>();
      graph->runnable = reinterpret_cast<void*>(handles[0]);
      for (int64_t node : handles.slice(1)) graph->nodes.push_back(reinterpret_cast<void*>(node));
    }
    return graph;
  }
  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    calls_.clear();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<Graph>> graphs_;
  std::unordered_map<Kind, std::shared_ptr<const Call>, HashOfKind> calls_;
};

Calls& calls() {
  static Calls all;
  return all;
}

// Python's side of `calls`.
void remember(at::Device device, int64_t rows, int64_t columns, at::ScalarType grad_output,
              at::ScalarType input, std::optional<at::ScalarType> weight,
              std::optional<at::ScalarType> bias, std::array<bool, 3> output_mask,
              at::IntArrayRef driver, int64_t ones, int64_t scratch_bytes, at::IntArrayRef scratch,
              at::IntArrayRef launches, at::IntArrayRef graph) {
  const size_t addresses = graph.empty() ? 5 : 8;
  TORCH_CHECK(driver.size() == addresses, "driver: expected ", addresses, " addresses, got ",
              driver.size());
  Call call{{}, ones, scratch_bytes, scratch.vec(), {}, nullptr};
  call.driver.context = reinterpret_cast<void*>(driver[0]);
  const auto function = [&](auto& function, size_t at) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(driver[at]);
  };
  function(call.driver.get_context, 1);
  function(call.driver.push_context, 2);
  function(call.driver.pop_context, 3);
  function(call.driver.launch, 4);
  if (!graph.empty()) {
    function(call.driver.is_capturing, 5);
    function(call.driver.set_node, 6);
    function(call.driver.launch_graph, 7);
    call.graph = calls().graph(graph);
  }
  size_t at = 0;
  auto next = [&] {
    TORCH_CHECK(at < launches.size(), "launches: expected more than ", at, " numbers");
    return launches[at++];
  };
  while (at < launches.size()) {
    Launch& launch = call.launches.emplace_back();
    launch.function = reinterpret_cast<void*>(next());
    for (auto& count : launch.workgroups) count = static_cast<unsigned>(next());
    for (auto& count : launch.threads) count = static_cast<unsigned>(next());
    launch.shared_bytes = static_cast<unsigned>(next());
    launch.places.resize(next());
    for (auto& place : launch.places) place = next();
    launch.constants.resize(next());
    for (auto& constant : launch.constants) constant = static_cast<uint32_t>(next());
  }
  calls().add({device, rows, columns, grad_output, input, weight, bias, output_mask},
              std::move(call));
}

void forget() { calls().clear(); }

void check(int status, const char* what) {
  TORCH_CHECK(status == 0, "device: ", what, " failed with ", status);
}

// Makes a GPU's context the thread's for a while; a new thread of PyTorch's may have none.
class CurrentContext {
 public:
  explicit CurrentContext(const Driver& driver) : driver_(driver) {
    void* current = nullptr;
    check(driver.get_context(&current), "looking up the context");
    if (current != driver.context) {
      check(driver.push_context(driver.context), "setting the context");
      pushed_ = true;
    }
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  ~CurrentContext() {
    void* popped = nullptr;
    if (pushed_) driver_.pop_context(&popped);
  }

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

// A launch's arguments as the driver reads them: pointers, then constants of 32 bits.
class Arguments {
 public:
  Arguments(const Launch& launch, at::ArrayRef<int64_t> pointers) {
    for (int64_t place : launch.places) {
      const auto pointer = static_cast<uint64_t>(pointers[place]);
      values_.push_back(static_cast<uint32_t>(pointer));
      values_.push_back(static_cast<uint32_t>(pointer >> 32));
    }
    values_.append(launch.constants.begin(), launch.constants.end());
    size_ = values_.size() * sizeof(uint32_t);
    void* const buffer_pointer = reinterpret_cast<void*>(1);  // the driver's names of what follows
    void* const buffer_size = reinterpret_cast<void*>(2);
    extra_ = {buffer_pointer, values_.data(), buffer_size, &size_, nullptr};
  }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  void** extra() { return extra_.data(); }

 private:
  c10::SmallVector<uint32_t, 32> values_;
  size_t size_;
  std::array<void*, 5> extra_;
};

bool is_capturing(const Driver& driver, void* stream) {
  int status = 0;
  check(driver.is_capturing(stream, &status), "asking for a stream's capture");
  return status != 0;
}

void run_graph(const Call& call, at::ArrayRef<int64_t> pointers, void* stream) {
  Graph& graph = *call.graph;
  std::lock_guard<std::mutex> lock(graph.mutex);
  for (size_t i = 0; i < call.launches.size(); ++i) {
    const Launch& launch = call.launches[i];
    const auto& [x, y, z] = launch.workgroups;
    const auto& [threads_x, threads_y, threads_z] = launch.threads;
    Arguments arguments(launch, pointers);
    const KernelNode node = {launch.function,
                             {x, y, z},
                             {threads_x, threads_y, threads_z},
                             launch.shared_bytes,
                             nullptr,
                             arguments.extra(),
                             nullptr,
                             nullptr};
    check(call.driver.set_node(graph.runnable, graph.nodes[i], &node), "setting a kernel");
  }
  check(call.driver.launch_graph(graph.runnable, stream), "launching kernels");
}

void run(const Call& call, at::ArrayRef<int64_t> pointers, void* stream) {
  const CurrentContext current(call.driver);
  // What a caller captures becomes part of the caller's graph, with these pointers.
  if (call.graph && !is_capturing(call.driver, stream)) return run_graph(call, pointers, stream);
  for (const Launch& launch : call.launches) {
    const auto& [x, y, z] = launch.workgroups;
    const auto& [threads_x, threads_y, threads_z] = launch.threads;
    Arguments arguments(launch, pointers);
    check(call.driver.launch(launch.function, x, y, z, threads_x, threads_y, threads_z,
                             launch.shared_bytes, stream, nullptr, arguments.extra()),
          "launching a kernel");
  }
}

// The operators.

template <typename Signature>
c10::TypedOperatorHandle<Signature> operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

using Backward = Gradients(const Tensor&, const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                           std::array<bool, 3>, double);
using Forward = Statistics(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                           const OptionalTensor&, double);

bool is_there(const OptionalTensor& tensor) { return tensor && tensor->defined(); }

std::optional<at::ScalarType> type_of(const OptionalTensor& tensor) {
  if (!is_there(tensor)) return std::nullopt;
  return tensor->scalar_type();
}

// Python copies what is not, and refuses what has no memory (any more).
bool is_usable(const Tensor& tensor) {
  const size_t bytes = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
  return tensor.is_contiguous() && tensor.const_data_ptr() != nullptr &&
         tensor.storage().nbytes() >= bytes &&
         reinterpret_cast<int64_t>(tensor.const_data_ptr()) % kAccessBytes == 0;
}

bool is_usable(const OptionalTensor& tensor, at::Device device, at::IntArrayRef sizes) {
  return !is_there(tensor) ||
         (tensor->device() == device && tensor->sizes() == sizes && is_usable(*tensor));
}

bool is_statistic(const OptionalTensor& tensor, const Tensor& input, int64_t rows) {
  const auto type = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return is_there(tensor) && tensor->device() == input.device() &&
         tensor->scalar_type() == type && tensor->numel() == rows && is_usable(*tensor);
}

int64_t address(const OptionalTensor& tensor) {
  return is_there(tensor) ? reinterpret_cast<int64_t>(tensor->const_data_ptr()) : 0;
}

// The call's kind, if the call is one that kernels could run as it stands.
std::optional<Kind> kind_of(const Tensor& grad_output, const Tensor& input,
                            at::IntArrayRef normalized_shape, const OptionalTensor& mean,
                            const OptionalTensor& rstd, const OptionalTensor& weight,
                            const OptionalTensor& bias, const std::array<bool, 3>& mask) {
  const auto sizes = input.sizes();
  if (normalized_shape.empty() || sizes.size() < normalized_shape.size() ||
      sizes.slice(sizes.size() - normalized_shape.size()) != normalized_shape ||
      input.numel() == 0) {
    return std::nullopt;
  }
  const auto device = input.device();
  const int64_t columns = c10::multiply_integers(normalized_shape);
  const int64_t rows = input.numel() / columns;
  if (!is_usable(input) || !is_usable(grad_output, device, sizes) ||
      !is_statistic(mean, input, rows) || !is_statistic(rstd, input, rows) ||
      !is_usable(weight, device, normalized_shape) ||
      (is_there(bias) && bias->device() != device)) {
    return std::nullopt;
  }
  return Kind{device,
              rows,
              columns,
              grad_output.scalar_type(),
              input.scalar_type(),
              type_of(weight),
              type_of(bias),
              mask};
}

// There is nothing left to dispatch on.
Tensor empty(at::IntArrayRef sizes, at::ScalarType type, at::Device device) {
  return at::_ops::empty_memory_format::redispatch(
      c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::fromIntArrayRefSlow(sizes), type,
      at::kStrided, device, std::nullopt, std::nullopt);
}

Gradients backward(const Tensor& grad_output, const Tensor& input,
                   c10::SymIntArrayRef normalized_shape, const OptionalTensor& mean,
                   const OptionalTensor& rstd, const OptionalTensor& weight,
                   const OptionalTensor& bias, std::array<bool, 3> mask, double eps) {
  const auto dims = C10_AS_INTARRAYREF_SLOW(normalized_shape);
  const auto kind = kind_of(grad_output, input, dims, mean, rstd, weight, bias, mask);
  const auto call = kind ? calls().find(*kind) : nullptr;
  if (!call) {
    static const auto in_python = operator_of<Backward>("iree_lnbwd::layer_norm_backward_checked");
    return in_python.call(grad_output, input, normalized_shape, mean, rstd, weight, bias, mask,
                          eps);
  }
  const c10::DeviceGuard guard(input.device());
  const auto of_weight = kind->weight.value_or(kind->input);
  const auto of_bias = kind->bias.value_or(of_weight);
  Tensor dx = mask[0] ? empty(input.sizes(), kind->input, kind->device) : Tensor();
  Tensor dgamma = mask[1] && kind->weight ? empty(dims, of_weight, kind->device) : Tensor();
  Tensor dbeta = mask[2] ? empty(dims, of_bias, kind->device) : Tensor();
  // Of this stream, like the kernels: freed here, it is not used again before they are done.
  const auto scratch = c10::GetAllocator(c10::kCUDA)->allocate(call->scratch_bytes);
  const auto scratch_begins = reinterpret_cast<int64_t>(scratch.get());
  c10::SmallVector<int64_t, 16> pointers = {
      address(grad_output),
      address(input),
      address(mean),
      address(rstd),
      kind->weight ? address(weight) : call->ones,
      address(dx),
      address(dgamma),
      address(dbeta),
  };
  for (int64_t begins : call->scratch) pointers.push_back(scratch_begins + begins);
  const c10::impl::VirtualGuardImpl device(input.device().type());
  run(*call, pointers, device.getStream(input.device()).native_handle());
  return {std::move(dx), std::move(dgamma), std::move(dbeta)};
}

bool has_module(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble;
}

// PyTorch's own takes one element type only on GPUs; Python widens, or refuses, the others.
Statistics forward(const Tensor& input, c10::SymIntArrayRef normalized_shape,
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
      "remember(Device device, int rows, int columns, ScalarType grad_output, ScalarType input, "
      "ScalarType? weight, ScalarType? bias, bool[3] output_mask, int[] driver, int ones, "
      "int scratch_bytes, int[] scratch, int[] launches, int[] graph) -> ()",
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
