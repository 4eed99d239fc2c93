#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/json.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/files.hpp"
#include "lockstep/world/detail/at_most.hpp"
#include "lockstep/world/detail/control_plane.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/process.hpp"
#include "lockstep/world/detail/rendezvous.hpp"
#include "lockstep/world/detail/timeouts.hpp"

namespace lockstep::detail {

/// The rank that a process is, as far as the other ranks must know how it ends.
struct EndingRank {
  virtual ~EndingRank() = default;
  /// Publishes a failure, also where this rank has not joined and others wait for it. Returns whether it is the first, or
  /// true if this rank cannot know. May block.
  virtual bool publish(const Failure& failure) = 0;
  /// Publishes that this process ends with exit code `code`. Returns its exit code: not 0 if the ranks' calls differ. May
  /// block, for other ranks only if it `waits`.
  virtual int end(int code, bool waits) = 0;
};
/// The rank that `launch` runs in this process, null before it has a World.
LOCKSTEP_PROCESS_WIDE inline std::atomic<EndingRank*> ending_rank{nullptr};

/// Writes torchrun's error file atomically: a partial file makes torchrun itself crash.
inline void write_elastic_error_file(const std::string& path, const std::string& text, std::time_t when) {
  const auto json = detail::formatted(
      R"({{"message":{{"message":{},"extraInfo":{{"py_callstack":{},"timestamp":"{}"}}}}}})",
      json_string(text), json_string(text), static_cast<long long>(when));
  try {
    write_file_atomically(path, json);
  } catch (const Error&) {  // the failure is reported in other ways, too
  }
}

/// Returns `code` as an exit code that is 0 only if `code` is: the kernel keeps only the low eight bits.
inline int exit_status(int code) {
  return code != 0 && (code & 0xff) == 0 ? 1 : code;
}

/// The signal that is ending this process, 0 if there is none, and the state of its handler. See announce_signals.
LOCKSTEP_PROCESS_WIDE inline std::atomic<int> ending_signal{0};
LOCKSTEP_PROCESS_WIDE inline std::atomic<std::int64_t> ending_since{0};  // monotonic_nanoseconds
LOCKSTEP_PROCESS_WIDE inline std::atomic<pid_t> announcing_process{0};
LOCKSTEP_PROCESS_WIDE inline sem_t signal_came;

/// Ends this process by a signal with the default action.
[[noreturn]] inline void end_by_signal(int number) {
  signal(number, SIG_DFL);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, number);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  raise(number);
  _exit(128 + number);
}

/// Reports a failure to the supervisor, the store, the user and torchrun. Sets `said` once the supervisor or
/// the user has it. Throws std::system_error if no thread can be started that writes the line for the user.
inline void tell_failure(Failure& failure, bool& said) {
  const int rank = process_rank.load();
  const std::time_t when = std::time(nullptr);
  const bool consequence = failure.kind == FailureKind::consequence;
  bool first = true;
  if (report_descriptor() >= 0) {
    at_most(flush_limit, [] {
      std::cout.flush();
      std::fflush(nullptr);
    });
    const auto bytes = report_of(failure).substr(0, 60000);
    said = write(report_descriptor(), bytes.data(), bytes.size()) > 0;
  }
  // A rank that has left does not know of the ranks that wait for it: this rank publishes its failure.
  const bool departure = consequence && failure.cause_kind == FailureKind::left_early;
  if ((!consequence || departure) && ending_rank.load()) {
    const auto told = std::make_shared<std::atomic<bool>>(true);
    Failure published = failure;
    if (departure) {
      published.kind = FailureKind::left_early;
      published.rank = failure.cause;
    }
    at_most(publish_limit,
            [told, published = std::move(published)] { *told = ending_rank.load()->publish(published); });
    first = *told;
  }
  if (report_descriptor() >= 0) return;
  // The sender of the signal knows that it ends the other ranks as well.
  if (const int number = ending_signal; consequence && number != 0) end_by_signal(number);
  const bool said_already = !first && failure.kind == FailureKind::usage;
  const auto text = detail::formatted(
      "error: {}\n", rank < 0 ? failure.message : headline(failure, detail::formatted("rank {}", rank)));
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
  if (path)
    write_elastic_error_file(*path,
                             failure.type.empty() ? failure.message : failure.type + ": " + failure.message,
                             consequence ? std::time(nullptr) : when);
}

