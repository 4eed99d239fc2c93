#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/world/detail/run_summary.hpp"
#include "lockstep/world/detail/store.hpp"
#include "lockstep/world/detail/store_keys.hpp"
#include "lockstep/world/detail/thread_share.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/detail/worker.hpp"
#include "lockstep/world/environment.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// Prints each TORCH_WARN on one line.
struct PlainWarnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    const std::string line = "warning: " + warning.msg() + "\n";
    std::fwrite(line.data(), 1, line.size(), stderr);
  }
};

/// Stops c10d from logging a stack trace for each connection that ends with a store: lockstep's own error
/// explains it. TORCH_WARN of the calling thread is still printed. No-op if TORCH_CPP_LOG_LEVEL is set.
LOCKSTEP_PROCESS_WIDE inline void quiet_library_log() {
  if (process_variable("TORCH_CPP_LOG_LEVEL")) return;
  constexpr int error = 2;  // its name differs between versions of LibTorch, and with glog
  FLAGS_caffe2_log_level = std::max<int>(FLAGS_caffe2_log_level, error);
  static PlainWarnings warnings;
  c10::WarningUtils::set_warning_handler(&warnings);
}

/// Sets the number of LibTorch's threads. `given` names what has determined it, unless it is a share.
inline void set_threads(const WorldOptions& options, const Environment& environment, const char* given) {
  std::optional<ThreadShare> chosen;
  if (options.threads > 0) chosen = {options.threads, given};
  if (options.threads == WorldOptions::share) chosen = launched_threads(environment);
  if (!chosen) return;
  at::set_num_threads(chosen->threads);
  shared_threads = chosen->threads;
  shared_threads_source = chosen->source;
}

/// Returns what is left of `timeout`, which began at `begin`; at least 1 ms.
inline std::chrono::milliseconds left_of(std::chrono::milliseconds timeout,
                                         std::chrono::steady_clock::time_point begin) {
  const auto spent = std::chrono::floor<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
  return std::max(timeout - spent, std::chrono::milliseconds(1));
}

}  // namespace lockstep::detail

namespace lockstep {

struct World::State {
  Environment environment;
  const pid_t owner = getpid();  // a forked child speaks for nobody
  std::mutex mutex;
  std::optional<detail::Rendezvous> rendezvous;
  // Valid once all ranks have joined: written before `complete` is set, and never again.
  std::mutex joining;
  std::atomic<bool> complete{false};
  LocalPlace local;
  bool single_host = true;
  std::string address;
  std::atomic<bool> left{false};          // leave() has marked this rank as finished
  std::atomic<bool> communicates{false};  // this rank has made a communicator

