#pragma once

#include <algorithm>
#include <chrono>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/environment.hpp"

namespace lockstep::inline v0_1::detail {

using Milliseconds = std::chrono::milliseconds;

// Every time that no option sets. Public calls are bounded by them so:
//   World::store, the first communicator        LOCKSTEP_RENDEZVOUS_TIMEOUT
//   World::local_zero_first                     its timeout, of the work of the first rank on the host
//   a communicator's constructor, a collective, send, recv, new_group, Work::wait, shutdown
//                                               the communicator's timeout, and throw_together; where another rank has
//                                               failed, or is silent for heartbeat_timeout(), throw_together from then
//   Work::synchronize                           its timeout, and throw_together
//   a communicator's destructor                 3 * last_wait, for threads of its own; without `launch` also answer_timeout for
//                                               the store, or last_request_timeout where it hosts that
//   the end of a process                        publish_limit after a failure. Else for what is left in flight the
//                                               communicator's timeout, at std::exit exit_limit - host_grace, and host_grace for
//                                               other ranks where it hosts the store
//   MPI_Finalize, of what an MpiComm has left   that communicator's timeout, and backend_slack
//   launch, after the first failure             LaunchOptions::grace, for ranks that do not end; where they start again on
//                                               several hosts also host_grace for ranks that have ended well elsewhere,
//                                               last_request_timeout for the news of the failed host, and for its end
//                                               LaunchOptions::grace and regroup_limit, where the store still answers
//                                               LOCKSTEP_RENDEZVOUS_TIMEOUT

// What options default to, unless LOCKSTEP_TIMEOUT is set: a collective, and over NCCL, as in Python.
inline constexpr Milliseconds collective_timeout{1'800'000}, nccl_timeout{600'000};
// Requests to the store: of a rank that runs, of a process that ends or refuses, and for the outcome of the rendezvous, after
// which a rank says whom it waits for.
inline constexpr Milliseconds request_timeout{10'000}, last_request_timeout{2'000}, outcome_timeout{5'000};
// Connecting: the look-up of a name (the resolver asks its second name server after 5 s), one attempt, the answer of what
// listens, and the pauses between attempts.
inline constexpr Milliseconds lookup_timeout{7'000}, attempt_timeout{5'000}, greeting_timeout{1'000};
inline constexpr Milliseconds first_retry_pause{5}, last_retry_pause{500}, board_pause{20};
// The server: the hello of a client, the cause of a rank whose connection has closed, and the calls of ranks that differ.
inline constexpr Milliseconds hello_timeout{10'000}, end_grace{1'500}, dispute_timeout{1'000};
// While ranks come: LOCKSTEP_RENDEZVOUS_TIMEOUT unless it is set; how often a rank looks, after which time without a newcomer it
// first says whom it waits for, and how often; and how much CPU time between two looks shows that they still come.
inline constexpr Milliseconds rendezvous_default{300'000}, outcome_interval{2'500}, first_notice{4'500},
    notice_interval{60'000}, least_progress{100};
// While a rank waits in a call: how often its thread looks, when it first asks the others and how often, when it warns, how
// long they may take to answer (while answers still come, or the store is slow, longer), and the longest pause between two.
inline constexpr Milliseconds look_interval{50}, first_question{5'000}, question_interval{30'000};
inline constexpr Milliseconds least_warning{5'000}, most_warning{30'000};
inline constexpr Milliseconds answer_timeout{1'500}, longest_answer{5'000}, trickle{400},
    report_interval{500};
inline constexpr Milliseconds message_pause{20};
// A failure: the news of one that another rank is publishing; within which all ranks throw together; within which a program
// must notice it; and until the calls that differ are found.
inline constexpr Milliseconds news_timeout{500}, throw_together{2'000}, notice_limit{2'000};
inline constexpr Milliseconds mismatch_timeout{2'500};
// Two aborts of a rank within it are by one exception.
inline constexpr Milliseconds same_exception{1'000};
// Where a transport does not wake who waits for it: the pauses between two questions of the program, and of the thread that
// watches a device; and how much later than the communicator's timeout its own ends an operation.
inline constexpr std::chrono::microseconds first_pause{20}, last_pause{5'000}, watch_pause{20'000};
inline constexpr Milliseconds backend_slack{10'000};
// How long a destructor waits for threads of its own; and while transfers of a failed group over Gloo end: the pause between
// two looks, how long a connection is quiet then, and how long they may take.
inline constexpr Milliseconds last_wait{500}, abort_pause{2}, quiet_transfer{20}, most_transfer{300};
// How often a rank looks whether its launcher is stopped.
inline constexpr std::chrono::seconds launcher_look{1};
// A launcher: until a cause, and a consequence, count as the first failure; how often it looks while ranks run and while they
// end; when it relays a line without an end; and how long it waits for killed orphans of its ranks, and for ranks that
// handle a signal.
inline constexpr Milliseconds cause_settles{50}, consequence_settles{2'000};
inline constexpr Milliseconds running_look{100}, ending_look{20}, idle_line{200};
inline constexpr Milliseconds orphan_limit{500}, orphan_pause{1}, interrupt_limit{30'000};
// On several hosts, until the launchers start their ranks again, beside LaunchOptions::grace; and how long the first host's
// waits for the ranks of the others after a failure.
inline constexpr Milliseconds regroup_limit{20'000}, others_end{5'000};
// The end of a process: until its failure is published, its output flushed, its error line written, and other ranks have read
// its failure where it hosts the store. Where all has ended well it hosts that for others up to the last.
inline constexpr Milliseconds publish_limit{1'500}, flush_limit{500}, line_limit{3'000}, reading_grace{800};
inline constexpr Milliseconds host_grace{300'000}, exit_limit{600'000}, signal_limit{5'000};
// Waits of lockstep's own backends. In shared memory: the longest sleep, also while other ranks wait for this process, and until
// memory is asked for again. Over MPI: how long a wait yields, and the pauses afterwards.
inline constexpr Milliseconds shm_sleep{50}, backlog_sleep{1}, allocation_pause{1'000}, mpi_yield_time{20};
inline constexpr std::chrono::microseconds mpi_pause{50};

/// Returns LOCKSTEP_TIMEOUT, which `launch` sets to `--timeout`, or else `fallback`.
inline std::chrono::milliseconds default_timeout(std::chrono::milliseconds fallback) {
  const auto seconds = integer_variable(process_variable, "LOCKSTEP_TIMEOUT", 1);
  return seconds ? std::chrono::milliseconds(std::chrono::seconds(*seconds)) : fallback;
}

/// Returns the timeout of the rendezvous: LOCKSTEP_RENDEZVOUS_TIMEOUT in seconds, 5 minutes by default.
inline std::chrono::milliseconds rendezvous_timeout() {
  const auto seconds = integer_variable(process_variable, "LOCKSTEP_RENDEZVOUS_TIMEOUT", 1, 1'000'000);
  return seconds ? std::chrono::seconds(*seconds) : rendezvous_default;
}

/// What longer waits are clamped to: poll counts milliseconds in an int.
inline constexpr Milliseconds longest_wait = std::chrono::hours(24 * 24);

/// Returns the timeout of the option struct `options`, clamped to longest_wait. Throws UsageError below 1 ms.
inline std::chrono::milliseconds checked_timeout(const char* options, std::chrono::milliseconds timeout) {
  if (timeout.count() < 1)
    throw UsageError(formatted("{}: a timeout of {} ms leaves no time for a collective: give at least 1 ms",
                               options, timeout.count()));
  // Gloo counts milliseconds in 32 bits, and adding the largest duration to a time point would overflow.
  return std::min(timeout, longest_wait);
}

/// Returns how long the host of the store, or a rank that other ranks wait for, may be silent before it
/// counts as failed: a late rank still answers, from a thread of its own.
/// Counterpart: TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC.
inline std::chrono::milliseconds heartbeat_timeout() {
  const auto seconds = integer_variable(process_variable, "LOCKSTEP_HEARTBEAT_TIMEOUT", 1);
  return seconds ? std::chrono::seconds(*seconds) : std::chrono::minutes(2);
}

}  // namespace lockstep::inline v0_1::detail
