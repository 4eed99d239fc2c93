#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "lockstep/error.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/world/bulletin.hpp"
#include "lockstep/world/environment.hpp"
#include "lockstep/world/library_log.hpp"
#include "lockstep/world/rank_zero_scope.hpp"
#include "lockstep/world/store.hpp"
#include "lockstep/world/worker.hpp"

namespace lockstep {

/// Who this process is among all. A cheap value: copies share one connection to the store, opened when it is
/// first needed. All functions may be called from any thread; `store()` is one client, whose calls wait for
/// each other.
class World {
 public:
  /// Rank 0 of 1, with nobody to meet.
  World() : World(Environment{}) {}

  explicit World(Environment environment) : log(environment.rank), state_(std::make_shared<State>()) {
    state_->environment = std::move(environment);
    detail::known_exception_text = [](const std::exception& error) {
      const auto* known = dynamic_cast<const c10::Error*>(&error);
      return known ? std::string(known->what_without_backtrace()) : std::string();
    };
  }

  /// The world that torchrun's variables describe (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
  /// MASTER_ADDR, MASTER_PORT, set by a launcher or by hand; or LOCKSTEP_RENDEZVOUS=file:///path in place of
  /// the last two), or one process alone. From here on an exception that nobody catches is told to the other
  /// ranks and ends this process on one line. Throws UsageError.
  static World from_environment() {
    detail::end_on_uncaught();
    World world(read_environment());
    detail::process_rank = world.rank();
    if (world.size() > 1) world.announce_failures();
    return world;
  }

  /// The world of `size` ranks that meet at `url`: tcp://host:port, hosted by rank 0, or file:///path, a file
  /// that does not exist yet on a file system that all of them share. Throws UsageError.
  static World join(const std::string& url, int rank, int size) {
    if (size < 1) throw UsageError(fmt::format("the world size is {}: it must be at least 1", size));
    if (rank < 0 || rank >= size)
      throw UsageError(fmt::format("rank {} is out of range: with a world size of {} it must be in 0 to {}",
                                   rank, size, size - 1));
    parse_rendezvous(url);
    detail::end_on_uncaught();
    Environment environment;
    environment.rank = rank;
    environment.size = size;
    environment.rendezvous = url;
    World world(environment);
    detail::process_rank = rank;
    world.announce_failures();
    return world;
  }

  [[nodiscard]] int rank() const { return state_->environment.rank; }
  [[nodiscard]] int size() const { return state_->environment.size; }
  /// The rank among the processes of this host, and their number.
  [[nodiscard]] int local_rank() const { return state_->environment.local_rank; }
  [[nodiscard]] int local_size() const { return state_->environment.local_size; }
  [[nodiscard]] const Environment& environment() const { return state_->environment; }

  /// The key-value store in which the ranks meet. The first call connects, checks that the ranks agree on
  /// their number and that no two claim one rank. Throws RendezvousError.
  [[nodiscard]] StorePtr store() const { return meeting().store; }

  /// A connection to the same store of its own, for a thread that must not wait for this one. Throws
  /// RendezvousError.
  [[nodiscard]] StorePtr connect_again(std::chrono::milliseconds limit = std::chrono::seconds(10)) const {
    return meeting().again(limit);
  }

  /// Whether the store ends with this process, which should then be the last to leave.
  [[nodiscard]] bool hosts_store() const { return meeting().hosted_here; }

  /// Tells all ranks that this one has failed; returns whether it is the first to. Does not use `store()`, so
  /// that it also works while another thread waits there.
  bool publish_failure(const std::string& text) const {
    auto store = connect_again(std::chrono::seconds(1));
    const bool first = detail::to_text(store->compareSet(failure_key, {}, detail::to_bytes(text))) == text;
    detail::Bulletin(store, rank(), size()).ring_all();
    return first;
  }

  /// The text of the first failure, if any rank has published one; the other form asks through a connection
  /// of the caller's (see connect_again).
  [[nodiscard]] std::optional<std::string> published_failure() const {
    auto store = connect_again(std::chrono::seconds(1));
    return published_failure(*store);
  }
  [[nodiscard]] static std::optional<std::string> published_failure(c10d::Store& store) {
    if (!store.check({failure_key})) return std::nullopt;
    return detail::to_text(store.get(failure_key));
  }

  /// Whether a rank has come to the end of its program (`launch` says so for it).
  [[nodiscard]] static bool finished(c10d::Store& store, int rank) {
    return store.check({fmt::format("lockstep/finished/{}", rank)});
  }

