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

}  // namespace lockstep::detail
