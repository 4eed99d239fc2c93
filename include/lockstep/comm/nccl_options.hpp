#pragma once

#include <algorithm>
#include <chrono>

#include <fmt/format.h>

#include "lockstep/comm/detail/default_timeout.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// Where the memory of buffers comes from that a communicator is asked for (`empty_buffer`): those of
/// DistributedDataParallel's gradients are.
enum class NcclBuffers {
  /// LibTorch's own, as for any tensor.
  torch,
  /// LibTorch's, registered with NCCL, which then need not copy through buffers of its own where the links
  /// between the GPUs let it. From NCCL 2.19 on.
  registered,
  /// NCCL's own (`ncclMemAlloc`), and registered: what NVLink's switches reduce themselves needs that. It is
  /// not in the accounts of LibTorch's allocator. From NCCL 2.19 on.
  nccl,
};

/// How BasicNcclComm behaves.
struct NcclOptions {
  /// How long a collective may take, from its call to its end, and how long the ranks are waited for at the
  /// start and at the end: at least 1 ms; what is longer than 24 days counts as 24 days. Default: `--timeout`
  /// or LOCKSTEP_TIMEOUT, in seconds, or 10 minutes.
  std::chrono::milliseconds timeout = detail::default_timeout(std::chrono::minutes(10));
  /// How often the watchdog looks, while anything is in flight, for errors, late ranks and what has
  /// completed: at least 1 ms.
  std::chrono::milliseconds poll = std::chrono::milliseconds(50);
  /// The GPU; negative: that of the local rank.
  int device = -1;
  /// Compares operation, shapes and dtypes over the ranks before anything is sent, at the price of an
  /// exchange that blocks the host in each call. Without it, ranks that disagree wait for the timeout, or
  /// read each other's numbers as something else.
  bool check_shapes = false;
  /// The same on every rank: NCCL has no defined result where some ranks send from registered memory and
  /// others do not.
  NcclBuffers buffers = NcclBuffers::torch;
};

}  // namespace lockstep

namespace lockstep::detail {

/// The options as they are used. Throws UsageError for those that cannot be.
inline NcclOptions checked(NcclOptions options) {
  if (options.timeout.count() < 1)
    throw UsageError(
        fmt::format("NcclOptions: a timeout of {} ms leaves no time for a collective: give at least 1 ms",
                    options.timeout.count()));
  if (options.poll.count() < 1)
    throw UsageError(fmt::format("NcclOptions: the watchdog cannot look every {} ms: give at least 1 ms",
                                 options.poll.count()));
  options.timeout = std::min<std::chrono::milliseconds>(options.timeout, std::chrono::hours(24 * 24));
  options.poll = std::min(options.poll, options.timeout);
  return options;
}

}  // namespace lockstep::detail
