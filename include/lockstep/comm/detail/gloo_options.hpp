#pragma once

#include <chrono>
#include <string>

#include "lockstep/comm/detail/timeouts.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// Options of GlooComm.
struct GlooOptions {
  /// Timeout of a collective, from its launch to its completion, and of the rendezvous. At least 1 ms;
  /// clamped to 24 days. Default: `--timeout` or LOCKSTEP_TIMEOUT, in seconds, else 30 minutes.
  std::chrono::milliseconds timeout = detail::default_timeout(std::chrono::minutes(30));
  /// Threads that run collectives, and so the number that can run at once.
  int threads = 2;
  /// Compares operation, shapes and dtypes over the ranks before each collective, at the cost of one small
  /// all_gather per call. Without it, a mismatch ends the process inside Gloo, without an exception.
  bool check_shapes = false;
  /// Comma-separated network interfaces. If empty: GLOO_SOCKET_IFNAME if set, the loopback if all ranks are
  /// on this host, else the interface that routes to the other hosts.
  std::string interfaces = {};
};

}  // namespace lockstep

namespace lockstep::detail {

/// Returns the options with the timeout clamped. Throws UsageError for invalid options.
inline GlooOptions checked(GlooOptions options) {
  options.timeout = checked_timeout("GlooOptions", options.timeout);
  if (options.threads < 1)
    throw UsageError(detail::formatted(
        "GlooOptions: with {} threads no collective would ever run: give at least 1", options.threads));
  return options;
}

}  // namespace lockstep::detail
