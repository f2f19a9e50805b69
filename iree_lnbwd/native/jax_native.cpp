// XLA's custom call of a norm. On GPUs, Python says once what each kind of call launches, before XLA
// runs or records the first of the kind, and it is launched from here on XLA's stream. On the CPU,
// Python computes the first call of each kind, in XLA's own memory, and says what it launched; later
// ones run on XLA's threads.

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "kernel_calls.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using iree_lnbwd::Call;
using iree_lnbwd::Numbers;

constexpr size_t kScratchAlignment = 256;  // jax/native.py asks for so much more
constexpr size_t kMessageBytes = 1024;
constexpr int32_t kHost = -1;  // in place of a GPU's number

// Python's, which return 0, or write why they failed. Both tell `iree_lnbwd_jax_remember` of a call:
// one of a call on a GPU; the other of one on the CPU, which it computes, and whose pointers it gets.
using Prepare = int (*)(int32_t device, int64_t rows, const char* spec, size_t spec_size,
                        char* message, size_t message_size);
using Compute = int (*)(int64_t rows, const char* spec, size_t spec_size, const int64_t* pointers,
                        char* message, size_t message_size);

// Python as long as it runs: what is called here has returned before Python ends.
class Python {
 public:
  void set(Prepare prepare, Compute compute) {
    std::lock_guard<std::shared_mutex> lock(mutex_);
    prepare_ = prepare;
    compute_ = compute;
  }
  void prepare(int32_t device, int64_t rows, std::string_view spec) {
    call(prepare_, [&](auto... message) {
      return prepare_(device, rows, spec.data(), spec.size(), message...);
    });
  }
  void compute(int64_t rows, std::string_view spec, const int64_t* pointers) {
    call(compute_, [&](auto... message) {
      return compute_(rows, spec.data(), spec.size(), pointers, message...);
    });
  }

 private:
  template <typename Function, typename Run>
  void call(const Function& function, Run run) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    iree_lnbwd::expect(function != nullptr, "device: Python has ended");
    char message[kMessageBytes] = "";
    if (run(message, kMessageBytes)) throw std::runtime_error(message);
  }

  std::shared_mutex mutex_;
  Prepare prepare_ = nullptr;
  Compute compute_ = nullptr;
};

class Calls {
 public:
  std::shared_ptr<const Call> find(int32_t device, int64_t rows, std::string_view spec) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = calls_.find(std::make_tuple(device, rows, spec));
    return found == calls_.end() ? nullptr : found->second;
  }
  void add(int32_t device, int64_t rows, std::string_view spec, Call call) {
    std::lock_guard<std::mutex> lock(mutex_);
    calls_[{device, rows, std::string(spec)}] = std::make_shared<const Call>(std::move(call));
  }
  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    calls_.clear();
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<int32_t, int64_t, std::string>, std::shared_ptr<const Call>, std::less<>>
      calls_;
};

// Threads of XLA's may outlive what is destroyed at the end.
Calls& calls() {
  static Calls* all = new Calls;
  return *all;
}

Python& python() {
  static Python* one = new Python;
  return *one;
}

int64_t address(const char* kind, size_t at, const ffi::AnyBuffer& buffer) {
  const auto address = reinterpret_cast<int64_t>(buffer.untyped_data());
  iree_lnbwd::expect(address != 0 && address % iree_lnbwd::kAccessBytes == 0,
                     std::string(kind) + " " + std::to_string(at) +
                         ": expected memory that begins at a multiple of 16 bytes");
  return address;
}