/// Ends this process immediately, and with it the run: reports to the supervisor and the store, flushes, and
/// exits without running destructors. Only the first thread to call it reports.
LOCKSTEP_PROCESS_WIDE [[noreturn]] inline void fail_process(Failure failure) noexcept {
  static std::atomic_flag begun;
  static std::atomic<std::thread::id> teller;
  if (begun.test_and_set()) {
    // A second exception, such as out of memory, returns here through std::terminate.
    if (teller.load() == std::this_thread::get_id()) _exit(failure.code);
    while (true) pause();
  }
  teller = std::this_thread::get_id();
  bool said = false;
  try {
    tell_failure(failure, said);
  } catch (...) {  // no memory or no thread: the code below needs neither
  }
  if (!said) {
    const int supervisor = report_descriptor();
    const auto piece = [](std::string_view text) {
      return iovec{const_cast<char*>(text.data()), text.size()};
    };
    const iovec pieces[] = {piece(supervisor >= 0 ? "" : "error: "), piece(failure.message),
                            piece(supervisor >= 0 ? "" : "\n")};
    if (writev(supervisor >= 0 ? supervisor : 2, pieces, 3) < 0) {
    }
  }
  _exit(failure.code);
}

extern "C" inline void lockstep_note_ending_signal(int number) {
  int none = 0;
  const bool forked = getpid() != announcing_process;  // without exec
  if (!forked && ending_signal.compare_exchange_strong(none, number)) {
    ending_since = monotonic_nanoseconds();
    sem_post(&signal_came);
    return;
  }
  // The end is at most seconds away: only a user's second Ctrl-C shortens it. Signals often come twice, to a
  // process and to its group.
  if (!forked && (number != SIGINT || monotonic_nanoseconds() - ending_since < 500'000'000)) return;
  signal(number, SIG_DFL);
  raise(number);
}

