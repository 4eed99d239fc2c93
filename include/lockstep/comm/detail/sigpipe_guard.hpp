#pragma once

#include <pthread.h>
#include <signal.h>

#include <ctime>

namespace lockstep::detail {

/// Blocks SIGPIPE in this thread while it lives, and for good in threads that start meanwhile. Gloo writes to
/// sockets whose other end may be closed and reads the error code.
class SigpipeGuard {
 public:
  SigpipeGuard() {
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    sigset_t pipe = only_sigpipe();
    pthread_sigmask(SIG_BLOCK, &pipe, &before_);
  }
  ~SigpipeGuard() {
    if (sigismember(&before_, SIGPIPE) == 1) return;
    sigset_t pipe = only_sigpipe();
    const timespec now{0, 0};
    if (!was_pending_) sigtimedwait(&pipe, nullptr, &now);  // consume our own signal, if there is one
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SigpipeGuard(const SigpipeGuard&) = delete;
  SigpipeGuard& operator=(const SigpipeGuard&) = delete;

 private:
  static sigset_t only_sigpipe() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    return set;
  }

  sigset_t before_{};
  bool was_pending_ = false;
};

}  // namespace lockstep::detail
