#pragma once

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "lockstep/detail/process_wide.hpp"

namespace lockstep::detail {

/// The local time of day as 14:03:07.042.
inline std::string time_of_day() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  tm local{};
  localtime_r(&now.tv_sec, &local);
  return fmt::format("{:02}:{:02}:{:02}.{:03}", local.tm_hour, local.tm_min, local.tm_sec,
                     now.tv_nsec / 1'000'000);
}

/// Whether what this process writes to stdout ends on a terminal, also through a launching process that says
/// so.
inline bool stdout_is_terminal() {
  return isatty(1) == 1 || std::getenv("LOCKSTEP_TTY") != nullptr;
}

/// The columns of that terminal.
inline int terminal_columns() {
  winsize window{};
  if (ioctl(1, TIOCGWINSZ, &window) == 0 && window.ws_col > 0) return window.ws_col;
  const char* columns = std::getenv("COLUMNS");
  const int value = columns ? std::atoi(columns) : 0;
  return value > 0 ? value : 80;
}

/// Whether the cursor stands at the beginning of a bar, which the next line has to wipe away.
LOCKSTEP_PROCESS_WIDE inline std::atomic<bool> bar_is_shown{false};

/// Flushes stdout. Says on stderr, once, where it cannot be written (a full disk).
inline void flush_stdout() {
  static std::atomic<bool> said{false};
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return;
  if (!said.exchange(true))
    std::fputs(fmt::format("warning: stdout cannot be written ({}), so that what follows is lost there\n",
                           std::strerror(errno))
                   .c_str(),
               stderr);
}

/// Writes whole lines at once, behind what the program has written to the same stream so far.
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

}  // namespace lockstep::detail
