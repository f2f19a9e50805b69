// Known calls on the CPU: on PyTorch's threads, in PyTorch's memory.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernel_calls.h"

namespace iree_lnbwd {

// Asks the system for large pages for a new tensor on the CPU, as NumPy does for its arrays: the first
// use of each page costs as much as a norm of what is on it.
inline void use_large_pages(const at::Tensor& tensor) {
#ifdef MADV_HUGEPAGE
  constexpr size_t kLeastBytes = 1 << 22;
  const size_t bytes = tensor.nbytes();
  if (bytes < kLeastBytes) return;
  static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<size_t>(tensor.const_data_ptr());
  const size_t first = (begin + page - 1) / page * page;
  madvise(reinterpret_cast<void*>(first), begin + bytes - first, MADV_HUGEPAGE);  // advice alone
#endif
}

// In a child of fork, PyTorch's kernels run on the calling thread while this is there: its pool has no
// threads any more, and would wait for them for ever.
class OwnThreadIfForked {
 public:
#ifdef _OPENMP
  OwnThreadIfForked() : before_(is_forked() ? omp_get_max_threads() : 0) {
    if (before_) omp_set_num_threads(1);
  }
  ~OwnThreadIfForked() {
    if (before_) omp_set_num_threads(before_);
  }
  OwnThreadIfForked(const OwnThreadIfForked&) = delete;
  OwnThreadIfForked& operator=(const OwnThreadIfForked&) = delete;

 private:
  const int before_;
#endif
};

inline void run_on_pytorchs_threads(const Call& call, const int64_t* pointers) {
  for (const HostLaunch& launch : call.host_launches) {
    run_on_host(launch, pointers, [](int64_t count, int64_t at_least, const auto& run) {
      // PyTorch wakes all threads of its pool, and waits for all, if two are used: so all are used.
      at::parallel_for(0, count, at_least < count ? 1 : count, run);
    });
  }
}

}  // namespace iree_lnbwd
