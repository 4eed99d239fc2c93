#pragma once

#include <signal.h>

#include <algorithm>
#include <array>

namespace lockstep::detail {

/// The signals that a launching process passes on to its ranks, by which the user or a scheduler asks for something.
inline constexpr std::array passed_on_signals{SIGTERM, SIGINT,  SIGHUP,  SIGQUIT,
                                              SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU};
inline constexpr const char* passed_on_names =
    "SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM or SIGXCPU";

inline bool is_passed_on(int number) {
  return std::find(passed_on_signals.begin(), passed_on_signals.end(), number) != passed_on_signals.end();
}

/// Returns whether a launching process leaves a signal to the handler `before` of the program: a timer of its
/// own must not end the ranks.
inline bool is_left_to_program(int number, const struct sigaction& before) {
  return (number == SIGALRM || number == SIGXCPU) && before.sa_handler != SIG_DFL;
}

/// The signals that a launching process handles: passed_on_signals; SIGTSTP, which suspends the ranks too; and
/// SIGCHLD and SIGPIPE of its own children and pipes.
inline constexpr auto handled_signals = [] {
  std::array<int, passed_on_signals.size() + 3> all{SIGCHLD, SIGTSTP, SIGPIPE};
  std::copy(passed_on_signals.begin(), passed_on_signals.end(), all.begin() + 3);
  return all;
}();

}  // namespace lockstep::detail
