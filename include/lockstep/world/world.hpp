#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/process_wide.hpp"
#include "lockstep/error.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/world/detail/library_log.hpp"
#include "lockstep/world/detail/store.hpp"
#include "lockstep/world/detail/store_mailbox.hpp"
#include "lockstep/world/detail/worker.hpp"
#include "lockstep/world/environment.hpp"
#include "lockstep/world/rank_zero_scope.hpp"

namespace lockstep {

/// This process's place among all ranks of the run. A cheap value: copies share one connection to the store,
/// opened at first use. Thread-safe. `store()` is one client, so that concurrent calls on it are serialized.
class World {
 public:
  /// Constructs the world of a single process: rank 0 of 1, without a rendezvous.
  World() : World(Environment{}) {}

  explicit World(Environment environment) : log(environment.rank), state_(std::make_shared<State>()) {
    state_->environment = std::move(environment);
    detail::known_exception_text = [](const std::exception& error) {
      const auto* known = dynamic_cast<const c10::Error*>(&error);
      return known ? std::string(known->what_without_backtrace()) : std::string();
    };
  }

  /// Returns the world that torchrun's variables describe, or a single process if they are unset. The
  /// variables are RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, set by a
  /// launcher or by hand; LOCKSTEP_RENDEZVOUS=file:///path replaces the last two. All calls with one rank and
  /// rendezvous return copies of one World. From this call on, an uncaught exception is reported to the other
  /// ranks and ends this process with one line. Throws UsageError for inconsistent variables.
  LOCKSTEP_PROCESS_WIDE static World from_environment() {
    detail::end_on_uncaught();
    detail::end_with_agent();
    World world(read_environment());
    detail::process_rank = world.rank();
    if (world.size() == 1) return world;
    // A process joins once per rank and run: all its Worlds share the store, which rank 0 may host.
    static std::mutex mutex;
    static auto& joined = *new std::map<std::string, std::shared_ptr<State>>();
    const auto& known = world.state_->environment;
    const std::lock_guard lock(mutex);
    auto& state = joined[detail::formatted("{} {} {}", known.rendezvous, known.rank, known.size)];
    if (state) {
      world.state_ = state;
    } else {
      state = world.state_;
      world.announce_failures();
    }
    return world;
  }

  /// Returns the world of `size` ranks that rendezvous at `url`: tcp://host:port, hosted by rank 0, or
  /// file:///path, a file that does not exist yet on a file system shared by all ranks. Throws UsageError for
  /// an invalid argument.
  /// Counterpart: torch.distributed.init_process_group with init_method.
  static World join(const std::string& url, int rank, int size) {
    if (size < 1) throw UsageError(detail::formatted("the world size is {}: it must be at least 1", size));
    if (rank < 0 || rank >= size)
      throw UsageError(detail::formatted(
          "rank {} is out of range: with a world size of {} it must be in 0 to {}", rank, size, size - 1));
    parse_rendezvous(url);
    detail::end_on_uncaught();
    detail::end_with_agent();
    Environment environment;
    environment.rank = rank;
    environment.size = size;
    environment.rendezvous = url;
    environment.store_secret = read_store_secret();
    World world(environment);
    detail::process_rank = rank;
    world.announce_failures();
    return world;
  }

  [[nodiscard]] int rank() const { return state_->environment.rank; }
  [[nodiscard]] int size() const { return state_->environment.size; }
  /// The rank among the processes of this host, and their number. Without a launcher's LOCAL_RANK, the first
  /// call blocks until all ranks have joined, as `store` does.
  [[nodiscard]] int local_rank() const { return local_place().rank; }
  [[nodiscard]] int local_size() const { return local_place().size; }
  /// Returns the environment. Without LOCAL_RANK, its local rank and size are valid once all ranks have
  /// joined.
  [[nodiscard]] Environment environment() const {
    auto environment = state_->environment;
    if (state_->complete.load(std::memory_order_acquire)) {
      environment.local_rank = state_->local.rank;
      environment.local_size = state_->local.size;
    }
    return environment;
  }

  /// Returns whether all ranks run on this host. Blocks until all ranks have joined, as `store` does.
  [[nodiscard]] bool single_host() const {
    await_all();
    return state_->single_host;
  }
  /// Returns the address by which this host reaches the others, empty if there is none or it is unknown.
  /// Blocks until all ranks have joined, as `store` does.
  [[nodiscard]] std::string address_to_others() const {
    await_all();
    return state_->address;
  }

