#pragma once

#include <algorithm>
#include <chrono>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/environment.hpp"

namespace lockstep::detail {

/// Returns LOCKSTEP_TIMEOUT, which `launch` sets to `--timeout`, or else `fallback`.
inline std::chrono::milliseconds default_timeout(std::chrono::milliseconds fallback) {
  const auto seconds = timeout_variable(process_variable);
  return seconds ? std::chrono::milliseconds(std::chrono::seconds(*seconds)) : fallback;
}

/// Returns the timeout of the option struct `options`, clamped to 24 days. Throws UsageError below 1 ms.
inline std::chrono::milliseconds checked_timeout(const char* options, std::chrono::milliseconds timeout) {
  if (timeout.count() < 1)
    throw UsageError(
        detail::formatted("{}: a timeout of {} ms leaves no time for a collective: give at least 1 ms",
                          options, timeout.count()));
  // Gloo counts milliseconds in 32 bits, and adding the largest duration to a time point would overflow.
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(24 * 24));
}

/// Returns how long the host of the store, or a rank that other ranks wait for, may be silent before it
/// counts as failed: a late rank still answers, from a thread of its own.
/// Counterpart: TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC.
inline std::chrono::milliseconds heartbeat_timeout() {
  const auto seconds = heartbeat_timeout_variable(process_variable);
  return seconds ? std::chrono::seconds(*seconds) : std::chrono::minutes(2);
}

}  // namespace lockstep::detail
