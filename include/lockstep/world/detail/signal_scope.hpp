#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>

#include "lockstep/world/detail/child.hpp"

namespace lockstep::detail {

/// The signals that a launching process handles.
inline constexpr std::array handled_signals{SIGCHLD, SIGINT,  SIGTERM, SIGHUP, SIGQUIT,
                                            SIGUSR1, SIGUSR2, SIGTSTP, SIGPIPE};

/// Returns the pipe from the signal handler to the thread that waits for signals. It is never closed: a
/// handler may still run in another thread when its scope ends.
inline const Pipe& signal_pipe() {
  static const Pipe pipe = [] {
    Pipe made = make_pipe();
    fcntl(made.write.get(), F_SETFL, O_NONBLOCK);
    return made;
  }();
  return pipe;
}

inline std::atomic<int> signal_pipe_end{-1};
static_assert(std::atomic<int>::is_always_lock_free, "the signal handler reads it");

extern "C" inline void lockstep_write_signal(int number) {
  const int saved = errno;
  const auto byte = static_cast<unsigned char>(number);
  if (write(signal_pipe_end.load(), &byte, 1) < 0) {  // full: enough signals are pending
  }
  errno = saved;
}

/// While it lives, `handled_signals` do not interrupt the launching process but can be read from a
/// descriptor, whichever thread receives them. A signalfd would need the signals blocked in every thread,
/// including threads that LibTorch or the program started earlier. Ignored signals stay ignored (`nohup`,
/// background jobs of a shell). At most one SignalScope lives at a time.
class SignalScope {
 public:
  SignalScope() {
    signal_pipe_end = signal_pipe().write.get();
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    pthread_sigmask(SIG_UNBLOCK, &child, &mask_before_);
    for (std::size_t i = 0; i < handled_signals.size(); ++i) {
      sigaction(handled_signals[i], nullptr, &before_[i]);
      // With SIGCHLD ignored, the kernel would reap the ranks.
      if (before_[i].sa_handler == SIG_IGN && handled_signals[i] != SIGCHLD) continue;
      struct sigaction action {};
      action.sa_handler = lockstep_write_signal;
      action.sa_flags = SA_RESTART;  // restart other threads' system calls
      sigaction(handled_signals[i], &action, nullptr);
    }
  }
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;
  ~SignalScope() {
    for (std::size_t i = 0; i < handled_signals.size(); ++i)
      sigaction(handled_signals[i], &before_[i], nullptr);
    pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
    while (next() != 0) {
    }
  }

  /// Returns the next pending signal, 0 if there is none.
  [[nodiscard]] int next() const {
    unsigned char number = 0;
    ssize_t length = 0;
    do length = read(descriptor(), &number, 1);
    while (length < 0 && errno == EINTR);
    return length == 1 ? number : 0;
  }
  [[nodiscard]] int descriptor() const { return signal_pipe().read.get(); }
  /// Returns the initial signal mask for children.
  [[nodiscard]] const sigset_t& mask_before() const { return mask_before_; }

 private:
  sigset_t mask_before_{};
  std::array<struct sigaction, handled_signals.size()> before_{};
};

/// While it lives, orphaned descendants become children of this process, which can wait for them. Otherwise
/// they would remain zombies until the first process of a container reaps them.
class SubreaperScope {
 public:
  SubreaperScope() {
    prctl(PR_GET_CHILD_SUBREAPER, &before_);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
  }
  SubreaperScope(const SubreaperScope&) = delete;
  SubreaperScope& operator=(const SubreaperScope&) = delete;
  ~SubreaperScope() { prctl(PR_SET_CHILD_SUBREAPER, before_); }

 private:
  int before_ = 0;
};

}  // namespace lockstep::detail