  /// Returns the key-value store of the rendezvous. Collective: the first call blocks until every rank has
  /// joined, at most LOCKSTEP_RENDEZVOUS_TIMEOUT seconds (default: 300) from the start of the connection. The
  /// same timeout applies to each call on the store. Throws RendezvousError that names missing ranks, ranks
  /// that disagree on the world size, or two processes with one rank; PeerError if a rank fails meanwhile.
  /// Counterpart: torch.distributed.Store.
  [[nodiscard]] detail::StorePtr store() const {
    await_all();
    return meeting().store;
  }

  /// Opens a second, independent connection to the store, for a thread that must not block on the first one.
  /// The connection and each call on it time out after `limit`. Does not wait for other ranks to join. Throws
  /// RendezvousError.
  [[nodiscard]] detail::StorePtr connect_again(
      std::chrono::milliseconds limit = std::chrono::seconds(10)) const {
    return meeting().again(limit);
  }

  /// Returns whether this process hosts the store, so that it should leave last.
  [[nodiscard]] bool hosts_store() const { return meeting().hosted_here; }

  /// Reports this rank's failure to all ranks. Returns whether it is the first failure. Does not use
  /// `store()`, so that it works while another thread blocks there.
  bool publish_failure(const std::string& text) const {
    return publish_failure(connect_again(std::chrono::seconds(1)), rank(), size(), text);
  }
  /// Does the same through the caller's connection.
  static bool publish_failure(const detail::StorePtr& store, int rank, int size, const std::string& text) {
    const bool first = detail::record_failure(*store, text);
    detail::StoreMailbox(store, rank, size).notify_all_ranks();
    return first;
  }

  /// Returns the text of the first failure that a rank has published, if any. The overload uses the caller's
  /// connection (see connect_again).
  [[nodiscard]] std::optional<std::string> published_failure() const {
    auto store = connect_again(std::chrono::seconds(1));
    return published_failure(*store);
  }
  [[nodiscard]] static std::optional<std::string> published_failure(c10d::Store& store) {
    return detail::published_failure(store);
  }

  /// The key that a rank sets at the end of its program.
  static std::string finished_key(int rank) { return detail::formatted("lockstep/finished/{}", rank); }
  /// Returns whether a rank has reached the end of its program (`launch` sets the key).
  [[nodiscard]] static bool finished(c10d::Store& store, int rank) {
    return store.check({finished_key(rank)});
  }

  /// Marks this rank as finished. If it hosts the store and `code` is 0, blocks until every rank has finished
  /// or one has failed, at most 5 minutes. Called by `launch`.
  void leave(int code = 0) const {
    {
      // A launcher that hosts the store for several hosts waits for every rank to finish.
      const auto& known = state_->environment;
      const bool awaited =
          known.store_is_hosted && !known.store_outlives_attempts && known.local_size < known.size;
      std::lock_guard lock(state_->mutex);
      if (size() == 1 || (!state_->meeting && !awaited)) return;
    }
    try {
      auto side = connect_again(std::chrono::seconds(2));
      side->set(finished_key(rank()), detail::to_bytes(std::to_string(code)));
      state_->left = true;
      if (!hosts_store() || code != 0) return;
      std::vector<std::string> others;
      for (int other = 0; other < size(); ++other) others.push_back(finished_key(other));
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(5);
      while (!detail::appear_within(*side, others, std::chrono::seconds(1)) && !published_failure(*side) &&
             std::chrono::steady_clock::now() < deadline) {
      }
    } catch (const std::exception&) {  // the store has ended, and the other ranks with it
    }
  }

  /// Runs `work` on world rank 0 only. A collective inside `work` throws CommunicationError at once.
  template <class Work>
  void rank_zero(Work&& work) const {
    if (rank() != 0) return;
    RankZeroScope scope;
    std::forward<Work>(work)();
  }

  /// Runs `work` on every rank, first on the first rank of each host, then on the other ranks there, which
  /// wait at most `limit`. They can use what the first one downloads or unpacks. All local ranks must call
  /// it; without a launcher's LOCAL_RANK, all ranks must. Returns the result of `work`. Throws PeerError if
  /// the first rank failed, TimeoutError if the wait exceeds `limit`. A collective inside `work` throws
  /// CommunicationError.
  template <class Work>
  auto local_zero_first(Work&& work, std::chrono::milliseconds limit = std::chrono::minutes(30)) const {
    RankZeroScope scope;
    const LocalPlace place = local_place();
    if (place.size == 1) return std::forward<Work>(work)();
    std::string key;
    {
      // The store counts the calls, so that two Worlds of this process never use the same key. Connecting
      // here joins the rendezvous, however long `work` takes afterwards.
      auto side = connect_again();
      const auto call = detail::at_store("local_zero_first", [&] {
        return side->add(detail::formatted("lockstep/first/calls/{}", rank()), 1);
      });
      key = detail::formatted("lockstep/first/{}/{}", place.first, call);
      if (place.rank > 0) wait_for_first(*side, place.first, key, limit);
    }
    if (place.rank > 0) return std::forward<Work>(work)();
    Outcome outcome{*this, key};
    if constexpr (std::is_void_v<std::invoke_result_t<Work>>) {
      std::forward<Work>(work)();
      outcome.good = true;
    } else {
      auto result = std::forward<Work>(work)();
      outcome.good = true;
      return result;
    }
  }

