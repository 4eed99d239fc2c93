#pragma once

#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "lockstep/detail/at_most.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/fail_process.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/process.hpp"
#include "lockstep/world/detail/rendezvous.hpp"
#include "lockstep/world/detail/timeouts.hpp"

namespace lockstep::inline v0_1::detail {

/// Returns `code` as an exit code that is 0 only if `code` is: the kernel keeps only the low eight bits.
inline int exit_status(int code) {
  return code != 0 && (code & 0xff) == 0 ? 1 : code;
}

/// Makes the heap keep memory that a training step frees, since the next step allocates the same blocks again. glibc
/// returns large blocks to the system, whose pages must then be cleared and mapped again: for the MNIST example's
/// network a thousand page faults per step, a tenth of its time. No-op if the user has set glibc's own variables.
inline void keep_freed_memory() {
  for (const char* name : {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"})
    if (std::getenv(name)) return;
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the maximum in glibc
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
}

extern "C" inline void lockstep_note_ending_signal(int number) {
  if (getpid() != ending_process) end_by_signal(number);  // forked without exec
  // Only the first counts: signals often come twice, to a process and to its group, and the end is seconds away.
  int none = 0;
  if (ending_signal.compare_exchange_strong(none, number)) ending_signal.notify_one();
}

/// Publishes a SIGTERM, SIGINT or SIGHUP of this process to the other ranks, then ends the process by it.
/// No-op for a signal that the program handles or ignores.
inline void announce_signals() {
  std::thread([] {
    ending_signal.wait(0);
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
}

/// Publishes how this process ends to the other ranks, as `rank`, which must live as long: its exit code (std::exit, a
/// return from main) and, without a supervisor, which sees how its ranks end, its signals. They would only see the
/// connections close.
LOCKSTEP_PROCESS_WIDE inline void announce_end(EndingRank& rank) {
  ending_rank = &rank;
  static std::once_flag once;
  std::call_once(once, [] {
    ending_process = getpid();  // it may be a child of one that has set up end_on_uncaught()
    on_exit(
        [](int code, void*) {
          if (getpid() != ending_process) return;  // a forked child exits
          const int own = at_most(code == 0 ? exit_limit : last_request_timeout, code,
                                  [code] { return ending_rank.load()->end(code, false); });
          if (own == code) return;
          flush_output();
          _exit(own);
        },
        nullptr);
    if (report_descriptor() < 0) announce_signals();
  });
}

/// Ends a worker of torchrun together with the agent that started it: a killed agent (SIGKILL, out of memory) would
/// otherwise leave it training as an orphan. No-op in any other process, including those that a worker or a wrapper
/// script starts: of these only the worker itself leads a session. The calling thread must live as long as the worker.
inline void end_with_agent() {
  if (!process_variable("TORCHELASTIC_RUN_ID") || getsid(0) != getpid()) return;
  if (!die_with_parent(getppid())) raise(SIGKILL);
  // The agent has ended before if the parent is process 1, unless that is itself the agent, as in a container.
  const std::string parent = getppid() == 1 ? proc_file(1, "cmdline").value_or("") : "";
  const bool agent =
      parent.find("python") != std::string::npos || parent.find("torchrun") != std::string::npos;
  if (!parent.empty() && !agent) raise(SIGKILL);
}

/// Blocks until `thread` ends. Ends this process if its launcher has been stopped for `heartbeat` before: it relays no
/// output, and reaps nobody.
inline void join_under_launcher(pthread_t thread, Milliseconds heartbeat) {
  if (report_descriptor() < 0) return static_cast<void>(pthread_join(thread, nullptr));
  using Clock = std::chrono::steady_clock;
  Clock::time_point looked{}, since{};
  timespec until{};
  do {
    const auto now = Clock::now();
    // Behind the name, which may contain anything. A long stop of this process, too, does not count.
    const bool stopped = proc_file(getppid(), "stat").value_or("").find(") T ") != std::string::npos;
    if (!stopped || now - looked >= 4 * launcher_look) since = now;
    looked = now;
    if (now - since >= heartbeat)
      fail_process({.kind = FailureKind::timed_out,
                    .rank = process_rank.load(),
                    .pid = getpid(),
                    .message = stopped_launcher_text(now - since, getppid()),
                    .time = monotonic_nanoseconds()});
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += std::chrono::seconds(launcher_look).count();
  } while (pthread_timedjoin_np(thread, nullptr, &until) == ETIMEDOUT);
}

/// Runs `work` on a thread without exception handlers above it, so that an exception reaches
/// `end_on_uncaught` before any destructor runs. Blocks until `work` returns.
inline void run_without_handlers(std::function<void()> work) {
  end_on_uncaught();
  const Milliseconds heartbeat = heartbeat_timeout();  // the program may set variables meanwhile
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  rlimit stack{};
  constexpr std::size_t least = 8u << 20;
  const bool limited = getrlimit(RLIMIT_STACK, &stack) == 0 && stack.rlim_cur != RLIM_INFINITY;
  pthread_attr_setstacksize(&attributes, limited ? std::max<std::size_t>(least, stack.rlim_cur) : 8 * least);
  pthread_t thread;
  const auto run = [](void* argument) -> void* {
    (*static_cast<std::function<void()>*>(argument))();
    return nullptr;
  };
  const int status = pthread_create(&thread, &attributes, run, &work);
  pthread_attr_destroy(&attributes);
  if (status != 0)
    throw Error(formatted("cannot start a thread: {}: start fewer processes, or raise `ulimit -u`",
                          std::strerror(status)));
  join_under_launcher(thread, heartbeat);
}

}  // namespace lockstep::inline v0_1::detail
