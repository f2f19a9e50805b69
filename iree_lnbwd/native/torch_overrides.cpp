// Kernels of ours for ATen's own operators, which run in place of PyTorch's while they are registered.
//
// A kernel decides by itself. A known kind of call is launched from here. Others go to Python, which
// may compile a module. What Python does not take goes to the kernel that was there before, with the
// same arguments. No call ends in an error of ours.

#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <utility>

#include "torch_norms.h"
#include "torch_warnings.h"

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using iree_lnbwd::OptionalTensor;
using iree_lnbwd::pointer_to;
using LayerNormGradients = std::tuple<Tensor, Tensor, Tensor>;
using RmsNormGradients = std::tuple<Tensor, Tensor>;
using LayerNormOutput = std::tuple<Tensor, Tensor, Tensor>;  // and mean, rstd
using RmsNormOutput = std::tuple<Tensor, Tensor>;            // and rstd

// The first of the ops that Python describes: those that ATen has, too.
enum class Op : int64_t { layer_norm, rms_norm, layer_norm_backward, rms_norm_backward };
constexpr size_t kOps = 4;

// ATen's names of the ops.
constexpr std::array<const char*, kOps> kNames = {"native_layer_norm", "_fused_rms_norm",
                                                  "native_layer_norm_backward",
                                                  "_fused_rms_norm_backward"};

// What became of a call; `counts` returns so many numbers of each override, in this order. Python
// counts what it does not take, with its reasons.
enum Outcome : size_t { kOurs, kLeftForArguments, kOutcomes };

// One operator on one kind of device.
struct Override {
  std::shared_ptr<const c10::SafeKernelFunction> original;  // a call may be in it: it is kept
  std::array<std::atomic<int64_t>, kOutcomes> counts{};

  void count(Outcome outcome) { counts[outcome].fetch_add(1, std::memory_order_relaxed); }

  // Runs the kernel that was there before.
  template <class Results, class... Arguments>
  Results hand_on(DispatchKeySet keys, Arguments... arguments) const {
    const auto kernel = std::atomic_load(&original);
    auto stack = c10::impl::boxArgs<Arguments...>(arguments...);
    kernel->callBoxed(kernel->opHandle(), keys, &stack);
    return c10::impl::PopResult<Results>::call(stack);
  }
};

Override& override_of(Op op, bool on_cpu) {
  static std::array<std::array<Override, 2>, kOps> all;
  return all[static_cast<size_t>(op)][on_cpu ? 1 : 0];
}

c10::OperatorHandle operator_named(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
}

// Python's answer to a call that is not known; nothing at all means that it does not take it.
template <Op op, class Results, class... Arguments>
Results in_python(Arguments... arguments) {
  static const auto typed =
      operator_named(std::string("iree_lnbwd::try_") + kNames[static_cast<size_t>(op)])
          .typed<Results(Arguments...)>();
  return typed.call(arguments...);
}

template <class... Tensors>
bool is_any_defined(const std::tuple<Tensors...>& results) {
  return std::apply([](const auto&... each) { return (each.defined() || ...); }, results);
}

// A call: by a launch, by Python, or by the kernel that was there before.
//
// `asks` says whether there is something to compute, and nothing that only PyTorch's would do.
template <Op op, class Results, class Known, class... Arguments>
Results run(DispatchKeySet keys, const Tensor& input, bool asks, const Known& known,
            Arguments... arguments) {
  Override& ours = override_of(op, input.is_cpu());
  if (!asks) {
    ours.count(kLeftForArguments);
  } else {
    if (std::optional<Results> launched = known()) {
      ours.count(kOurs);
      return *std::move(launched);
    }
    Results computed = in_python<op, Results, Arguments...>(arguments...);
    if (is_any_defined(computed)) {
      ours.count(kOurs);
      return computed;
    }
  }
  return ours.hand_on<Results, Arguments...>(keys, arguments...);
}

template <size_t... place>
auto first_of(iree_lnbwd::Results& results, std::index_sequence<place...>) {
  return std::make_tuple(std::move(results[place])...);
}