  Log log;

 private:
  // This rank's place on its host. `first` is the world rank of the host's first rank.
  struct LocalPlace {
    int rank = 0, size = 1, first = 0;
  };

  struct State {
    Environment environment;
    std::mutex mutex;
    std::optional<detail::Meeting> meeting;
    // Valid once all ranks have joined: written before `complete` is set, and never again.
    std::mutex joining;
    std::atomic<bool> complete{false};
    LocalPlace local;
    bool single_host = true;
    std::string address;
    std::atomic<bool> left{false};  // leave() has marked this rank as finished
  };

  // Reports the outcome of `work` to the local ranks, also if it throws.
  struct Outcome {
    const World& world;
    const std::string& key;
    bool good = false;
    ~Outcome() {
      try {
        world.connect_again()->set(key, detail::to_bytes(good ? "done" : "failed"));
      } catch (...) {  // the launcher or the timeout ends the local ranks
      }
    }
  };

  const detail::Meeting& meeting() const {
    std::lock_guard lock(state_->mutex);
    return meeting_within({});
  }

  // `given` overrides the rendezvous timeout when only a failure is reported.
  const detail::Meeting& meeting_within(std::optional<std::chrono::milliseconds> given) const {
    if (!state_->meeting) {
      const auto limit = given ? *given : detail::rendezvous_timeout();
      const auto begin = std::chrono::steady_clock::now();
      auto meeting =
          detail::meet(state_->environment, limit, [notify = waiting_notice()](const std::string& reason) {
            notify("the store of rank 0: " + reason);
          });
      if (size() > 1)
        detail::at_store("the ranks could not sign in", [&] {
          meeting.store->setTimeout(left_of(limit, begin));
          detail::sign_in(*meeting.store, state_->environment, meeting.address, !given);
          meeting.store->setTimeout(limit);
        });
      state_->meeting = std::move(meeting);
    }
    return *state_->meeting;
  }

  static std::chrono::milliseconds left_of(std::chrono::milliseconds limit,
                                           std::chrono::steady_clock::time_point begin) {
    const auto spent =
        std::chrono::floor<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
    return std::max(limit - spent, std::chrono::milliseconds(1));
  }

  // Logs what is waited for, after 10 s and then every minute, on one rank per host.
  [[nodiscard]] detail::StoreConnection::Waiting waiting_notice() const {
    return [next = std::chrono::steady_clock::now() + std::chrono::seconds(10), log = log.all(),
            speaks = state_->environment.local_rank == 0](const std::string& what) mutable {
      const auto now = std::chrono::steady_clock::now();
      if (!speaks || now < next) return;
      next = now + std::chrono::minutes(1);
      log.warning("waiting for {}", what);
    };
  }

  // Blocks until every rank has joined.
  void await_all() const {
    if (state_->complete.load(std::memory_order_acquire)) return;
    const auto begin = std::chrono::steady_clock::now();
    const auto notify = waiting_notice();
    const auto& met = meeting();
    const std::lock_guard lock(state_->joining);
    if (state_->complete.load(std::memory_order_acquire)) return;
    const auto& known = state_->environment;
    state_->local = {known.local_rank, known.local_size, known.rank - known.local_rank};
    if (size() > 1) {
      const auto limit = detail::rendezvous_timeout();
      auto side = met.again(std::min<std::chrono::milliseconds>(limit, std::chrono::seconds(5)));
      detail::await_ranks(*side, size(), begin + limit, limit, met.doubt, notify);
      detail::at_store("the ranks could not meet", [&] { place_ranks(*side, met); });
    }
    state_->complete.store(true, std::memory_order_release);
  }

