#pragma once

#include <ATen/record_function.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <concepts>
#include <memory>
#include <string_view>
#include <unordered_set>

#include "lockstep/error.hpp"

namespace lockstep {

/// Where the ranges of BasicNvtxRanges go. `check()` throws UsageError where they cannot; `push(name)` begins
/// a range of this thread's, and `pop()` ends the last that it has begun. Any thread may call them.
template <class M>
concept RangeMarks = requires(const char* name) {
  M::check();
  M::push(name);
  M::pop();
};

/// NVTX, as LibTorch's CUDA part calls it: its own copy of NVTX, and so no header of CUDA's is needed.
struct NvtxMarks {
  static void check() {
    if (!torch::profiler::impl::cudaStubs()->enabled())
      throw UsageError(
          "NVTX ranges go through the CUDA part of LibTorch, which this program does not load: link "
          "lockstep::cuda with a LibTorch for CUDA, or leave NvtxRanges out");
  }
  static void push(const char* name) { torch::profiler::impl::cudaStubs()->rangePush(name); }
  static void pop() { torch::profiler::impl::cudaStubs()->rangePop(); }
};

struct NvtxOptions {
  /// LibTorch's operators too, forward and backward: many, so that each step takes longer.
  bool operators = false;
};

/// While one lives, a profiler that knows NVTX, such as Nsight Systems, sees ranges on every thread: those of
/// lockstep ("lockstep::reduce_bucket", "lockstep::finish_reduction") and the program's own, made with
/// RECORD_USER_SCOPE("name"). They are spans of the host. What is open at its beginning or end has its begin
/// and its end, or neither. Without one nothing is called. One at a time is enough, made on any thread while
/// no other trains: two would name each range twice.
template <RangeMarks Marks>
class BasicNvtxRanges {
 public:
  /// Throws what Marks::check() throws: of NvtxMarks, UsageError where LibTorch has no CUDA part.
  explicit BasicNvtxRanges(NvtxOptions options = {}) {
    Marks::check();
    at::RecordFunctionCallback callback(options.operators ? &begin<true> : &begin<false>, &end);
    std::unordered_set<at::RecordScope> scopes{at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE};
    if (options.operators) scopes.insert(at::RecordScope::BACKWARD_FUNCTION);
    handle_ = at::addGlobalCallback(callback.scopes(scopes));
  }
  ~BasicNvtxRanges() { at::removeCallback(handle_); }
  BasicNvtxRanges(const BasicNvtxRanges&) = delete;
  BasicNvtxRanges& operator=(const BasicNvtxRanges&) = delete;

 private:
  // Of a range that was begun; it ends by the same callback, also when that has been removed in between.
  struct Begun : at::ObserverContext {};

  template <bool operators>
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& range) {
    const char* name = range.name();
    if (!operators && range.scope() != at::RecordScope::USER_SCOPE &&
        !std::string_view(name).starts_with("lockstep::"))
      return nullptr;
    Marks::push(name);
    return std::make_unique<Begun>();
  }
  static void end(const at::RecordFunction&, at::ObserverContext* begun) {
    if (begun) Marks::pop();
  }

  at::CallbackHandle handle_;
};

using NvtxRanges = BasicNvtxRanges<NvtxMarks>;

}  // namespace lockstep
