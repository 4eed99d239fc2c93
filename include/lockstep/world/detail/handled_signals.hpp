#pragma once

#include <signal.h>

#include <algorithm>
#include <array>

namespace lockstep::detail {

/// The signals that a launching process passes on to its ranks, by which the user or a scheduler asks for
/// something.
inline constexpr std::array passed_on_signals{SIGTERM, SIGINT,  SIGHUP,  SIGQUIT,
                                              SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU};
inline constexpr const char* passed_on_names =
    "SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM or SIGXCPU";

inline bool is_passed_on(int number) {
  return std::find(passed_on_signals.begin(), passed_on_signals.end(), number) != passed_on_signals.end();
}

/// The signals that a launching process handles: it passes SIGTSTP on as SIGSTOP, and keeps the others.
inline constexpr auto handled_signals = [] {
  std::array<int, passed_on_signals.size() + 3> all{SIGCHLD, SIGTSTP, SIGPIPE};
  std::copy(passed_on_signals.begin(), passed_on_signals.end(), all.begin() + 3);
  return all;
}();

}  // namespace lockstep::detail