/// Publishes a SIGTERM, SIGINT or SIGHUP of this process to the other ranks, then ends the process by it; a second
/// SIGINT, half a second later, ends it at once. Without a supervisor they would only see the connections close. No-op for a signal
/// that the program handles or ignores, and under a supervisor, which sees how its ranks end.
inline void announce_signals() {
  static std::once_flag once;
  if (report_descriptor() >= 0) return;
  std::call_once(once, [&] {
    announcing_process = getpid();
    sem_init(&signal_came, 0, 0);
    std::thread([] {
      while (sem_wait(&signal_came) != 0) {
      }
      const int number = ending_signal;
      at_most(signal_limit, [number] {
        ending_rank.load()->publish(
            {.kind = FailureKind::died,
             .rank = process_rank.load(),
             .code = 128 + number,
             .message = formatted("ended by SIG{} on {}", sigabbrev_np(number), host_name())});
      });
      end_by_signal(number);
    }).detach();
    for (const int number : {SIGTERM, SIGINT, SIGHUP}) {
      struct sigaction action {};
      if (sigaction(number, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) continue;
      action.sa_handler = lockstep_note_ending_signal;
      action.sa_flags = SA_RESTART;
      sigaction(number, &action, nullptr);
    }
  });
}

/// Publishes this process's exit code to the other ranks when it exits (std::exit, a return from main).
LOCKSTEP_PROCESS_WIDE inline void announce_exit() {
  static std::once_flag once;
  static pid_t process = 0;
  std::call_once(once, [] {
    process = getpid();
    on_exit(
        [](int code, void*) {
          if (getpid() != process) return;  // a forked child exits
          const auto own = std::make_shared<std::atomic<int>>(code);
          at_most(code == 0 ? flush_limit : last_request_timeout,
                  [own] { *own = ending_rank.load()->end(*own, false); });
          if (*own != code) _exit(*own);
        },
        nullptr);
  });
}

/// Replaces the text of an exception that Gloo throws on a thread of its own, when it receives data of
/// another size than it expects, by the different calls of the ranks.
inline void name_calls(Failure& failure) noexcept try {
  if (classify(failure.message).kind != ForeignError::other_sizes) return;
  const auto calls = std::make_shared<std::string>();
  const LeavableThread asking([calls] { *calls = ControlPlane::different_calls_of_process(); });
  if (!asking.ends_within(line_limit)) return;
  asking.rethrow();
  if (!calls->empty()) failure.message = *calls;
} catch (...) {  // the exception's own text stays
}

/// Makes an uncaught exception end the process through `fail_process` before the stack unwinds: no destructor
/// can then wait for a peer that no longer answers. No-op if the program has a terminate handler of its own.
LOCKSTEP_PROCESS_WIDE inline void end_on_uncaught() {
  static std::terminate_handler previous = nullptr;
  static std::once_flag once;
  std::call_once(once, [] {
    report_descriptor();
    previous = std::get_terminate();
    if (previous != __gnu_cxx::__verbose_terminate_handler) return;  // the program has its own
    static const pid_t owner = getpid();
    std::set_terminate([] {
      if (getpid() != owner) previous();  // a forked child
      Failure failure;
      try {
        failure = failure_of(std::current_exception());
      } catch (...) {
        failure.message = "out of memory";  // short enough to need no allocation
      }
      name_calls(failure);
      fail_process(std::move(failure));
    });
  });
}

/// Returns whether this process's parent ended before end_with_agent() ran: its parent is then process 1.
/// Returns false if process 1 is a Python interpreter, as in a container whose first process is the agent.
inline bool taken_over_by_init() {
  if (getppid() != 1) return false;
  std::ifstream file("/proc/1/cmdline", std::ios::binary);
  const std::string command((std::istreambuf_iterator<char>(file)), {});
  return !command.empty() && command.find("python") == std::string::npos &&
         command.find("torchrun") == std::string::npos;
}

/// Ends a worker of torchrun together with the agent that started it: a killed agent (SIGKILL, out of memory) would
/// otherwise leave it training as an orphan. No-op in any other process, including those that a worker or a wrapper
/// script starts: of these only the worker itself leads a session. The calling thread must live as long as the worker.
inline void end_with_agent() {
  if (!process_variable("TORCHELASTIC_RUN_ID") || getsid(0) != getpid()) return;
  if (!die_with_parent(getppid()) || taken_over_by_init()) raise(SIGKILL);
}

/// Runs `work` on a thread without exception handlers above it, so that an exception reaches
/// `end_on_uncaught` before any destructor runs. Blocks until `work` returns.
inline void run_without_handlers(std::function<void()> work) {
  end_on_uncaught();
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  rlimit stack{};
  const std::size_t least = 8u << 20;
  if (getrlimit(RLIMIT_STACK, &stack) == 0 && stack.rlim_cur != RLIM_INFINITY)
    pthread_attr_setstacksize(&attributes, std::max<std::size_t>(least, stack.rlim_cur));
  else
    pthread_attr_setstacksize(&attributes, 8 * least);
  pthread_t thread;
  const auto run = [](void* argument) -> void* {
    (*static_cast<std::function<void()>*>(argument))();
    return nullptr;
  };
  const int status = pthread_create(&thread, &attributes, run, &work);
  pthread_attr_destroy(&attributes);
  if (status != 0)
    throw Error(detail::formatted("cannot start a thread: {}: start fewer processes, or raise `ulimit -u`",
                                  std::strerror(status)));
  pthread_join(thread, nullptr);
}

}  // namespace lockstep::detail
