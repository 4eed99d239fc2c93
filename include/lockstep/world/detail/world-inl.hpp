#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/host_share.hpp"
#include "lockstep/world/detail/rendezvous.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/detail/world_state-inl.hpp"
#include "lockstep/world/detail/world_state.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1::detail {

/// Sets the number of LibTorch's threads. `given` names what has determined it, unless it is a share.
inline void set_threads(const WorldOptions& options, const Environment& environment, const char* given) {
  const bool share = options.threads == WorldOptions::share;
  const int threads = share ? launched_threads(environment).value_or(0)
                            : static_cast<int>(std::min<std::int64_t>(options.threads, INT_MAX));
  if (threads <= 0) return;
  at::set_num_threads(threads);
  shared_threads = threads;
  shared_threads_source = share ? share_of_cores : given;
}

LOCKSTEP_INLINE WorldState& state_of(const World& world) {
  return *world.state_;
}

LOCKSTEP_INLINE World world_from(Environment place, const WorldOptions& options, bool launched) {
  World world(std::move(place));
  const Environment& known = world.state_->environment;
  process_rank = known.rank;
  set_threads(options, known, launched ? "--threads" : "the program");
  if (known.size == 1) {
    // A launcher's only rank.
    static std::once_flag announced;
    if (!known.launcher.empty() && world.log.should_log(Level::info))
      std::call_once(announced, [&] { write_run_summary(known, {own_identity({}, known)}); });
    return world;
  }
  // A process joins once per rank and run: all its Worlds share the store, which rank 0 may host.
  static std::mutex mutex;
  // The connection of a process that exits says that this rank takes no further part.
  static std::map<std::string, std::shared_ptr<WorldState>> joined;
  const std::lock_guard lock(mutex);
  world.state_ =
      joined.try_emplace(formatted("{} {} {}", known.rendezvous, known.rank, known.size), world.state_)
          .first->second;
  return world;
}

/// Throws unless the first rank on this host, `first`, whose world rank is `number` or -1, has finished the work that `key`
/// names within `timeout`.
inline void await_first(WorldState& state, const std::string& first, int number, const std::string& key,
                        std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::clamp<Milliseconds>(timeout, {}, longest_wait);
  for (std::string result, ended;;) {
    try {
      const auto now = Clock::now();
      try {
        result = RunClient(*state.connection(), std::clamp(end, now + Milliseconds(1), now + news_timeout))
                     .get(key);
      } catch (const StoreLost&) {
        throw;
      } catch (const StoreError&) {  // not yet
      }
      if (result == "done") return;
      RunClient run(*state.connection(), std::clamp(end, now + 2 * news_timeout, now + request_timeout));
      if (const auto failure = run.summary().failure)
        throw PeerError(consequence_of(*failure, state.environment.rank, {}));
      if (result.empty()) result = ended;  // it may have finished before
      if (number >= 0 && run.members({number}).at(0).exit_code) ended = "has ended";
    } catch (const StoreLost&) {
      if (result.empty()) result = "has ended, or the store has, while others wait";
    } catch (const StoreError&) {  // the next round says so
    }
    if (result.empty() && Clock::now() <= end) continue;
    Failure failure{.kind = result.empty() ? FailureKind::timed_out : FailureKind::consequence,
                    .rank = state.environment.rank,
                    .cause = number,
                    .call = {.operation = "local_zero_first"}};
    failure.message = formatted("{}, the first on this host, {} in local_zero_first", first, result);
    if (!result.empty()) throw PeerError(failure);
    failure.message =
        formatted("{}, the first on this host, has not finished its local_zero_first after {} s", first,
                  std::chrono::duration<double>(timeout).count());
    throw TimeoutError(failure);
  }
}

}  // namespace lockstep::inline v0_1::detail

namespace lockstep::inline v0_1 {

LOCKSTEP_INLINE World::World() : World(detail::Environment{}) {}

LOCKSTEP_INLINE World::World(detail::Environment environment)
    : log(environment.rank), state_(std::make_shared<detail::WorldState>(std::move(environment))) {
  detail::known_exception_text = [](const std::exception& error) {
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    return known ? std::string(known->what_without_backtrace()) : std::string();
  };
}

LOCKSTEP_INLINE World World::from_environment(const WorldOptions& options) {
  detail::require_level(detail::process_variable);
  return detail::world_from(detail::read_environment(), options, false);
}

LOCKSTEP_INLINE World World::join(const std::string& url, int rank, int size, const WorldOptions& options) {
  if (size < 1 || size > detail::most_ranks)
    throw UsageError(
        detail::formatted("the world size is {}: it must be in 1 to {}", size, detail::most_ranks));
  if (rank < 0 || rank >= size)
    throw UsageError(detail::formatted(
        "rank {} is out of range: with a world size of {} it must be in 0 to {}", rank, size, size - 1));
  detail::parse_rendezvous(url);
  detail::require_level(detail::process_variable);
  detail::Environment environment;
  environment.rank = rank;
  environment.size = size;
  environment.rendezvous = url;
  environment.rendezvous_origin = "the URL given to World::join";
  environment.store_secret = detail::read_store_secret();
  World world(environment);
  detail::process_rank = rank;
  detail::set_threads(options, environment, "the program");
  return world;
}

LOCKSTEP_INLINE int World::rank() const {
  return state_->environment.rank;
}

LOCKSTEP_INLINE int World::size() const {
  return state_->environment.size;
}

LOCKSTEP_INLINE int World::local_rank() const {
  return state_->local_place().rank;
}

LOCKSTEP_INLINE int World::local_size() const {
  return state_->local_place().size;
}

LOCKSTEP_INLINE detail::StorePtr World::store() const {
  state_->await_all();
  // The keys of lockstep lie beside those of the program.
  return c10::make_intrusive<c10d::PrefixStore>("program", state_->rendezvous().store);
}

LOCKSTEP_INLINE World::LocalTurn::LocalTurn(const World& world, std::chrono::milliseconds timeout)
    : world(world) {
  detail::WorldState& state = *world.state_;
  const auto place = state.local_place();
  if (place.size == 1) return;
  // The store counts the calls, so that two Worlds of this process never use the same key. Connecting here joins the
  // rendezvous, however long the first rank's work takes afterwards.
  const auto call = detail::at_store("local_zero_first", [&] {
    return detail::RunClient(*state.connection(), detail::request_timeout)
        .add(detail::store_keys::calls_of_rank("local_zero_first", world.rank()), 1);
  });
  const detail::Environment& known = state.environment;
  const bool numbered = !known.launched || known.consecutive;  // else the first rank's number is unknown
  key = detail::formatted("lockstep/first/{}/{}",
                          numbered ? std::to_string(place.first) : detail::host_identity(), call);
  if (place.rank == 0) return;
  detail::await_first(state, numbered ? detail::formatted("rank {}", place.first) : "local rank 0",
                      numbered ? place.first : -1, std::exchange(key, {}), timeout);
}

LOCKSTEP_INLINE World::LocalTurn::~LocalTurn() {
  if (!key.empty() && getpid() == world.state_->owner) try {
      const std::string result = std::uncaught_exceptions() > exceptions ? "failed" : "done";
      world.state_->connection()->post(detail::StoreOperation::set, std::vector{key}, std::vector{result});
    } catch (...) {  // there is no memory: the launcher or the timeout ends the local ranks
    }
}

}  // namespace lockstep::inline v0_1
