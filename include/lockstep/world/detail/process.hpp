#pragma once

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

/// Returns the number of cores that a process may run on; 0: this process.
inline int usable_cores(pid_t process = 0) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(process, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

/// Returns the content of a file of a process in /proc, std::nullopt if it is unreadable.
inline std::optional<std::string> proc_file(pid_t process, std::string_view name) {
  std::ifstream file(formatted("/proc/{}/{}", process, name), std::ios::binary);
  if (!file) return std::nullopt;
  return std::string((std::istreambuf_iterator<char>(file)), {});
}

/// Returns the parent of a process, 0 if it is unknown.
inline pid_t parent_of(pid_t process) {
  const auto stat = proc_file(process, "stat").value_or("");
  const auto end = stat.rfind(')');  // the name before it may contain anything
  int parent = 0;
  if (end == std::string::npos || std::sscanf(stat.c_str() + end + 1, " %*c %d", &parent) != 1) return 0;
  return parent;
}

/// Returns whether a process was started with this variable, std::nullopt if its environment is unreadable.
inline std::optional<bool> started_with(pid_t process, std::string_view variable) {
  const auto all = proc_file(process, "environ");
  if (!all) return std::nullopt;
  return ('\0' + *all).find('\0' + std::string(variable) + "=") != std::string::npos;
}

/// Returns the nearest ancestor that was started without `variable`, which a launcher sets: the launcher's
/// process on this host, also if a script is between. 0 if it is unknown.
inline pid_t launcher_process(std::string_view variable) {
  pid_t process = getppid();
  for (int generation = 0; generation < 32 && process > 0; ++generation) {
    const auto set = started_with(process, variable);
    if (!set) return 0;
    if (!*set) return process;
    process = parent_of(process);
  }
  return 0;
}

/// Makes the kernel kill this process when the thread of `parent` that forked it ends for any reason. Returns
/// false if `parent` ended before that took effect. Async-signal-safe.
inline bool die_with_parent(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  return getppid() == parent;
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
