#pragma once

#include <chrono>

#include "lockstep/world/environment.hpp"

namespace lockstep::detail {

/// The timeout of collectives where the program sets none: LOCKSTEP_TIMEOUT in seconds, which `launch` sets
/// to the value of `--timeout`, or else `fallback`. Throws UsageError for a value that is no number of
/// seconds.
inline std::chrono::milliseconds default_timeout(std::chrono::milliseconds fallback) {
  const auto seconds = timeout_variable(process_variable);
  return seconds ? std::chrono::milliseconds(std::chrono::seconds(*seconds)) : fallback;
}

/// How long a rank that others wait for, or the host of the store, may be silent before it counts as failed:
/// LOCKSTEP_HEARTBEAT_TIMEOUT in seconds, or 2 minutes. A rank that is only late answers all the time, from a
/// thread of its own; one that is stopped, or whose host is cut off, does not. Throws UsageError for a value
/// that is no number of seconds. Counterpart: TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC.
inline std::chrono::milliseconds heartbeat_timeout() {
  const auto seconds = heartbeat_timeout_variable(process_variable);
  return seconds ? std::chrono::seconds(*seconds) : std::chrono::minutes(2);
}

}  // namespace lockstep::detail
