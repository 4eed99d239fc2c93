#pragma once

#include <chrono>
#include <string>

namespace lockstep {

/// How GlooComm behaves.
struct GlooOptions {
  /// How long a collective may take, from its call to its end, and how long the ranks are waited for at the
  /// start.
  std::chrono::milliseconds deadline = std::chrono::minutes(30);
  /// The threads that run collectives; as many of them can be under way at once.
  int threads = 2;
  /// Compares operation, shapes and dtypes over the ranks before anything is sent, at the price of one small
  /// all_gather a call. Without it, ranks that disagree end the process inside Gloo, without an exception.
  bool check_shapes = false;
  /// The network interfaces to use, separated by commas. Empty: GLOO_SOCKET_IFNAME where it is set, the
  /// loopback where all ranks are on this host, else the interface of this host's name.
  std::string interfaces = {};
};

}  // namespace lockstep
