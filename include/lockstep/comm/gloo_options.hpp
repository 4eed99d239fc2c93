#pragma once

#include <algorithm>
#include <chrono>
#include <string>

#include <fmt/format.h>

#include "lockstep/comm/detail/default_timeout.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// How GlooComm behaves.
struct GlooOptions {
  /// How long a collective may take, from its call to its end, and how long the ranks are waited for at the
  /// start: at least 1 ms; what is longer than 24 days counts as 24 days. Default: `--timeout` or
  /// LOCKSTEP_TIMEOUT, in seconds, or 30 minutes.
  std::chrono::milliseconds timeout = detail::default_timeout(std::chrono::minutes(30));
  /// The threads that run collectives; as many of them can be under way at once.
  int threads = 2;
  /// Compares operation, shapes and dtypes over the ranks before anything is sent, at the price of one small
  /// all_gather a call. Without it, ranks that disagree end the process inside Gloo, without an exception.
  bool check_shapes = false;
  /// The network interfaces to use, separated by commas. Empty: GLOO_SOCKET_IFNAME where it is set, the
  /// loopback where all ranks are on this host, else the interface that leads to the
  /// other hosts.
  std::string interfaces = {};
};

}  // namespace lockstep

namespace lockstep::detail {

/// The options as they are used. Throws UsageError for those that cannot be.
inline GlooOptions checked(GlooOptions options) {
  if (options.timeout.count() < 1)
    throw UsageError(
        fmt::format("GlooOptions: a timeout of {} ms leaves no time for a collective: give at least 1 ms",
                    options.timeout.count()));
  if (options.threads < 1)
    throw UsageError(fmt::format("GlooOptions: with {} threads no collective would ever run: give at least 1",
                                 options.threads));
  // Libraries below count milliseconds in 32 bits, and the clock has no place for the largest duration there
  // is.
  options.timeout = std::min<std::chrono::milliseconds>(options.timeout, std::chrono::hours(24 * 24));
  return options;
}

}  // namespace lockstep::detail