// Where a call's scratch begins, in a result that nobody reads.
int64_t scratch_in(const ffi::AnyBuffer& result, const Call& call) {
  const auto begin = reinterpret_cast<size_t>(result.untyped_data());
  const auto aligned = (begin + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
  const auto needed = static_cast<size_t>(call.scratch_bytes);
  iree_lnbwd::expect(
      aligned + needed <= begin + result.size_bytes(),
      "scratch: expected " + std::to_string(needed + kScratchAlignment) +
          " bytes for the kernels of this device, got " + std::to_string(result.size_bytes()) +
          ": the function was lowered on a machine with another GPU or other schedules; lower it "
          "again here");
  return static_cast<int64_t>(aligned);
}

// The first stage of a call, before XLA records or runs it: Python may compile and load modules.
ffi::Error prepare(int32_t device, std::string_view spec, int64_t rows) {
  try {
    if (!calls().find(device, rows, spec)) python().prepare(device, rows, spec);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

// Launches and nothing else, for the stream may be one that XLA records. The last result is scratch.
ffi::Error run(int32_t device, void* stream, std::string_view spec, int64_t rows,
               ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  try {
    const auto call = calls().find(device, rows, spec);
    iree_lnbwd::expect(call != nullptr, "device: XLA runs a call whose kernels are not loaded");
    const size_t last = results.size() - 1;
    std::vector<int64_t> pointers;
    pointers.reserve(arguments.size() + last + 1 + call->scratch.size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      pointers.push_back(address("argument", i, *arguments.get<ffi::AnyBuffer>(i)));
    }
    for (size_t i = 0; i < last; ++i) {
      pointers.push_back(address("result", i, **results.get<ffi::AnyBuffer>(i)));
    }
    if (call->ones) pointers.push_back(call->ones);
    const int64_t scratch = scratch_in(**results.get<ffi::AnyBuffer>(last), *call);
    for (int64_t begin : call->scratch) pointers.push_back(scratch + begin);
    iree_lnbwd::run(*call, pointers.data(), stream);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

ffi::Error prepare_on_gpu(int32_t device, std::string_view spec, int64_t rows, ffi::RemainingArgs,
                          ffi::RemainingRets) {
  return prepare(device, spec, rows);
}

// Parts of a launch's workgroups, which any threads take one after the other.
class Parts {
 public:
  using Run = std::function<void(int64_t, int64_t)>;

  Parts(int64_t count, int64_t parts, Run run)
      : count_(count), parts_(parts), left_(parts), run_(std::move(run)) {}

  // Takes parts until none is left. A thread that comes late finds none, and touches nothing else.
  void take() {
    for (int64_t part; (part = next_.fetch_add(1)) < parts_;) {
      std::exception_ptr error;
      try {
        run_(part * count_ / parts_, (part + 1) * count_ / parts_);
      } catch (...) {
        error = std::current_exception();
      }
      std::lock_guard<std::mutex> lock(mutex_);
      if (error) error_ = error;
      if (--left_ == 0) done_.notify_all();
    }
  }

  // Waits for parts that other threads have taken.
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return left_ == 0; });
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const int64_t count_, parts_;
  std::atomic<int64_t> next_{0};
  int64_t left_;
  const Run run_;
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable done_;
};

// Runs a known call on XLA's threads. This one may be among them, so it waits for no part that nobody
// has begun.
void run_on_xlas_threads(ffi::ThreadPool pool, const Call& call, std::vector<int64_t> pointers) {
  const std::unique_ptr<char[]> scratch(new char[call.scratch_bytes]);
  const auto begins = reinterpret_cast<int64_t>(scratch.get());
  for (int64_t piece : call.scratch) pointers.push_back(begins + piece);
  for (const auto& launch : call.host_launches) {
    run_on_host(launch, pointers.data(), [&](int64_t count, int64_t at_least, const auto& run) {
      const int64_t most = std::max<int64_t>(pool.num_threads(), 1);
      const int64_t count_of_parts = std::min(most, std::max<int64_t>(count / at_least, 1));
      if (count_of_parts == 1) return run(0, count);
      const auto parts = std::make_shared<Parts>(count, count_of_parts, run);
      for (int64_t i = 1; i < count_of_parts; ++i) pool.Schedule([parts] { parts->take(); });
      parts->take();
      parts->wait();
    });
  }
}

ffi::Error on_cpu(ffi::ThreadPool pool, std::string_view spec, int64_t rows,
                  ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  try {
    std::vector<int64_t> pointers;
    pointers.reserve(arguments.size() + results.size());
    const auto add = [&](const ffi::AnyBuffer& buffer) {
      pointers.push_back(reinterpret_cast<int64_t>(buffer.untyped_data()));
    };
    for (size_t i = 0; i < arguments.size(); ++i) add(*arguments.get<ffi::AnyBuffer>(i));
    for (size_t i = 0; i < results.size(); ++i) add(**results.get<ffi::AnyBuffer>(i));
    if (const auto call = calls().find(kHost, rows, spec)) {
      run_on_xlas_threads(pool, *call, std::move(pointers));
    } else {
      python().compute(rows, spec, pointers.data());
    }
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

// With a driver that runs kernels in the host's memory, before a launch returns: an emulated one. XLA
// has no stage on the CPU that knows the device and comes before a call, so this one is told it.
ffi::Error prepare_on_host(std::string_view spec, int64_t rows) { return prepare(0, spec, rows); }

ffi::Error on_host(int32_t device, std::string_view spec, int64_t rows,
                   ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  return run(device, nullptr, spec, rows, arguments, results);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(iree_lnbwd_jax_prepare_on_gpu, prepare_on_gpu,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attr<std::string_view>("spec")
                                  .Attr<int64_t>("rows")
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(iree_lnbwd_jax_on_gpu, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Attr<std::string_view>("spec")
                                  .Attr<int64_t>("rows")
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(iree_lnbwd_jax_on_cpu, on_cpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<std::string_view>("spec")
                                  .Attr<int64_t>("rows")
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(iree_lnbwd_jax_prepare_on_host, prepare_on_host,
                              ffi::Ffi::BindInstantiate()
                                  .Attr<std::string_view>("spec")
                                  .Attr<int64_t>("rows"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(iree_lnbwd_jax_on_host, on_host,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attr<std::string_view>("spec")
                                  .Attr<int64_t>("rows")
                                  .RemainingArgs()
                                  .RemainingRets());

extern "C" {

// Waits for what Python is doing for threads of XLA's.
void iree_lnbwd_jax_set_python(Prepare prepare, Compute compute) {
  python().set(prepare, compute);
}

void iree_lnbwd_jax_forget() { calls().clear(); }

// Arrays of numbers come with their size. Not 0: a number is missing.
int iree_lnbwd_jax_remember(int32_t device, int64_t rows, const char* spec, size_t spec_size,
                            const int64_t* driver, size_t driver_size, int64_t ones,
                            int64_t scratch_bytes, const int64_t* scratch, size_t scratch_size,
                            const int64_t* launches, size_t launches_size, const int64_t* graph,
                            size_t graph_size) {
  try {
    calls().add(device, rows, {spec, spec_size},
                iree_lnbwd::call_of({driver, driver_size}, ones, scratch_bytes,
                                    {scratch, scratch_size}, {launches, launches_size},
                                    {graph, graph_size}));
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

}  // extern "C"
