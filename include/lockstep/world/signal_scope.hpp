#pragma once

#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "lockstep/error.hpp"
#include "lockstep/world/child.hpp"

namespace lockstep::detail {

/// While it lives, the signals that a launching process handles do not interrupt it but are read from a
/// descriptor.
class SignalScope {
 public:
  SignalScope() {
    struct sigaction action {};
    action.sa_handler = SIG_DFL;  // an inherited SIG_IGN would reap behind our back
    sigaction(SIGCHLD, &action, &child_before_);
    sigset_t set;
    sigemptyset(&set);
    for (int number : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGTSTP, SIGPIPE}) sigaddset(&set, number);
    pthread_sigmask(SIG_BLOCK, &set, &before_);
    fd_ = Descriptor(signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC));
    if (!fd_.open()) throw Error(fmt::format("cannot read signals: {}", std::strerror(errno)));
  }
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;
  ~SignalScope() {
    while (next() != 0) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    sigaction(SIGCHLD, &child_before_, nullptr);
  }

  /// The next signal that has come, 0 if none has.
  [[nodiscard]] int next() const {
    signalfd_siginfo info;
    return read(fd_.get(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
  }
  [[nodiscard]] int descriptor() const { return fd_.get(); }
  /// The mask with which children should start.
  [[nodiscard]] const sigset_t& mask_before() const { return before_; }

 private:
  sigset_t before_{};
  struct sigaction child_before_ {};
  Descriptor fd_;
};

/// While it lives, what children leave running when they end becomes a child of this process, which can wait
/// for it; else it would be a zombie for as long as the first process of a container does not look.
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
