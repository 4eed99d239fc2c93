#pragma once

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/log/detail/console.hpp"
#include "lockstep/world/detail/event_log.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/timeouts.hpp"

/// How a process outlives its ranks, and how a launching process decides whether it starts them again. Each host's does, after
/// the first host's has: that one keeps the port on which the ranks of the next start meet, and its store refuses those of an
/// earlier one.
namespace lockstep::inline v0_1::detail {

/// Returns another descriptor of a listener, which the store of the next start serves.
inline Listener same_port(const Listener& listener) {
  return {Descriptor(fcntl(listener.fd.get(), F_DUPFD_CLOEXEC, 3)), listener.port, listener.address,
          listener.host_is_elsewhere, listener.doubt};
}

/// Returns whether another start can mend what a launcher reports. So all hosts decide alike: a refusal at the rendezvous is
/// each rank's own error.
inline bool is_worth_a_restart(const Failure& failure) {
  const auto kind = failure.kind == FailureKind::consequence ? failure.cause_kind : failure.kind;
  const bool refused = failure.kind != FailureKind::consequence && failure.kind != FailureKind::died &&
                       failure.call.operation == rendezvous && failure.call.label.empty();
  return kind != FailureKind::usage && kind != FailureKind::mismatch && kind != FailureKind::left_early &&
         kind != FailureKind::stopped && !refused;
}

/// How the ranks of a host have ended, or one rank, whose process outlives it.
struct OwnEnd {
  bool well = true;
  std::optional<Failure> failure = {};  ///< of them the first
  bool hosts_store = true;
  int size = 0;  ///< how many ranks the process waits for where it hosts the store
  /// Whether launchers of other hosts, which outlive their ranks too, may start them again.
  bool is_read = false;
  /// Where this one may: how long it waits until the others see that they must.
  std::optional<Milliseconds> again = std::nullopt;

  /// Returns whether the run's first failure is not known from these ends.
  [[nodiscard]] bool asks() const { return well || (failure && failure->kind == FailureKind::consequence); }
};

/// How long a process outlives its ranks, and what it learns meanwhile of the others. Without a clock or a socket: the time is
/// an argument.
///
/// One that hosts the store waits until all ranks have ended: 5 minutes at most; 2 s after a failure, which others may still
/// read, and 5 s if their launchers may start again. After a failure that another start can mend each host, whatever its own
/// ranks' ends, waits until the launcher of the failed rank has told: it alone knows whether that was asked to end. On another
/// host the end of the store tells that all is well there, or that the first host starts again.
class RunEnd {
 public:
  using Time = std::chrono::steady_clock::time_point;

  RunEnd(OwnEnd own, Time now) : own_(std::move(own)) {
    until_ = now + (own_.well ? host_grace : own_.is_read ? others_end : last_request_timeout);
  }
  /// Takes what the store has answered. Returns whether the wait is over.
  bool look(const RunSummary& run, Time now) {
    run_ = run;
    // Until the failure of a rank that has ended badly is known, it may be one to mend.
    const bool failing = run.failure ? is_worth_a_restart(*run.failure) : run.bad_end;
    if (own_.again && !std::exchange(mends_, failing) && failing)
      until_ = std::min(until_, now + *own_.again);
    if (mends_) return run.host_failed || slow(now);
    if (!own_.hosts_store) return run.failure || slow(now);
    const bool all_ended = run.ended >= static_cast<std::size_t>(own_.size) && !run.dispute;
    if (all_ended && !(run.failure && own_.is_read)) return true;
    if (run.failure && (own_.well || own_.is_read))
      until_ = std::min(until_, now + (own_.is_read && !all_ended ? others_end : reading_grace));
    return slow(now);
  }
  /// The store does not answer. Returns whether the wait is over.
  [[nodiscard]] bool slow(Time now) const { return now >= until_; }
  /// The store is gone: nobody reads it any more, or the first host starts its ranks again.
  void lose() { run_.host_failed = mends_; }

  /// Returns the failure that another start can mend: of the run the first, as far as it is known.
  [[nodiscard]] std::optional<Failure> to_mend() const {
    auto failure = own_.failure;
    if (own_.well && mends_ && run_.host_failed && !failure) failure = run_.failure.value_or(Failure{});
    if (failure && failure->kind == FailureKind::consequence && run_.failure) failure = run_.failure;
    return failure && is_worth_a_restart(*failure) ? failure : std::nullopt;
  }
  /// Returns the run's first failure, if the own ranks have ended well.
  [[nodiscard]] std::optional<Failure> failure() const { return own_.well ? run_.failure : std::nullopt; }

 private:
  const OwnEnd own_;
  RunSummary run_;
  Time until_;
  bool mends_ = false;
};

/// Blocks while a process outlives its ranks, which have ended as `own`. Returns what has become of the run.
inline RunEnd outlive_ranks(StoreConnection& connection, OwnEnd own) {
  using Clock = std::chrono::steady_clock;
  own.hosts_store = connection.hosts_store();
  RunEnd end(std::move(own), Clock::now());
  const auto longest = connection.hosts_store() ? look_interval : last_retry_pause;
  for (auto pause = first_retry_pause;; pause = std::min(2 * pause, longest)) {
    try {
      if (end.look(RunClient(connection, last_request_timeout).summary(), Clock::now())) return end;
    } catch (const StoreLost&) {
      end.lose();
      return end;
    } catch (const StoreError&) {  // its host is short of cores
      if (end.slow(Clock::now())) return end;
    }
    std::this_thread::sleep_for(pause);
  }
}
/// Returns the exit code of a run whose ranks have ended with 0: not 0, after an error line, if their calls differ.
inline int code_of(const std::optional<Failure>& failure) {
  if (!failure || failure->kind != FailureKind::mismatch) return 0;
  static std::atomic_flag told;  // the process's exit may ask once more
  if (!told.test_and_set()) std::fprintf(stderr, "error: %s\n", failure->message.c_str());
  return failure->code;
}

/// Returns the number of the next start, at least `next`, and says so; none after `most`. Blocks until the store at
/// `first_host`, if another host has it, serves that start; for `limit` at most where nothing answers, and for
/// rendezvous_timeout() at most where ranks of the first host still run.
inline std::optional<int> next_start(int next, int most, std::optional<StoreEndpoint> first_host,
                                     std::chrono::milliseconds limit) {
  auto notice = std::chrono::steady_clock::now() + first_notice;
  const auto waiting = [&](const std::string& reason) {
    if (std::chrono::steady_clock::now() < notice) return;
    notice += notice_interval;
    write_lines(stderr, formatted("lockstep: waits for the first host to start its ranks again: {}\n",
                                  printable(reason)));
  };
  for (bool reached = !first_host; !reached && next <= most;) try {
      first_host->restart = next;
      first_host->remedy = "Start the run again on all hosts";
      const StoreConnection connection(*first_host, limit, waiting);
      reached = true;
    } catch (const LateStart&) {
      ++next;
    } catch (const RendezvousError& error) {
      write_lines(stderr, formatted("error: the first host has not started its ranks again: {}\n",
                                    printable(error.what())));
      return std::nullopt;
    }
  if (next <= most)
    write_lines(stderr, formatted("lockstep: restart {} of {}: starts all ranks again\n", next, most));
  else if (most > 0)
    write_lines(stderr, formatted("lockstep: gives up after restart {} of {}\n", most, most));
  return next <= most ? std::optional(next) : std::nullopt;
}

}  // namespace lockstep::inline v0_1::detail
