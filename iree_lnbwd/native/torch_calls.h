// The kinds of PyTorch's calls that C++ launches: Python finds out what, for each kind.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/hash.h>

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kernel_calls.h"
#include "torch_cpu.h"

namespace iree_lnbwd {

constexpr size_t kMostArguments = 10;  // of an op
constexpr size_t kMostMasked = 4;      // gradients that a mask chooses among

// An operand of an op: a row of the table in operands.py, whose words these are.
struct Operand {
  std::string name;
  enum class Extent { cells, rows, columns } extent;
  enum class Element { dy, x, acc, gamma, beta, residual, gate, copy, total } element;
  bool is_read;         // by kernels; of the others only the element type counts
  bool is_masked;       // a mask chooses it
  bool needs_bias;      // it is there where a bias is
  bool needs_residual;  // it is there where a residual is
};

struct Op {
  std::string name;
  bool is_backward;
  std::vector<Operand> arguments;
  std::vector<Operand> results;
  size_t data;  // the argument that decides the shape, the device and the type
  // Other arguments; -1 where the op has none.
  int weight = -1, bias = -1, rstd = -1, residual = -1, gate = -1;
};

// In the order in which Python describes them. They never change afterwards.
inline std::vector<std::unique_ptr<const Op>>& ops() {
  static std::vector<std::unique_ptr<const Op>> all;
  return all;
}

// Where the rows of a call's arguments are, as ops/strides.py has it.
struct Layout {
  static constexpr int64_t kMostStride = (int64_t{1} << 31) - 1;
  using Strides = std::array<int32_t, 2>;  // from run to run, and from row to row, in elements
  static constexpr Strides kNone = {-1, -1};

  int64_t inner_count = 0;  // rows of a run; 0 where no argument is used by its strides
  std::array<Strides, kMostArguments> strides;

  Layout() { strides.fill(kNone); }
  bool has(size_t argument) const { return strides[argument] != kNone; }
  bool operator==(const Layout& other) const {
    return inner_count == other.inner_count && strides == other.strides;
  }
};

// What calls have in common that launch the same kernels.
struct Kind {
  static constexpr int8_t kAbsent = -1;

  const Op* op;
  at::Device device;
  int64_t rows;
  int64_t columns;
  std::array<int8_t, kMostArguments> types;  // of the arguments
  std::array<bool, kMostMasked> mask;        // the gradients to compute
  std::optional<double> eps;                 // as the caller gave it, where it counts
  double weight_offset;
  std::optional<at::ScalarType> result_type;  // of the result that has one of its own
  // The sets of a weight, and neighbouring rows that take one of them; 0 where there are no sets.
  int64_t sets;
  int64_t rows_per_set;
  Layout layout;

  bool operator==(const Kind& other) const {
    return op == other.op && device == other.device && rows == other.rows &&
           columns == other.columns && types == other.types && mask == other.mask &&
           eps == other.eps && weight_offset == other.weight_offset &&
           result_type == other.result_type && sets == other.sets &&
           rows_per_set == other.rows_per_set && layout == other.layout;
  }
};

struct HashOfKind {
  size_t operator()(const Kind& kind) const {
    const std::string_view types(reinterpret_cast<const char*>(kind.types.data()),
                                 kind.types.size());
    const std::string_view mask(reinterpret_cast<const char*>(kind.mask.data()), kind.mask.size());
    const std::hash<std::string_view> of_bytes;
    const auto& strides = kind.layout.strides;
    const std::string_view layout(reinterpret_cast<const char*>(strides.data()),
                                  kind.layout.inner_count ? sizeof(strides) : 0);
    return c10::get_hash(kind.op, kind.device, kind.rows, kind.columns, of_bytes(types),
                         of_bytes(mask), kind.eps, kind.weight_offset, kind.result_type, kind.sets,
                         kind.rows_per_set, kind.layout.inner_count, of_bytes(layout));
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

// Runs a known call on PyTorch's threads, or puts it on PyTorch's current stream.
//
// The pointers are those of what the op's kernels read and of its results, in the order of its
// table.
inline void launch(const Call& call, at::Device device, c10::SmallVector<int64_t, 16> pointers) {
  if (!call.host_launches.empty()) {
    c10::DataPtr scratch;
    if (call.scratch_bytes) scratch = c10::GetCPUAllocator()->allocate(call.scratch_bytes);
    const auto begins = reinterpret_cast<int64_t>(scratch.get());
    for (int64_t piece : call.scratch) pointers.push_back(begins + piece);
    return run_on_pytorchs_threads(call, pointers.data());
  }
  const c10::DeviceGuard guard(device);
  // Of this stream, like the kernels: freed here, it is not used again before they are done.
  c10::DataPtr scratch;
  if (call.scratch_bytes) {
    scratch = c10::GetAllocator(device.type())->allocate(call.scratch_bytes);
  }
  const auto begins = reinterpret_cast<int64_t>(scratch.get());
  for (int64_t piece : call.scratch) pointers.push_back(begins + piece);
  const c10::impl::VirtualGuardImpl streams(device.type());
  run(call, pointers.data(), device.is_cpu() ? nullptr : streams.getStream(device).native_handle());
}

}  // namespace iree_lnbwd
