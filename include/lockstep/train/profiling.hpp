#pragma once

#include <cstdint>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>

#include <ATen/record_function.h>
#include <torch/csrc/profiler/stubs/base.h>

#include "lockstep/error.hpp"
#ifdef LOCKSTEP_HAS_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#endif

namespace lockstep {

/// Options of NvtxRanges.
struct NvtxOptions {
  /// Also shows LibTorch's operators, forward and backward. Each step then takes longer, since a step has
  /// many operators.
  bool operators = false;
};

/// Shows ranges in an NVTX profiler, such as Nsight Systems, during its lifetime and on every thread:
/// lockstep's own ("lockstep::reduce_bucket", "lockstep::finish_reduction") and the program's
/// RECORD_USER_SCOPE("name"), in host time. Use one instance at a time, since two show each range twice;
/// construct it while no other thread trains. LibTorch's CUDA library has NVTX: no CUDA header is needed.
/// Counterpart: torch.autograd.profiler.emit_nvtx.
class NvtxRanges {
 public:
  /// Throws UsageError if the program loads no CUDA part of LibTorch.
  explicit NvtxRanges(NvtxOptions options = {}) {
    if (!torch::profiler::impl::cudaStubs()->enabled())
      throw UsageError(
          "NVTX ranges go through the CUDA part of LibTorch, which this program does not load: link "
          "lockstep::cuda with a LibTorch for CUDA, or leave NvtxRanges out");
    at::RecordFunctionCallback callback(options.operators ? &begin<true> : &begin<false>, &end);
    std::unordered_set<at::RecordScope> scopes{at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE};
    if (options.operators) scopes.insert(at::RecordScope::BACKWARD_FUNCTION);
    handle_ = at::addGlobalCallback(callback.scopes(scopes));
  }
  ~NvtxRanges() { at::removeCallback(handle_); }
  NvtxRanges(const NvtxRanges&) = delete;
  NvtxRanges& operator=(const NvtxRanges&) = delete;

 private:
  // Marks a range that was pushed; the same callback pops it, even if the callback was removed in between.
  struct Begun : at::ObserverContext {};

  template <bool operators>
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& range) {
    const char* name = range.name();
    if (!operators && range.scope() != at::RecordScope::USER_SCOPE &&
        !std::string_view(name).starts_with("lockstep::"))
      return nullptr;
    torch::profiler::impl::cudaStubs()->rangePush(name);
    return std::make_unique<Begun>();
  }
  static void end(const at::RecordFunction&, at::ObserverContext* begun) {
    if (begun) torch::profiler::impl::cudaStubs()->rangePop();
  }

  at::CallbackHandle handle_;
};

/// Returns this rank's peak memory so far, in bytes. With tensors on a GPU: the peak of LibTorch's allocator
/// on the current device. Memory that NCCL and CUDA allocate themselves is not counted. Without tensors on a
/// GPU: the peak resident memory of the process, libraries included.
/// Counterpart: torch.cuda.max_memory_allocated.
inline std::int64_t peak_memory() {
#ifdef LOCKSTEP_HAS_CUDA
  namespace allocator = c10::cuda::CUDACachingAllocator;
  if (allocator::get()->initialized()) {
    // Index 0 is the aggregate over all pools.
    const std::int64_t peak = allocator::getDeviceStats(c10::cuda::current_device()).allocated_bytes[0].peak;
    if (peak > 0) return peak;
  }
#endif
  // Not getrusage: its maximum survives exec, and so includes the program that ran in this process before.
  std::ifstream status("/proc/self/status");
  for (std::string key; status >> key; status.ignore(std::numeric_limits<std::streamsize>::max(), '\n'))
    if (std::int64_t kilobytes = 0; key == "VmHWM:" && status >> kilobytes) return kilobytes * 1024;
  return 0;  // no /proc
}

}  // namespace lockstep
