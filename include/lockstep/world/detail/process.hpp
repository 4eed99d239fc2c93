#pragma once

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::inline v0_1::detail {

/// Opens /dev/null for each of 0, 1 and 2 that is closed (`>&-`): the next socket would get that number and
/// receive printed output.
inline void fill_standard_descriptors() {
  for (int number : {0, 1, 2})
    if (fcntl(number, F_GETFD) < 0)
      open("/dev/null", O_RDWR);  // gets the lowest free number, which is `number`
}

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

/// Returns the parent of a process and the CPU time that it has used, zeros if they are unknown.
inline std::pair<pid_t, std::chrono::milliseconds> parent_and_cpu_time(pid_t process) {
  const auto stat = proc_file(process, "stat").value_or("");
  const auto end = stat.rfind(')');  // the name before it may contain anything
  int parent = 0;
  long long user = 0, system = 0;
  if (end == std::string::npos ||
      std::sscanf(stat.c_str() + end + 1, " %*c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lld %lld", &parent,
                  &user, &system) != 3)
    return {};
  return {parent, std::chrono::milliseconds((user + system) * 1000 / sysconf(_SC_CLK_TCK))};
}

/// Returns whether another process that this one's parent has started, as a launcher the ranks of its host, has used `least`
/// of CPU time since the last call with `times`, the CPU times at that call.
inline bool siblings_work(std::map<pid_t, std::chrono::milliseconds>& times,
                          std::chrono::milliseconds least) {
  const auto before = std::exchange(times, {});
  bool work = false;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc", error), end; entry != end; entry.increment(error)) {
    const pid_t process = std::atoi(entry->path().filename().c_str());  // 0 for another entry
    const auto [parent, time] = parent_and_cpu_time(process);
    if (parent != getppid() || process == getpid()) continue;
    times[process] = time;
    const auto known = before.find(process);
    work = work || known == before.end() || time - known->second >= least;
  }
  return work;
}

/// Returns the nearest ancestor that was started without `variable`, which a launcher sets: the launcher's
/// process on this host, also if a script is between. 0 if it is unknown.
inline pid_t launcher_process(const std::string& variable) {
  for (pid_t process = getppid(); process > 0; process = parent_and_cpu_time(process).first) {
    const auto environment = proc_file(process, "environ");
    if (!environment) return 0;
    if (('\0' + *environment).find('\0' + variable + "=") == std::string::npos) return process;
  }
  return 0;
}

/// Makes the kernel kill this process when the thread of `parent` that forked it ends for any reason. Returns
/// false if `parent` ended before that took effect. Async-signal-safe.
inline bool die_with_parent(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  return getppid() == parent;
}

struct Pipe {
  Descriptor read, write;
};

/// Creates a pipe that no other child inherits. Its read end is non-blocking. Throws Error.
inline Pipe make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw Error(formatted("cannot make a pipe: {}", std::strerror(errno)));
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

/// The signals that a launching process handles. It passes the first eight, by which the user or a scheduler asks for
/// something, on to its ranks. SIGTSTP suspends the ranks too; the last two come from its children and pipes.
inline constexpr std::array handled_signals{SIGTERM, SIGINT,  SIGHUP,  SIGQUIT, SIGUSR1, SIGUSR2,
                                            SIGALRM, SIGXCPU, SIGTSTP, SIGCHLD, SIGPIPE};
/// Those of them by which a scheduler tells its limit, and which would end a launching process that has no ranks.
inline constexpr std::array notice_signals{SIGUSR1, SIGUSR2};

inline bool is_passed_on(int number) {
  const auto end = handled_signals.begin() + 8;
  return std::find(handled_signals.begin(), end, number) != end;
}

/// Returns the pipe from the signal handler to the thread that waits for signals. It is never closed: a
/// handler may still run in another thread when its scope ends.
inline const Pipe& signal_pipe() {
  static const Pipe pipe = make_pipe();
  return pipe;
}

extern "C" inline void lockstep_write_signal(int number) {
  const int saved = errno;
  const auto byte = static_cast<unsigned char>(number);
  if (write(signal_pipe().write.get(), &byte, 1) < 0) {  // full: enough signals are pending
  }
  errno = saved;
}

/// While it lives, `signals` do not interrupt the launching process but can be read from a descriptor, whichever thread
/// receives them. A signalfd would need them blocked in every thread, also in those of LibTorch.
/// Ignored signals stay ignored (`nohup`, background jobs of a shell), and SIGALRM and SIGXCPU are left to a handler of
/// the program, whose timer must not end the ranks. Orphaned descendants become children of this process, which reaps
/// them; the first process of a container may not. At most one lives at a time.
class LauncherScope {
 public:
  explicit LauncherScope(std::span<const int> signals = handled_signals) : signals_(signals) {
    prctl(PR_GET_CHILD_SUBREAPER, &subreaper_before_);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    fcntl(signal_pipe().write.get(), F_SETFL, O_NONBLOCK);  // makes it, which a handler must not
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    pthread_sigmask(SIG_UNBLOCK, &child, &mask_before_);
    for (std::size_t i = 0; i < signals_.size(); ++i) {
      const int number = signals_[i];
      sigaction(number, nullptr, &before_[i]);
      const auto handler = before_[i].sa_handler;
      // With SIGCHLD ignored, the kernel would reap the ranks.
      if (handler == SIG_IGN && number != SIGCHLD) continue;
      if ((number == SIGALRM || number == SIGXCPU) && handler != SIG_DFL) continue;
      struct sigaction action {};
      action.sa_handler = lockstep_write_signal;
      action.sa_flags = SA_RESTART;  // restart other threads' system calls
      sigaction(number, &action, nullptr);
    }
  }
  LauncherScope(const LauncherScope&) = delete;
  LauncherScope& operator=(const LauncherScope&) = delete;
  ~LauncherScope() {
    for (std::size_t i = 0; i < signals_.size(); ++i) sigaction(signals_[i], &before_[i], nullptr);
    pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
    while (next_signal() != 0) {
    }
    prctl(PR_SET_CHILD_SUBREAPER, subreaper_before_);
  }

  /// Returns the next pending signal, 0 if there is none.
  [[nodiscard]] int next_signal() const {
    unsigned char number = 0;
    return read(descriptor(), &number, 1) == 1 ? number : 0;
  }
  [[nodiscard]] int descriptor() const { return signal_pipe().read.get(); }
  /// Returns the initial signal mask for children.
  [[nodiscard]] const sigset_t& mask_before() const { return mask_before_; }

 private:
  const std::span<const int> signals_;  // handled_signals, or some of them
  sigset_t mask_before_{};
  std::array<struct sigaction, handled_signals.size()> before_{};
  int subreaper_before_ = 0;
};

inline std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);  // null for a real-time signal
  return "SIG" + (name ? name : std::to_string(number));
}

}  // namespace lockstep::inline v0_1::detail
