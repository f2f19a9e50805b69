// What calls launch on a GPU: Python finds it out for each kind of call, and C++ launches the rest.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/hash.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace iree_lnbwd {

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

// The ops of operands.py, in the order of its table.
enum class Op : int64_t { layer_norm, rms_norm, layer_norm_backward, rms_norm_backward };
constexpr size_t kOps = 4;

// What calls have in common that launch the same kernels.
struct Kind {
  Op op;
  at::Device device;
  int64_t rows;
  int64_t columns;
  std::optional<at::ScalarType> grad_output;  // of backwards
  at::ScalarType input;
  std::optional<at::ScalarType> weight;
  std::optional<at::ScalarType> bias;
  std::array<bool, 3> output_mask;  // of backwards
  std::optional<double> eps;        // of forwards, as the caller gave it

  bool operator==(const Kind& other) const {
    const auto fields = [](const Kind& kind) {
      return std::tie(kind.op, kind.device, kind.rows, kind.columns, kind.grad_output, kind.input,
                      kind.weight, kind.bias, kind.output_mask, kind.eps);
    };
    return fields(*this) == fields(other);
  }
};

struct HashOfKind {
  size_t operator()(const Kind& kind) const {
    const auto& [dx, dgamma, dbeta] = kind.output_mask;
    return c10::get_hash(kind.op, kind.device, kind.rows, kind.columns, kind.grad_output,
                         kind.input, kind.weight, kind.bias, dx, dgamma, dbeta, kind.eps);
  }
};

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

inline Calls& calls() {
  static Calls all;
  return all;
}

inline void check(int status, const char* what) {
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

inline bool is_capturing(const Driver& driver, void* stream) {
  int status = 0;
  check(driver.is_capturing(stream, &status), "asking for a stream's capture");
  return status != 0;
}

inline void run_graph(const Call& call, at::ArrayRef<int64_t> pointers, void* stream) {
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

inline void run(const Call& call, at::ArrayRef<int64_t> pointers, void* stream) {
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

// Puts a known call on PyTorch's current stream.
//
// The pointers are those of the op's arguments and results, in the order of its table.
inline void launch(const Call& call, at::Device device, c10::SmallVector<int64_t, 16> pointers) {
  const c10::DeviceGuard guard(device);
  // Of this stream, like the kernels: freed here, it is not used again before they are done.
  const auto scratch = c10::GetAllocator(device.type())->allocate(call.scratch_bytes);
  const auto begins = reinterpret_cast<int64_t>(scratch.get());
  for (int64_t piece : call.scratch) pointers.push_back(begins + piece);
  const c10::impl::VirtualGuardImpl streams(device.type());
  run(call, pointers, device.is_cpu() ? nullptr : streams.getStream(device).native_handle());
}

}  // namespace iree_lnbwd
