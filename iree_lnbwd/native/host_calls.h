// Calls that were prepared, on threads of the caller's, on the CPU: Python finds out what a kind of
// call launches, and C++ runs it. Nothing here knows the caller's framework.

#pragma once

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace iree_lnbwd {

// IREE's iree/hal/local/executable_library.h, version 0.6: what kernels are called with.
struct HostEnvironment {
  const uint32_t* constants;
  void* import_thunk;
  void* import_functions;
  void* import_contexts;
  uint64_t processor[8];
};

struct HostDispatch {
  uint32_t threads_x, threads_y;
  uint16_t threads_z;
  uint16_t constants_size;
  uint32_t workgroups_x, workgroups_y;
  uint16_t workgroups_z;
  uint8_t most_at_once;
  uint8_t pointers_size;
  const uint32_t* constants;
  void* const* pointers;
  const size_t* lengths;
};

struct HostWorkgroup {
  uint32_t x, y;
  uint16_t z;
  uint16_t reserved;
  uint32_t processor;
  void* local_memory;
  uint32_t local_memory_size;
};

using HostKernel = int (*)(const HostEnvironment*, const HostDispatch*, const HostWorkgroup*);

constexpr int64_t kMostPointers = 16;  // of a kernel

struct HostLaunch {
  HostKernel kernel;
  std::array<uint32_t, 3> workgroups;
  std::vector<int64_t> places;  // of its pointers, among those of the call
  std::vector<uint32_t> constants;
  std::vector<size_t> lengths;  // bytes behind each pointer

  int64_t count() const { return int64_t{1} * workgroups[0] * workgroups[1] * workgroups[2]; }
  // Bytes of the largest operand that a workgroup has a share of.
  size_t share() const { return *std::max_element(lengths.begin(), lengths.end()) / count(); }
};

// A reference to the library that a function is in: it stays loaded, whatever Python does.
inline std::shared_ptr<void> library_of(HostKernel kernel) {
  Dl_info info;
  void* library = nullptr;
  if (dladdr(reinterpret_cast<void*>(kernel), &info)) {
    library = dlopen(info.dli_fname, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  }
  if (!library) throw std::runtime_error("launches: expected a kernel of a loaded library");
  return std::shared_ptr<void>(library, [](void* kept) { dlclose(kept); });
}

// Whether this process was forked: threads of a framework's pool are gone, and waiting for them would
// take for ever. Python tells of a fork that came before this code.
inline std::atomic<bool>& is_forked() {
  static std::atomic<bool> is_so{false};
  return is_so;
}
inline const int kWatchesForks = pthread_atfork(nullptr, nullptr, [] { is_forked() = true; });

// Runs some of a launch's workgroups on this thread.
inline void run_workgroups(const HostLaunch& launch, const HostDispatch& dispatch, int64_t begin,
                           int64_t end) {
  static const HostEnvironment environment = {};
  const auto& [x, y, z] = launch.workgroups;
  for (int64_t at = begin; at < end; ++at) {
    const HostWorkgroup workgroup = {static_cast<uint32_t>(at % x),
                                     static_cast<uint32_t>(at / x % y),
                                     static_cast<uint16_t>(at / x / y),
                                     0,
                                     0,
                                     nullptr,
                                     0};
    if (launch.kernel(&environment, &dispatch, &workgroup)) {
      throw std::runtime_error("device: a kernel failed");
    }
  }
}

// Runs a launch. `parallel(count, at_least, run)` calls `run(begin, end)` for parts of the workgroups,
// of at least so many each, on any threads, and returns when all are done.
template <class Parallel>
void run_on_host(const HostLaunch& launch, const int64_t* pointers, const Parallel& parallel) {
  constexpr size_t kLeastShare = 1 << 16;  // bytes for a thread; fewer are not worth waking it
  std::array<void*, kMostPointers> own;
  for (size_t i = 0; i < launch.places.size(); ++i) {
    own[i] = reinterpret_cast<void*>(pointers[launch.places[i]]);
  }
  const auto& [x, y, z] = launch.workgroups;
  const HostDispatch dispatch = {1,
                                 1,
                                 1,
                                 static_cast<uint16_t>(launch.constants.size()),
                                 x,
                                 y,
                                 static_cast<uint16_t>(z),
                                 1,
                                 static_cast<uint8_t>(launch.places.size()),
                                 launch.constants.data(),
                                 own.data(),
                                 launch.lengths.data()};
  // A pool wakes all of its threads, so there has to be enough for two.
  const size_t share = std::max<size_t>(launch.share(), 1);
  const bool pays = share * launch.count() >= 2 * kLeastShare;
  const int64_t at_least = pays ? kLeastShare / share : launch.count();
  const auto run = [&](int64_t begin, int64_t end) { run_workgroups(launch, dispatch, begin, end); };
  if (is_forked()) return run(0, launch.count());
  parallel(launch.count(), std::max<int64_t>(at_least, 1), run);
}

}  // namespace iree_lnbwd
