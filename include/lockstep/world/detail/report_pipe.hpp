#pragma once

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>

#include <algorithm>
#include <array>

#include "lockstep/detail/linkage.hpp"
#include "lockstep/world/environment.hpp"

namespace lockstep::detail {

/// Returns the descriptor on which a supervising parent receives the failure report, -1 if there is none.
LOCKSTEP_PROCESS_WIDE inline int report_descriptor() {
  static const int fd = [] {
    const auto text = process_variable("LOCKSTEP_REPORT_FD");
    const int number = text ? whole_number(*text).value_or(-1) : -1;
    if (number > 2 && fcntl(number, F_GETFD) >= 0) {
      fcntl(number, F_SETFD, FD_CLOEXEC);
      unsetenv("LOCKSTEP_REPORT_FD");
      return number;
    }
    return -1;
  }();
  return fd;
}

/// The signals that a launching process handles. It passes the first eight, by which the user or a scheduler
/// asks for something, on to its ranks. SIGTSTP suspends the ranks too; the last two come from its children
/// and pipes.
inline constexpr std::array handled_signals{SIGTERM, SIGINT,  SIGHUP,  SIGQUIT, SIGUSR1, SIGUSR2,
                                            SIGALRM, SIGXCPU, SIGTSTP, SIGCHLD, SIGPIPE};

inline bool is_passed_on(int number) {
  const auto end = handled_signals.begin() + 8;
  return std::find(handled_signals.begin(), end, number) != end;
}

}  // namespace lockstep::detail