  ~State() {  // a forked child may have copied the server in the middle of a change
    if (rendezvous && getpid() != owner) static_cast<void>(new detail::Rendezvous(std::move(*rendezvous)));
  }
};

LOCKSTEP_INLINE World::World() : World(Environment{}) {}

LOCKSTEP_INLINE World::World(Environment environment)
    : log(environment.rank), state_(std::make_shared<State>()) {
  state_->environment = std::move(environment);
  detail::known_exception_text = [](const std::exception& error) {
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    return known ? std::string(known->what_without_backtrace()) : std::string();
  };
}

LOCKSTEP_INLINE World World::from_environment(const WorldOptions& options) {
  return detail::world_from(process_variable, options, false);
}

LOCKSTEP_INLINE World detail::world_from(const Variables& variables, const WorldOptions& options,
                                         bool launched) {
  require_level(variables);
  World world(read_environment(variables));
  process_rank = world.rank();
  set_threads(options, world.state_->environment, launched ? "--threads" : "the program");
  if (world.size() == 1) {
    // A launcher's only rank.
    const auto& alone = world.state_->environment;
    static std::once_flag announced;
    if (!alone.launcher.empty() && world.log.should_log(Level::info))
      std::call_once(announced, [&] { write_run_summary(alone, {own_identity({}, alone)}); });
    return world;
  }
  // A process joins once per rank and run: all its Worlds share the store, which rank 0 may host.
  static std::mutex mutex;
  // The connection of a process that exits says that this rank takes no further part.
  static std::map<std::string, std::shared_ptr<World::State>> joined;
  const auto& known = world.state_->environment;
  const std::lock_guard lock(mutex);
  auto& state = joined[formatted("{} {} {}", known.rendezvous, known.rank, known.size)];
  if (!state) state = world.state_;
  world.state_ = state;
  if (launched) world.announce_failures();
  return world;
}

LOCKSTEP_INLINE World World::join(const std::string& url, int rank, int size, const WorldOptions& options) {
  if (size < 1) throw UsageError(detail::formatted("the world size is {}: it must be at least 1", size));
  if (rank < 0 || rank >= size)
    throw UsageError(detail::formatted(
        "rank {} is out of range: with a world size of {} it must be in 0 to {}", rank, size, size - 1));
  parse_rendezvous(url);
  detail::require_level(process_variable);
  Environment environment;
  environment.rank = rank;
  environment.size = size;
  environment.rendezvous = url;
  environment.rendezvous_origin = {"the URL given to World::join", "give World::join", "give World::join"};
  environment.store_secret = read_store_secret();
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
  return local_place().rank;
}

LOCKSTEP_INLINE int World::local_size() const {
  return local_place().size;
}

LOCKSTEP_INLINE Environment World::environment() const {
  auto environment = state_->environment;
  if (state_->complete.load(std::memory_order_acquire)) {
    environment.local_rank = state_->local.rank;
    environment.local_size = state_->local.size;
  }
  return environment;
}

LOCKSTEP_INLINE bool World::single_host() const {
  await_all();
  return state_->single_host;
}

LOCKSTEP_INLINE std::string World::address_to_others() const {
  await_all();
  return state_->address;
}

LOCKSTEP_INLINE detail::StorePtr World::store() const {
  await_all();
  return rendezvous().store;
}

LOCKSTEP_INLINE detail::StorePtr World::connect_again(std::chrono::milliseconds timeout) const {
  return rendezvous().again(timeout);
}

LOCKSTEP_INLINE std::shared_ptr<detail::StoreConnection> World::connection() const {
  return rendezvous().connection;
}

LOCKSTEP_INLINE bool World::hosts_store() const {
  return rendezvous().hosted_here;
}

LOCKSTEP_INLINE void World::leave(int code) const {
  {
    // A launcher that hosts the store for several hosts waits for every rank to finish.
    const auto& known = state_->environment;
    const bool awaited =
        known.store_is_hosted && !known.store_outlives_attempts && known.local_size < known.size;
    if (size() == 1 || getpid() != state_->owner) return;
    announce_exit_code(code);
    std::unique_lock lock(state_->mutex, std::try_to_lock);
    if (!lock && code != 0) return;  // announce_exit_code still connects
    if (!lock) lock.lock();
    if (!state_->rendezvous && !awaited) {
      state_->left = true;
      return;
    }
  }
  try {
    const auto& joined = rendezvous();
    detail::RunClient(*joined.connection, detail::last_request_timeout)
        .publish({.kind = detail::Event::ended, .rank = rank(), .failure = {.code = code}});
    state_->left = true;
    if (code != 0 || !hosts_store()) return;

    detail::outlive_ranks(*joined.connection, size(), true);
  } catch (const std::exception&) {  // the store has ended, and the other ranks with it
  }
}

LOCKSTEP_INLINE void World::announce_exit_code(int code) const {
  if (code == 0 || state_->communicates || state_->left || detail::report_descriptor() >= 0) return;
  detail::at_most(
      detail::publish_limit,
      [world = *this, failure = Failure{.kind = FailureKind::died,
                                        .rank = rank(),
                                        .code = code,
                                        .message = detail::formatted("ended with exit code {} on {}", code,
                                                                     detail::host_name())}] {
        static_cast<void>(world.publish_to_waiting(failure));
      });
}

LOCKSTEP_INLINE bool World::begin_communicating() const {
  return !state_->communicates.exchange(true);
}

LOCKSTEP_INLINE World::Outcome::~Outcome() {
  if (getpid() == world.state_->owner) try {
      world.connect_again()->set(key, detail::to_bytes(good ? "done" : "failed"));
    } catch (...) {  // the launcher or the timeout ends the local ranks
    }
}

LOCKSTEP_INLINE const detail::Rendezvous& World::rendezvous() const {
  std::lock_guard lock(state_->mutex);
  return rendezvous_within({});
}

LOCKSTEP_INLINE const detail::Rendezvous& World::rendezvous_within(
    std::optional<std::chrono::milliseconds> given) const {
  if (!state_->rendezvous) {
    const auto timeout = given ? *given : detail::rendezvous_timeout();
    const auto begin = std::chrono::steady_clock::now();
    auto joined = detail::join_rendezvous(
        state_->environment, timeout,
        [notify = waiting_notice(timeout)](const std::string& what) { notify([&] { return what; }); });
    if (size() > 1)
      detail::at_store("the ranks could not sign in", [&] {
        try {
          detail::join_run({*joined.connection, detail::left_of(timeout, begin)}, state_->environment,
                           joined.address, !given);
        } catch (const RendezvousError&) {
          // The store ends with this process: give the other ranks time to read the reason.
          if (joined.hosted_here) std::this_thread::sleep_for(detail::reading_grace);
          throw;
        }
      });
    state_->rendezvous = std::move(joined);
  }
  return *state_->rendezvous;
}

LOCKSTEP_INLINE std::function<void(const std::function<std::string()>&)> World::waiting_notice(
    std::chrono::milliseconds timeout) const {
  return [begin = std::chrono::steady_clock::now(), next = detail::first_notice, timeout, log = log.all(),
          prints = state_->environment.local_rank == 0](const detail::LazyText& what) mutable {
    const auto now = std::chrono::ceil<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
    if (!prints || now < next || now >= timeout) return;
    next = now + detail::notice_interval;
    log.warning("waiting for {}; gives up in {} s (LOCKSTEP_RENDEZVOUS_TIMEOUT)", what(),
                std::chrono::ceil<std::chrono::seconds>(timeout - now).count());
  };
}

LOCKSTEP_INLINE void World::await_all() const {
  if (state_->complete.load(std::memory_order_acquire)) return;
  const auto begin = std::chrono::steady_clock::now();
  const auto timeout = detail::rendezvous_timeout();
  const auto notify = waiting_notice(timeout);
  const auto& joined = rendezvous();
  const std::lock_guard lock(state_->joining);
  if (state_->complete.load(std::memory_order_acquire)) return;
  const auto& known = state_->environment;
  state_->local = {known.local_rank, known.local_size, known.rank - known.local_rank};
  if (size() > 1) {
    const auto waiting = [&](const detail::LazyText& who) {
      if (!joined.doubt.empty()) detail::refuse_other_rank_zero(known, joined.address);
      notify(who);
    };
    const char* call = detail::served_call.name;
    const auto outcome =
        detail::await_ranks(*joined.connection, size(), begin + timeout, timeout, joined.doubt, waiting,
                            rank(), {.operation = detail::rendezvous, .served = call ? call : ""});
    state_->single_host = !outcome.several_hosts;
    detail::at_store("the rendezvous failed", [&] {
      place_ranks(joined);
      if (rank() == 0 && log.should_log(Level::info))
        detail::write_run_summary(known, detail::identities(*joined.connection));
    });
  }
  state_->complete.store(true, std::memory_order_release);
}

LOCKSTEP_INLINE void World::place_ranks(const detail::Rendezvous& joined) const {
  State& state = *state_;
  state.address = joined.address;
  const bool numbered = state.environment.launched;
  if (numbered && (state.single_host || !state.address.empty())) return;
  const auto ranks = detail::identities(*joined.connection);
  const auto& own = ranks[static_cast<std::size_t>(rank())].host;
  LocalPlace local{0, 0, -1};
  for (int other = 0; other < size(); ++other) {
    const auto& identity = ranks[static_cast<std::size_t>(other)];
    if (identity.host == own) {
      if (local.first < 0) local.first = other;
      if (other < rank()) ++local.rank;
      ++local.size;
    } else if (state.address.empty() && !identity.address.empty()) {
      // The store's host may know itself by its loopback address only: ask for the route to another host.
      // Two hosts may each have a bridge of one address, which leads to neither.
      const auto source = detail::source_address_towards(identity.address);
      if (source != identity.address) state.address = source;
    }
  }
  if (state.address.empty()) state.address = joined.address;
  if (!numbered) state.local = local;
}

LOCKSTEP_INLINE World::LocalPlace World::local_place() const {
  const auto& known = state_->environment;
  if (known.launched || known.size == 1)
    return {known.local_rank, known.local_size, known.rank - known.local_rank};
  await_all();
  return state_->local;
}

LOCKSTEP_INLINE bool World::publish_to_waiting(const Failure& failure) const {
  if (getpid() != state_->owner) return true;
  bool joined = true;
  {
    std::unique_lock lock(state_->mutex, std::try_to_lock);
    if (!lock) return true;
    if (!state_->rendezvous) {
      // Other ranks may already wait for this one. Joining refuses a store of another run.
      if (!others_may_wait()) return true;
      rendezvous_within(detail::last_request_timeout);
      joined = false;
    }
  }
  const bool first = detail::RunClient(*connection(), detail::last_request_timeout)
                         .publish({.kind = detail::Event::failed, .failure = failure});
  // The store ends with this process: give the other ranks time to read the failure.
  if (hosts_store()) std::this_thread::sleep_for(detail::reading_grace);
  return first || !joined;
}

LOCKSTEP_INLINE void World::announce_failures() const {
  detail::quiet_library_log();
  detail::failure_hooks.publish = [world = *this](const Failure& failure) {
    return world.publish_to_waiting(failure);
  };
  detail::failure_hooks.exits = [world = *this](int code) {
    world.announce_exit_code(code);
    const auto& state = world.state_;
    std::unique_lock lock(state->mutex, std::try_to_lock);
    if (!lock || !state->rendezvous) return;
    auto& connection = *state->rendezvous->connection;
    if (!state->left)
      detail::RunClient(connection, detail::last_request_timeout)
          .publish({.kind = detail::Event::ended, .rank = world.rank(), .failure = {.code = code}});
    if (code != 0 || !state->rendezvous->hosted_here) return;
    if (const int mismatch = detail::code_of_mismatch(connection)) _exit(mismatch);
  };
  detail::announce_exit();
  detail::announce_signals(detail::host_name());
}

LOCKSTEP_INLINE bool World::launched_here() const {
  const auto& known = state_->environment;
  return detail::report_descriptor() >= 0 && known.local_size == known.size;
}

LOCKSTEP_INLINE bool World::others_may_wait() const {
  const auto& known = state_->environment;
  return !known.rendezvous.empty() && !known.store_outlives_attempts && !launched_here();
}

LOCKSTEP_INLINE std::string World::enter_local_zero_first(const LocalPlace& place,
                                                          std::chrono::milliseconds timeout) const {
  // The store counts the calls, so that two Worlds of this process never use the same key. Connecting here
  // joins the rendezvous, however long the first rank's work takes afterwards.
  auto side = connect_again();
  const auto call = detail::at_store(
      "local_zero_first", [&] { return side->add(detail::store_keys::local_zero_first_calls(rank()), 1); });
  const auto& known = state_->environment;
  const bool numbered = !known.launched || known.consecutive;  // else the first rank's number is unknown
  const std::string key = detail::store_keys::local_zero_first(
      numbered ? std::to_string(place.first) : detail::host_identity(), call);
  if (place.rank > 0)
    wait_for_first(numbered ? detail::formatted("rank {}", place.first) : "local rank 0",
                   numbered ? place.first : -1, key, timeout);
  return key;
}

LOCKSTEP_INLINE void World::wait_for_first(const std::string& first, int number, const std::string& key,
                                           std::chrono::milliseconds timeout) const try {
  const auto begin = std::chrono::steady_clock::now();
  const auto side = connect_again();
  const auto throw_if_failed = [&] {
    std::optional<Failure> failure;
    bool ended = false;
    try {
      detail::RunClient run(*connection(), detail::request_timeout);
      failure = run.summary().failure;
      ended = number >= 0 && run.members({number}).at(0).exit_code && !side->check({key});
    } catch (const detail::StoreError&) {  // the next call on the store says so
    }
    if (failure) throw PeerError(detail::consequence_of(*failure, rank(), {}));
    if (ended)
      throw PeerError(detail::formatted("{}, the first on this host, has ended in local_zero_first", first));
  };
  while (!detail::appear_within(
      *side, {key},
      std::min<std::chrono::milliseconds>(detail::left_of(timeout, begin), detail::news_timeout))) {
    throw_if_failed();
    if (std::chrono::steady_clock::now() > begin + timeout)
      throw TimeoutError(
          detail::formatted("{}, the first on this host, has not finished its local_zero_first after {} s",
                            first, std::chrono::duration<double>(timeout).count()));
  }
  if (detail::to_text(side->get(key)) != "done") {
    throw_if_failed();
    throw PeerError(detail::formatted("{}, the first on this host, failed in local_zero_first", first));
  }
} catch (const c10::DistStoreError&) {
  throw TimeoutError(
      detail::formatted("the store does not answer, so that this rank cannot learn whether {}, "
                        "the first on this host, has finished its local_zero_first",
                        first));
} catch (const c10::Error&) {
  throw PeerError(
      detail::formatted("the store is gone, and with it the process that hosts it, before {}, the "
                        "first on this host, has finished its local_zero_first",
                        first));
}

}  // namespace lockstep
