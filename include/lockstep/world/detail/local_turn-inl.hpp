#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include <c10/util/Exception.h>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/rendezvous.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/detail/world_state.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// Throws unless the first rank on this host, `first`, whose world rank is `number` or -1, has finished the work that `key`
/// names within `timeout`.
inline void await_first(WorldState& state, const std::string& first, int number, const std::string& key,
                        std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + timeout;
  std::string result;
  for (bool ended = false;;) {
    try {
      const auto left = std::chrono::ceil<Milliseconds>(end - Clock::now());
      result = state.client(std::clamp(left, Milliseconds(1), news_timeout))->get_to_str(key);
      if (result == "done") return;
    } catch (const c10::DistStoreError&) {  // not yet
    } catch (const c10::Error&) {
      throw PeerError(formatted(
          "the store is gone, and with it the process that hosts it, before {}, the first on this host, has "
          "finished its local_zero_first",
          first));
    }
    try {
      RunClient run(*state.connection(), request_timeout);
      if (const auto failure = run.summary().failure)
        throw PeerError(consequence_of(*failure, state.environment.rank, {}));
      if (ended && result.empty())
        throw PeerError(formatted("{}, the first on this host, has ended in local_zero_first", first));
      ended = number >= 0 && run.members({number}).at(0).exit_code;  // it may have finished before
    } catch (const StoreError&) {  // the next call on the store says so
    }
    if (!result.empty())
      throw PeerError(formatted("{}, the first on this host, failed in local_zero_first", first));
    if (Clock::now() > end)
      throw TimeoutError(
          formatted("{}, the first on this host, has not finished its local_zero_first after {} s", first,
                    std::chrono::duration<double>(timeout).count()));
  }
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE World::LocalTurn::LocalTurn(const World& world, std::chrono::milliseconds timeout)
    : world(world) {
  detail::WorldState& state = *world.state_;
  const auto place = state.local_place();
  if (place.size == 1) return;
  // The store counts the calls, so that two Worlds of this process never use the same key. Connecting here joins the
  // rendezvous, however long the first rank's work takes afterwards.
  const auto store = state.client();
  const auto call = detail::at_store("local_zero_first", [&] {
    return store->add(detail::store_keys::calls_of_rank("local_zero_first", world.rank()), 1);
  });
  const Environment& known = state.environment;
  const bool numbered = !known.launched || known.consecutive;  // else the first rank's number is unknown
  key = detail::formatted("lockstep/first/{}/{}",
                          numbered ? std::to_string(place.first) : detail::host_identity(), call);
  if (place.rank == 0) return;
  detail::await_first(state, numbered ? detail::formatted("rank {}", place.first) : "local rank 0",
                      numbered ? place.first : -1, std::exchange(key, {}), timeout);
}

LOCKSTEP_INLINE World::LocalTurn::~LocalTurn() {
  if (!key.empty() && getpid() == world.state_->owner) try {
      world.state_->client()->set(key, good ? "done" : "failed");
    } catch (...) {  // the launcher or the timeout ends the local ranks
    }
}

}  // namespace lockstep
