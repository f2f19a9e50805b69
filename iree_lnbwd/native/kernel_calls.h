// Calls that were prepared, put on a stream of a GPU, or for threads of the CPU (host_calls.h): Python
// finds out what a kind of call launches, and C++ launches it. Nothing here knows the caller's
// framework.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "host_calls.h"

namespace iree_lnbwd {

constexpr int64_t kAccessBytes = 16;  // what kernels may assume of the address of a row

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
  std::vector<HostLaunch> host_launches;  // in place of those above, on the CPU
  std::vector<std::shared_ptr<void>> libraries;  // which they are in
  bool strided = false;  // rows are found by strides; else what is not dense is copied
};

// Numbers from Python.
struct Numbers {
  const int64_t* data;
  size_t size;
};

inline void expect(bool is_so, const std::string& message) {
  if (!is_so) throw std::runtime_error(message);
}

// The graph with these handles: of the executable graph, and then of its nodes.
inline std::shared_ptr<Graph> graph_of(Numbers handles) {
  static std::mutex mutex;
  static std::unordered_map<int64_t, std::shared_ptr<Graph>> graphs;
  std::lock_guard<std::mutex> lock(mutex);
  auto& graph = graphs[handles.data[0]];
  if (!graph) {
    graph = std::make_shared<Graph>();
    graph->runnable = reinterpret_cast<void*>(handles.data[0]);
    for (size_t i = 1; i < handles.size; ++i) {
      graph->nodes.push_back(reinterpret_cast<void*>(handles.data[i]));
    }
  }
  return graph;
}

// The launches of a call on the CPU, as native_calls.py writes them down.
inline void add_host_launches(Call& call, Numbers launches) {
  size_t at = 0;
  const auto next = [&] {
    expect(at < launches.size, "launches: expected more than " + std::to_string(at) + " numbers");
    return launches.data[at++];
  };
  while (at < launches.size) {
    HostLaunch& launch = call.host_launches.emplace_back();
    launch.kernel = reinterpret_cast<HostKernel>(next());
    for (auto& count : launch.workgroups) count = static_cast<uint32_t>(next());
    const int64_t pointers = next();
    expect(pointers > 0 && pointers <= kMostPointers,
           "launches: expected 1 to " + std::to_string(kMostPointers) + " pointers, got " +
               std::to_string(pointers));
    launch.places.resize(pointers);
    launch.lengths.resize(pointers);
    for (auto& place : launch.places) place = next();
    for (auto& length : launch.lengths) length = static_cast<size_t>(next());
    launch.constants.resize(next());
    for (auto& constant : launch.constants) constant = static_cast<uint32_t>(next());
    call.libraries.push_back(library_of(launch.kernel));
  }
}

// A call, as native_calls.py writes it down; one on the CPU has no driver.
inline Call call_of(Numbers driver, int64_t ones, int64_t scratch_bytes, Numbers scratch,
                    Numbers launches, Numbers graph) {
  if (driver.size == 0) {
    Call call{{}, 0, scratch_bytes, {scratch.data, scratch.data + scratch.size}, {}, nullptr};
    add_host_launches(call, launches);
    return call;
  }
  const size_t addresses = graph.size ? 8 : 5;
  expect(driver.size == addresses, "driver: expected " + std::to_string(addresses) +
                                       " addresses, got " + std::to_string(driver.size));
  Call call{{}, ones, scratch_bytes, {scratch.data, scratch.data + scratch.size}, {}, nullptr};
  call.driver.context = reinterpret_cast<void*>(driver.data[0]);
  const auto function = [&](auto& function, size_t at) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(driver.data[at]);
  };
  function(call.driver.get_context, 1);
  function(call.driver.push_context, 2);
  function(call.driver.pop_context, 3);
  function(call.driver.launch, 4);
  if (graph.size) {
    function(call.driver.is_capturing, 5);
    function(call.driver.set_node, 6);
    function(call.driver.launch_graph, 7);
    call.graph = graph_of(graph);
  }
  size_t at = 0;
  const auto next = [&] {
    expect(at < launches.size, "launches: expected more than " + std::to_string(at) + " numbers");
    return launches.data[at++];
  };
  while (at < launches.size) {
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
  return call;
}

inline void check(int status, const char* what) {
  if (status != 0) {
    throw std::runtime_error(std::string("device: ") + what + " failed with " +
                             std::to_string(status));
  }
}

// Makes a GPU's context the thread's for a while; a framework's thread may have none.
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
  Arguments(const Launch& launch, const int64_t* pointers) {
    values_.reserve(2 * launch.places.size() + launch.constants.size());
    for (int64_t place : launch.places) {
      const auto pointer = static_cast<uint64_t>(pointers[place]);
      values_.push_back(static_cast<uint32_t>(pointer));
      values_.push_back(static_cast<uint32_t>(pointer >> 32));
    }
    values_.insert(values_.end(), launch.constants.begin(), launch.constants.end());
    size_ = values_.size() * sizeof(uint32_t);
    void* const buffer_pointer = reinterpret_cast<void*>(1);  // the driver's names of what follows
    void* const buffer_size = reinterpret_cast<void*>(2);
    extra_ = {buffer_pointer, values_.data(), buffer_size, &size_, nullptr};
  }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  void** extra() { return extra_.data(); }

 private:
  std::vector<uint32_t> values_;
  size_t size_;
  std::array<void*, 5> extra_;
};

inline bool is_capturing(const Driver& driver, void* stream) {
  int status = 0;
  check(driver.is_capturing(stream, &status), "asking for a stream's capture");
  return status != 0;
}

inline void run_graph(const Call& call, const int64_t* pointers, void* stream) {
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

// Puts a call on a stream.
//
// The pointers are those that its launches have the places of.
inline void run(const Call& call, const int64_t* pointers, void* stream) {
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

}  // namespace iree_lnbwd
