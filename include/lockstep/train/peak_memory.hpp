#pragma once

#include <cstdint>
#include <fstream>
#include <limits>
#include <string>

#ifdef LOCKSTEP_HAS_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#endif

#include "lockstep/detail/linkage.hpp"

namespace lockstep::inline v0_1::inline LOCKSTEP_DEVICES {

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

}  // namespace lockstep::inline v0_1::inline LOCKSTEP_DEVICES