// A known call's first results.
template <Op op, size_t count>
auto launched(const iree_lnbwd::Given& given, const iree_lnbwd::Options& options) {
  using Places = std::make_index_sequence<count>;
  auto results = known(*iree_lnbwd::ops()[static_cast<size_t>(op)], given, options);
  return results ? std::optional(first_of(*results, Places())) : std::nullopt;
}

template <class Half>
void widen(const Tensor& from, const Tensor& to) {
  const Half* begin = from.const_data_ptr<Half>();
  std::copy(begin, begin + from.numel(), to.mutable_data_ptr<float>());
}

// PyTorch's statistics on the CPU are as coarse as the input. Its own backwards widen them, too.
Tensor widened(const Tensor& statistic) {
  const auto type = statistic.scalar_type();
  if (!at::isReducedFloatingType(type) || !statistic.is_cpu()) return statistic;
  const bool is_usual = type == at::kHalf || type == at::kBFloat16;
  if (!is_usual || !iree_lnbwd::is_there(statistic) || !iree_lnbwd::is_usable(statistic)) {
    return statistic.to(at::kFloat);
  }
  // Without the dispatcher, which takes longer than a few rows do.
  const Tensor wide = iree_lnbwd::empty(statistic.sizes(), at::kFloat, statistic.device());
  type == at::kHalf ? widen<at::Half>(statistic, wide) : widen<at::BFloat16>(statistic, wide);
  return wide;
}

LayerNormGradients layer_norm_backward(DispatchKeySet keys, const Tensor& grad_output,
                                       const Tensor& input, c10::SymIntArrayRef normalized_shape,
                                       const Tensor& mean, const Tensor& rstd,
                                       const OptionalTensor& weight, const OptionalTensor& bias,
                                       std::array<bool, 3> mask) {
  const auto dims = C10_AS_INTARRAYREF_SLOW(normalized_shape);
  const auto [dx, dgamma, dbeta] = mask;
  const bool asks = input.numel() > 0 && (dx || dgamma || dbeta) &&
                    (!dgamma || pointer_to(weight)) && (!dbeta || pointer_to(bias));
  const auto known = [&] {
    const Tensor wide_mean = widened(mean), wide_rstd = widened(rstd);
    return launched<Op::layer_norm_backward, 3>(
        {&grad_output, &input, pointer_to(wide_mean), pointer_to(wide_rstd), pointer_to(weight),
         pointer_to(bias), nullptr},
        {dims, {dx, dgamma, dbeta}, std::nullopt, 0});
  };
  return run<Op::layer_norm_backward, LayerNormGradients, decltype(known), const Tensor&,
             const Tensor&, c10::SymIntArrayRef, const Tensor&, const Tensor&,
             const OptionalTensor&, const OptionalTensor&, std::array<bool, 3>>(
      keys, input, asks, known, grad_output, input, normalized_shape, mean, rstd, weight,
      bias, mask);
}

RmsNormGradients rms_norm_backward(DispatchKeySet keys, const Tensor& grad_output,
                                   const Tensor& input, at::IntArrayRef normalized_shape,
                                   const Tensor& rstd, const OptionalTensor& weight,
                                   std::array<bool, 2> mask) {
  const auto [dx, dgamma] = mask;
  const bool asks = input.numel() > 0 && (dx || dgamma) && (!dgamma || pointer_to(weight));
  const auto known = [&] {
    const Tensor wide_rstd = widened(rstd);
    return launched<Op::rms_norm_backward, 2>(
        {&grad_output, &input, pointer_to(wide_rstd), pointer_to(weight), nullptr},
        {normalized_shape, {dx, dgamma}, std::nullopt, 0});
  };
  return run<Op::rms_norm_backward, RmsNormGradients, decltype(known), const Tensor&,
             const Tensor&, at::IntArrayRef, const Tensor&, const OptionalTensor&,
             std::array<bool, 2>>(keys, input, asks, known, grad_output, input,
                                  normalized_shape, rstd, weight, mask);
}

// PyTorch's forwards refuse mixed types on GPUs.
bool are_alike(const Tensor& input, const OptionalTensor& parameter) {
  return !pointer_to(parameter) || parameter->scalar_type() == input.scalar_type();
}