  /// Says that this rank has come to its end, and where it hosts the store waits for the others to. `launch`
  /// calls it.
  void leave(int code = 0) const {
    {
      // A launcher that hosts the store for other hosts too waits for every rank's word.
      const auto& known = environment();
      const bool awaited =
          known.store_is_hosted && !known.store_outlives_attempts && known.local_size < known.size;
      std::lock_guard lock(state_->mutex);
      if (size() == 1 || (!state_->meeting && !awaited)) return;
    }
    try {
      auto side = connect_again(std::chrono::seconds(2));
      side->set(fmt::format("lockstep/finished/{}", rank()), detail::to_bytes(std::to_string(code)));
      if (!hosts_store() || code != 0) return;
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(5);
      for (int other = 0; other < size(); ++other)
        while (!finished(*side, other) && !published_failure(*side) &&
               std::chrono::steady_clock::now() < deadline)
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
    } catch (const std::exception&) {  // the others have gone with the store: nothing is left to say
    }
  }

  /// Runs `work` on global rank 0 only. A collective inside it throws at once instead of hanging.
  template <class Work>
  void rank_zero(Work&& work) const {
    if (rank() != 0) return;
    RankZeroScope scope;
    std::forward<Work>(work)();
  }

  /// Runs `work` on each rank, on the first of each host before the others there, which wait at most `limit`
  /// for it: what it downloads or unpacks is there for them. All local ranks must call it. Returns what
  /// `work` returns. Throws PeerError if the first rank failed, TimeoutError if it took too long.
  template <class Work>
  auto local_zero_first(Work&& work, std::chrono::milliseconds limit = std::chrono::minutes(30)) const {
    RankZeroScope scope;
    if (local_size() == 1) return std::forward<Work>(work)();
    const int first = rank() - local_rank();
    const auto key = fmt::format("lockstep/first/{}/{}", first, state_->rounds++);
    if (local_rank() > 0) {
      wait_for_first(first, key, limit);
      return std::forward<Work>(work)();
    }
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
  static constexpr const char* failure_key = "lockstep/failure";

  struct State {
    Environment environment;
    std::mutex mutex;
    std::optional<detail::Meeting> meeting;
    std::atomic<int> rounds{0};
  };

  // Tells the local ranks how it went, also when the work throws.
  struct Outcome {
    const World& world;
    const std::string& key;
    bool good = false;
    ~Outcome() {
      try {
        world.store()->set(key, detail::to_bytes(good ? "done" : "failed"));
      } catch (...) {  // the launcher or the deadline ends them then
      }
    }
  };

  const detail::Meeting& meeting() const {
    std::lock_guard lock(state_->mutex);
    return meeting_within({});
  }

  const detail::Meeting& meeting_within(std::optional<std::chrono::milliseconds> limit) const {
    if (!state_->meeting) {
      auto meeting = detail::meet(state_->environment, limit ? *limit : detail::rendezvous_timeout());
      if (size() > 1)
        detail::at_store("the ranks could not sign in",
                         [&] { detail::sign_in(*meeting.store, state_->environment); });
      state_->meeting = std::move(meeting);
    }
    return *state_->meeting;
  }

  void announce_failures() const {
    detail::quiet_library_log();
    detail::failure_hooks.publish = [world = *this](const std::string& text) {
      bool met = true;
      {
        std::unique_lock lock(world.state_->mutex, std::try_to_lock);
        if (!lock) return true;
        if (!world.state_->meeting) {
          // The others may be waiting for this rank already. Signing in refuses a store of another run.
          if (!world.others_may_wait()) return true;
          world.meeting_within(std::chrono::seconds(1));
          met = false;
        }
      }
      const bool first = world.publish_failure(text);
      // The store goes with this process: leave the others a moment to read it.
      if (world.hosts_store()) std::this_thread::sleep_for(std::chrono::milliseconds(800));
      return first || !met;
    };
  }

  // Whether nobody but this rank, before it has met the others, can tell them that it fails.
  [[nodiscard]] bool others_may_wait() const {
    const auto& known = environment();
    const bool launched_here = detail::report_descriptor() >= 0 && known.local_size == known.size;
    if (known.rendezvous.empty() || known.store_outlives_attempts || launched_here) return false;
    // A file that this rank alone would make is in the way of the next run.
    const auto url = parse_rendezvous(known.rendezvous);
    return url.path.empty() || access(url.path.c_str(), F_OK) == 0;
  }

  void wait_for_first(int first, const std::string& key, std::chrono::milliseconds limit) const {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    auto side = connect_again();
    auto pause = std::chrono::milliseconds(1);
    while (!side->check({key})) {
      if (const auto failure = published_failure(*side)) throw PeerError(*failure);
      if (std::chrono::steady_clock::now() > deadline)
        throw TimeoutError(
            fmt::format("rank {}, the first on this host, has not finished its local_zero_first after {} s",
                        first, std::chrono::duration<double>(limit).count()));
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::milliseconds(100));
    }
    if (detail::to_text(side->get(key)) != "done") {
      if (const auto failure = published_failure(*side)) throw PeerError(*failure);
      throw PeerError(fmt::format("rank {}, the first on this host, failed in local_zero_first", first));
    }
  }

  std::shared_ptr<State> state_;
};

}  // namespace lockstep
