#pragma once

#include <sys/ioctl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"

namespace lockstep::inline v0_1::detail {

/// Returns whether stdout is a terminal, directly or through a launcher that sets LOCKSTEP_TTY.
inline bool stdout_is_terminal() {
  return isatty(1) == 1 || std::getenv("LOCKSTEP_TTY") != nullptr;
}

/// Returns the number of columns of the terminal, from stdout, else from COLUMNS; default 80.
inline int terminal_columns() {
  winsize window{};
  if (ioctl(1, TIOCGWINSZ, &window) == 0 && window.ws_col > 0) return window.ws_col;
  const char* columns = std::getenv("COLUMNS");
  const int value = columns ? std::atoi(columns) : 0;
  return value > 0 ? value : 80;
}

/// Whether the cursor is at the beginning of a progress bar, which the next line must erase.
LOCKSTEP_PROCESS_WIDE inline std::atomic<bool> bar_is_shown{false};

/// Flushes stdout. Warns on stderr, once, if stdout cannot be written (a full disk).
inline void flush_stdout() {
  static std::atomic<bool> said{false};
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return;
  if (!said.exchange(true))
    std::fputs(
        detail::formatted("warning: stdout cannot be written ({}), so that what follows is lost there\n",
                          std::strerror(errno))
            .c_str(),
        stderr);
}

/// Writes whole lines at once, after earlier output of the program to the same stream. Erases a progress bar first.
inline void write_lines(std::FILE* stream, std::string_view lines) {
  std::string wiped;
  if (bar_is_shown.exchange(false)) {
    wiped = "\x1b[K";
    if (stream == stderr) {  // the bar is on the other stream
      std::fputs(wiped.c_str(), stdout);
      std::fflush(stdout);
      wiped.clear();
    }
  }
  wiped += lines;
  flockfile(stream);
  std::fwrite(wiped.data(), 1, wiped.size(), stream);
  stream == stdout ? flush_stdout() : (void)std::fflush(stream);
  funlockfile(stream);
}

}  // namespace lockstep::inline v0_1::detail