LayerNormOutput layer_norm(DispatchKeySet keys, const Tensor& input,
                           c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps) {
  const auto dims = C10_AS_INTARRAYREF_SLOW(normalized_shape);
  const auto known = [&] {
    return launched<Op::layer_norm, 3>({&input, nullptr, pointer_to(weight), pointer_to(bias)},
                                       {dims, {}, eps, 0});
  };
  const bool asks = input.numel() > 0 && are_alike(input, weight) && are_alike(input, bias);
  return run<Op::layer_norm, LayerNormOutput, decltype(known), const Tensor&, c10::SymIntArrayRef,
             const OptionalTensor&, const OptionalTensor&, double>(
      keys, input, asks, known, input, normalized_shape, weight, bias, eps);
}

RmsNormOutput rms_norm(DispatchKeySet keys, const Tensor& input, at::IntArrayRef normalized_shape,
                       const OptionalTensor& weight, std::optional<double> eps) {
  const auto known = [&] {
    return launched<Op::rms_norm, 2>({&input, nullptr, pointer_to(weight)},
                                     {normalized_shape, {}, eps, 0});
  };
  const bool asks = input.numel() > 0 && are_alike(input, weight);
  return run<Op::rms_norm, RmsNormOutput, decltype(known), const Tensor&, at::IntArrayRef,
             const OptionalTensor&, std::optional<double>>(
      keys, input, asks, known, input, normalized_shape, weight, eps);
}

torch::CppFunction kernel_of(Op op) {
  switch (op) {
    case Op::layer_norm:
      return torch::CppFunction(TORCH_FN(layer_norm));
    case Op::rms_norm:
      return torch::CppFunction(TORCH_FN(rms_norm));
    case Op::layer_norm_backward:
      return torch::CppFunction(TORCH_FN(layer_norm_backward));
    case Op::rms_norm_backward:
      return torch::CppFunction(TORCH_FN(rms_norm_backward));
  }
  TORCH_CHECK(false, "op: expected one of operands.OPS, got ", static_cast<int64_t>(op));
}

struct Registered {
  std::mutex mutex;
  std::map<std::pair<Op, DispatchKey>, std::unique_ptr<torch::Library>> libraries;
};

Registered& registered() {
  static auto* const all = new Registered;  // at the process's end the dispatcher may be gone
  return *all;
}

DispatchKey key_of(bool on_cpu) { return on_cpu ? DispatchKey::CPU : DispatchKey::CUDA; }

// Registers a kernel of ours, in place of the one that is there: PyTorch's own, or another's.
void override_kernel(int64_t number, bool on_cpu) {
  const auto op = static_cast<Op>(number);
  auto kernel = kernel_of(op);
  const auto key = key_of(on_cpu);
  const std::string name = kNames[number];
  Registered& all = registered();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto& library = all.libraries[{op, key}];
  if (library) return;
  Override& ours = override_of(op, on_cpu);
  const auto original = operator_named("aten::" + name).getComputedKernelForDispatchKey(key);
  std::atomic_store(&ours.original, std::make_shared<const c10::SafeKernelFunction>(original));
  auto made =
      std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  const iree_lnbwd::WithoutOverrideWarning without;
  made->impl(name.c_str(), std::move(kernel));
  library = std::move(made);
}

// Removes a kernel of ours, if it is there; the one before takes its place again.
void restore_kernel(int64_t number, bool on_cpu) {
  Registered& all = registered();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.libraries.erase({static_cast<Op>(number), key_of(on_cpu)});
}

std::vector<int64_t> counts(int64_t number, bool on_cpu) {
  TORCH_CHECK(number >= 0 && number < static_cast<int64_t>(kOps),
              "op: expected one of operands.OPS, got ", number);
  const auto& counts = override_of(static_cast<Op>(number), on_cpu).counts;
  return {counts.begin(), counts.end()};
}

void forget_counts() {
  for (size_t op = 0; op < kOps; ++op) {
    for (bool on_cpu : {false, true}) {
      for (auto& count : override_of(static_cast<Op>(op), on_cpu).counts) count = 0;
    }
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(iree_lnbwd, library) {
  library.def("override_kernel(int op, bool on_cpu) -> ()", override_kernel);
  library.def("restore_kernel(int op, bool on_cpu) -> ()", restore_kernel);
  library.def("override_counts(int op, bool on_cpu) -> int[]", counts);
  library.def("forget_override_counts() -> ()", forget_counts);
}
