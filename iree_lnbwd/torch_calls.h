// The kinds of PyTorch's calls that C++ launches: Python finds out what, for each kind.

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

#include "kernel_calls.h"

namespace iree_lnbwd {

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
  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    calls_.clear();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<Kind, std::shared_ptr<const Call>, HashOfKind> calls_;
};

inline Calls& calls() {
  static Calls all;
  return all;
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
  run(call, pointers.data(), device.is_cpu() ? nullptr : streams.getStream(device).native_handle());
}

}  // namespace iree_lnbwd
