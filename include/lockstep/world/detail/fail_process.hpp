#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <ctime>
#include <exception>
#include <iostream>
#include <mutex>
#include <thread>
#include <utility>

#include "lockstep/detail/at_most.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/files.hpp"
#include "lockstep/world/detail/control_plane.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/rendezvous.hpp"
#include "lockstep/world/detail/timeouts.hpp"

namespace lockstep::inline v0_1::detail {

/// The rank that a process is, as far as the other ranks must know how it ends.
struct EndingRank {
  virtual ~EndingRank() = default;
  /// Publishes a failure, also where this rank has not joined and others wait for it. Returns whether it is the first,
  /// or true if this rank cannot know. May block.
  virtual bool publish(const Failure& failure) = 0;
  /// Publishes that this process ends with exit code `code`. Returns its exit code: not 0 if the ranks' calls differ.
  /// May block. `returns`: see WorldState::end.
  virtual int end(int code, bool returns) = 0;
};
/// The rank that `launch` runs in this process, null before it has a World.
LOCKSTEP_PROCESS_WIDE inline std::atomic<EndingRank*> ending_rank{nullptr};

/// The process that end_on_uncaught() has set up, which is not a child that it forks, and the signal that is ending
/// it, 0 if there is none (see announce_end).
LOCKSTEP_PROCESS_WIDE inline std::atomic<pid_t> ending_process{0};
LOCKSTEP_PROCESS_WIDE inline std::atomic<int> ending_signal{0};

/// Ends this process by a signal, whose action becomes the default one.
[[noreturn]] inline void end_by_signal(int number) {
  signal(number, SIG_DFL);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, number);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  raise(number);
  _exit(128 + number);
}

/// Flushes the program's output, as _exit does not. Blocks for at most `flush_limit`.
inline void flush_output() {
  at_most(flush_limit, [] {
    std::cout.flush();
    std::fflush(nullptr);
  });
}

/// Reports a failure to the supervisor, the store, the user and torchrun. Sets `said` once the supervisor or
/// the user has it. Throws std::system_error if no thread can be started that writes the line for the user.
inline void tell_failure(const Failure& failure, bool& said) {
  const int rank = process_rank.load();
  const std::time_t when = std::time(nullptr);
  const bool supervised = report_descriptor() >= 0, consequence = failure.kind == FailureKind::consequence;
  if (supervised) {
    flush_output();
    const auto bytes = report_of(failure).substr(0, 60000);
    said = write(report_descriptor(), bytes.data(), bytes.size()) > 0;
  }
  // A rank that has left does not know of the ranks that wait for it: this rank publishes its failure.
  const bool departure = consequence && failure.cause_kind == FailureKind::left_early;
  bool said_already = false;
  if (EndingRank* const own = ending_rank; own && (!consequence || departure)) {
    Failure published = failure;
    if (departure) {
      published.kind = FailureKind::left_early;
      published.rank = failure.cause;
    }
    const bool first = at_most(publish_limit, true, [own, published] { return own->publish(published); });
    said_already = !first && failure.kind == FailureKind::usage;
  }
  if (supervised) return;
  // The sender of the signal knows that it ends the other ranks as well.
  if (const int number = ending_signal; consequence && number != 0) end_by_signal(number);
  const auto text =
      formatted("error: {}\n", rank < 0 ? failure.message : headline(failure, formatted("rank {}", rank)));
  // Long enough for a thread to start on a host under load: without this line nobody knows what was wrong.
  const LeavableThread writer([text, said_already] {
    std::cout.flush();
    std::fflush(stdout);
    if (!said_already) std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(nullptr);
  });
  said = writer.ends_within(line_limit) || !writer.cancel();
  if (!said) return;
  if (failure.kind == FailureKind::usage && !ending_rank.load())
    at_most(line_limit, [text = failure.message] { tell_waiting_ranks(text); });
  // Later output of libraries is about connections that end, which no user can act on.
  const int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
  if (nowhere >= 0) dup2(nowhere, 2);
  const auto path = process_variable("TORCHELASTIC_ERROR_FILE");
  // torchrun takes the earliest time stamp for the cause. Rank 0 may host the store, by which others learn the cause.
  if (consequence && (rank == 0 || path)) std::this_thread::sleep_for(publish_limit);
  if (path) try {  // atomically: a partial file makes torchrun itself crash
      write_file_atomically(*path, elastic_error(failure, consequence ? std::time(nullptr) : when));
    } catch (const Error&) {  // the failure is reported in other ways, too
    }
}

/// Ends this process immediately, and with it the run: reports to the supervisor and the store, flushes, and
/// exits without running destructors. Only the first thread to call it reports.
LOCKSTEP_PROCESS_WIDE [[noreturn]] inline void fail_process(Failure failure) noexcept {
  static std::atomic<std::thread::id> first;
  std::thread::id teller;
  if (!first.compare_exchange_strong(teller, std::this_thread::get_id())) {
    // A second exception, such as out of memory, returns here through std::terminate.
    if (teller == std::this_thread::get_id()) _exit(failure.code);
    while (true) pause();
  }
  bool said = false;
  try {
    tell_failure(failure, said);
  } catch (...) {  // no memory or no thread: the code below needs neither
  }
  if (!said && report_descriptor() >= 0)
    dprintf(report_descriptor(), "%s", failure.message.c_str());
  else if (!said)
    dprintf(2, "error: %s\n", failure.message.c_str());
  _exit(failure.code);
}

/// Makes an uncaught exception end the process through `fail_process` before the stack unwinds: no destructor
/// can then wait for a peer that no longer answers. No-op if the program has a terminate handler of its own.
LOCKSTEP_PROCESS_WIDE inline void end_on_uncaught() {
  static std::once_flag once;
  std::call_once(once, [] {
    ending_process = getpid();
    report_descriptor();
    if (std::get_terminate() != __gnu_cxx::__verbose_terminate_handler) return;  // the program has its own
    std::set_terminate([] {
      if (getpid() != ending_process) __gnu_cxx::__verbose_terminate_handler();  // a forked child
      Failure failure;
      try {
        failure = failure_of(std::current_exception());
        // Gloo throws on a thread of its own where the calls of the ranks differ in the size of their data.
        if (classify(failure.message).kind == ForeignError::other_sizes)
          if (auto calls =
                  at_most(line_limit, std::optional<Failure>(), &ControlPlane::different_calls_of_process)) {
            failure.kind = calls->kind;
            failure.cause = calls->cause;
            failure.call = calls->call;
            failure.message = std::move(calls->message);
          }
      } catch (...) {
        if (failure.message.empty()) failure.message = "out of memory";  // short enough to need no allocation
      }
      fail_process(std::move(failure));
    });
  });
}

}  // namespace lockstep::inline v0_1::detail
