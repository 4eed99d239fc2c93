#pragma once

#include <sys/resource.h>

#include <cstdint>
#include <fstream>
#include <limits>
#include <string>

#ifdef LOCKSTEP_HAS_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#endif

namespace lockstep {

/// The most bytes that this rank has taken so far. On a GPU, the current one: of its tensors, by the account
/// of LibTorch's allocator, as `torch.cuda.max_memory_allocated` says it; NcclBuffers::nccl and what NCCL and
/// CUDA take for themselves are not in it. In a process that has had no tensor on a GPU: of the process
/// itself, libraries and all, as far as they were resident at one time.
inline std::int64_t peak_memory() {
#ifdef LOCKSTEP_HAS_CUDA
  namespace allocator = c10::cuda::CUDACachingAllocator;
  if (allocator::get()->initialized()) {
    // The first of the account's numbers is that of all pools together.
    const std::int64_t peak = allocator::getDeviceStats(c10::cuda::current_device()).allocated_bytes[0].peak;
    if (peak > 0) return peak;
  }
#endif
  // The kernel's own account of this program: that of getrusage goes on over exec, and so begins with what
  // the process had that started this one.
  std::ifstream status("/proc/self/status");
  for (std::string key; status >> key; status.ignore(std::numeric_limits<std::streamsize>::max(), '\n'))
    if (std::int64_t kilobytes = 0; key == "VmHWM:" && status >> kilobytes) return kilobytes * 1024;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
}

}  // namespace lockstep