  // Finds the ranks that share this host, unless a launcher has numbered them, and the address by which this
  // host reaches the others.
  void place_ranks(c10d::Store& side, const detail::Meeting& met) const {
    State& state = *state_;
    state.single_host = !side.check({detail::SignInKeys::several_hosts});
    if (!met.guessed) state.address = met.address;
    const bool numbered = state.environment.launched;
    if (numbered && (state.single_host || !state.address.empty())) return;
    const auto ranks = detail::identities(side, size());
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
    if (state.address.empty()) state.address = met.address;
    if (!numbered) state.local = local;
  }

  [[nodiscard]] LocalPlace local_place() const {
    const auto& known = state_->environment;
    if (known.launched || known.size == 1)
      return {known.local_rank, known.local_size, known.rank - known.local_rank};
    await_all();
    return state_->local;
  }

  void announce_failures() const {
    detail::quiet_library_log();
    detail::failure_hooks.publish = [world = *this](const std::string& text) {
      bool met = true;
      {
        std::unique_lock lock(world.state_->mutex, std::try_to_lock);
        if (!lock) return true;
        if (!world.state_->meeting) {
          // Other ranks may already wait for this one. Joining refuses a store of another run.
          if (!world.others_may_wait()) return true;
          world.meeting_within(std::chrono::seconds(1));
          met = false;
        }
      }
      const bool first = world.publish_failure(text);
      // The store ends with this process: give the other ranks time to read the failure.
      if (world.hosts_store()) std::this_thread::sleep_for(std::chrono::milliseconds(800));
      return first || !met;
    };
    detail::failure_hooks.exits = [state = state_](int code) {
      std::unique_lock lock(state->mutex, std::try_to_lock);
      if (!lock || !state->meeting || state->left) return;
      state->meeting->store->set(finished_key(state->environment.rank),
                                 detail::to_bytes(std::to_string(code)));
    };
    detail::failure_hooks.end_of = [world = *this](int other) -> std::optional<int> {
      const auto& known = world.state_->environment;
      const bool in_launcher = known.store_is_hosted && !known.store_outlives_attempts;
      if (other < 0 || world.launched_here()) return std::nullopt;  // the launcher sees the exit itself
      if (other == 0 && !in_launcher) return std::nullopt;          // the store has ended with rank 0
      auto side = world.connect_again(std::chrono::milliseconds(400));
      if (!finished(*side, other)) return std::nullopt;
      return detail::whole_number(detail::to_text(side->get(finished_key(other))));
    };
    detail::announce_exit();
    detail::announce_sigterm(detail::host_name());
  }

  // Whether one launcher has started all ranks, and so sees how each of them ends.
  [[nodiscard]] bool launched_here() const {
    const auto& known = state_->environment;
    return detail::report_descriptor() >= 0 && known.local_size == known.size;
  }

  // Whether only this rank, before it joins, can report its failure to the other ranks.
  [[nodiscard]] bool others_may_wait() const {
    const auto& known = state_->environment;
    if (known.rendezvous.empty() || known.store_outlives_attempts || launched_here()) return false;
    // Do not create the file: it would block the next run.
    const auto url = parse_rendezvous(known.rendezvous);
    return url.path.empty() || access(url.path.c_str(), F_OK) == 0;
  }

  static void wait_for_first(c10d::Store& side, int first, const std::string& key,
                             std::chrono::milliseconds limit) try {
    const auto begin = std::chrono::steady_clock::now();
    while (!detail::appear_within(
        side, {key},
        std::min<std::chrono::milliseconds>(left_of(limit, begin), std::chrono::milliseconds(500)))) {
      if (const auto failure = published_failure(side))
        throw PeerError(detail::Failure::parse(*failure).sentence());
      if (std::chrono::steady_clock::now() > begin + limit)
        throw TimeoutError(detail::formatted(
            "rank {}, the first on this host, has not finished its local_zero_first after {} s", first,
            std::chrono::duration<double>(limit).count()));
    }
    if (detail::to_text(side.get(key)) != "done") {
      if (const auto failure = published_failure(side))
        throw PeerError(detail::Failure::parse(*failure).sentence());
      throw PeerError(
          detail::formatted("rank {}, the first on this host, failed in local_zero_first", first));
    }
  } catch (const c10::DistStoreError&) {
    throw TimeoutError(
        detail::formatted("the store does not answer, so that this rank cannot learn whether rank {}, "
                          "the first on this host, has finished its local_zero_first",
                          first));
  } catch (const c10::Error&) {
    throw PeerError(
        detail::formatted("the store is gone, and with it the process that hosts it, before rank {}, the "
                          "first on this host, has finished its local_zero_first",
                          first));
  }

  std::shared_ptr<State> state_;
};

}  // namespace lockstep
