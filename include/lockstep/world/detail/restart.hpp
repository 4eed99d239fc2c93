#pragma once

#include <fcntl.h>

#include <chrono>
#include <cstdio>
#include <optional>
#include <string>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/log/detail/console.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/timeouts.hpp"

/// How a launching process decides whether it starts its ranks again. Each host's does, after the first host's has: that
/// one keeps the port on which the ranks of the next start meet, and its store refuses those of an earlier one.
namespace lockstep::detail {

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

/// Returns the number of the next start, at least `next`, and says so; none after `most`. Blocks until the store at
/// `first_host`, if another host has it, serves that start; for `limit` at most where nothing answers.
inline std::optional<int> next_start(int next, int most, std::optional<StoreEndpoint> first_host,
                                     std::chrono::milliseconds limit) {
  for (bool reached = !first_host; !reached && next <= most;) try {
      first_host->restart = next;
      first_host->remedy = "Start the run again on all hosts";
      const StoreConnection connection(*first_host, limit);
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

}  // namespace lockstep::detail
