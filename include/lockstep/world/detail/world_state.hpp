#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/at_most.hpp"
#include "lockstep/error.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/fail_process.hpp"
#include "lockstep/world/detail/rendezvous.hpp"
#include "lockstep/world/detail/store_client.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1::detail {

/// What all copies of a World share: its place, and its connection to the store. Thread-safe.
struct WorldState : EndingRank {
  /// A place on this host. `first` is the world rank of the host's first rank.
  struct LocalPlace {
    int rank = 0, size = 1, first = 0;
  };

  explicit WorldState(Environment known) : environment(std::move(known)) {}
  ~WorldState() {
    if (getpid() == owner) return;
    static_cast<void>(
        new auto(std::move(joined_)));  // a forked child may have copied the server in the middle of a change
    static_cast<void>(new auto(std::move(left_)));
  }
  WorldState(const WorldState&) = delete;
  WorldState& operator=(const WorldState&) = delete;

  /// Returns the rendezvous. The first call joins it, which does not wait for other ranks. Throws RendezvousError.
  const Rendezvous& rendezvous() {
    const std::lock_guard lock(mutex_);
    return join({});
  }
  /// Returns this process's connection to the store, null in a world of one rank.
  const std::shared_ptr<StoreConnection>& connection() { return rendezvous().connection; }
  /// Returns another client of the store of several ranks, each call on which times out after `timeout`.
  StorePtr client(std::chrono::milliseconds timeout = request_timeout) {
    return c10::make_intrusive<StoreClient>(connection(), timeout);
  }
  /// Returns whether this process hosts the store, so that it should leave last.
  bool hosts_store() { return connection() && connection()->hosts_store(); }

  /// Blocks until every rank has joined. Throws as World::store.
  void await_all();
  /// Returns whether all ranks run on this host. Blocks as await_all.
  bool single_host() {
    await_all();
    return single_host_;
  }
  /// Returns the address by which this host reaches the others, empty if there is none or it is unknown. Blocks as await_all.
  std::string address_to_others() {
    await_all();
    return address_;
  }
  /// Returns the place on this host. Without a launcher's LOCAL_RANK blocks as await_all.
  LocalPlace local_place();
  /// Returns the environment. Without LOCAL_RANK, its local rank and size are valid once all ranks have joined.
  Environment current_environment();

  /// Keeps what a communicator has left in flight. `completes(limit)` waits for it, at most `limit`, and returns whether it is
  /// complete; it cannot be any more once `over` returns true.
  void leave_behind(std::function<bool(std::chrono::milliseconds)> completes, std::function<bool()> over) {
    const std::lock_guard lock(left_mutex_);
    std::erase_if(left_, [](const auto& one) { return one.first({}); });
    left_.emplace_back(std::move(completes), std::move(over));
  }

  bool publish(const Failure& failure) override;
  /// Publishes that this process ends with `code`; as its failure, if that is not 0 and this rank has not made a communicator,
  /// since other ranks may wait for it. If `code` is 0, blocks before until what communicators have left in flight is complete,
  /// and, where this process hosts the store, afterwards until every rank has ended or one has failed, at most 5 minutes.
  /// `returns`: from `launch`, and not at an exit in the midst of the program, which joins nothing and waits for no thread.
  int end(int code, bool returns) override;

  const Environment environment;
  std::atomic<bool> communicates{false};  // this rank has made a communicator
  const pid_t owner = getpid();           // a forked child speaks for nobody

 private:
  friend World world_from(Environment place, const WorldOptions& options, bool launched);

  [[nodiscard]] Log log() const { return Log(environment.rank); }
  // `given` overrides the rendezvous timeout when only a failure is reported.
  const Rendezvous& join(std::optional<std::chrono::milliseconds> given);
  // Returns a function that logs what this rank waits for, after 5 s and then every minute. It logs only on local rank 0;
  // without LOCAL_RANK that is every rank. It asks for the text only when a line is due.
  std::function<void(const LazyText&)> waiting_notice(std::chrono::milliseconds timeout) const;
  // Finds the ranks that share this host, unless a launcher has numbered them, and the address by which this host reaches
  // the others.
  void place_ranks(const Rendezvous& joined);

  std::mutex mutex_, joining_, left_mutex_;
  std::optional<Rendezvous> joined_;
  std::vector<std::pair<std::function<bool(std::chrono::milliseconds)>, std::function<bool()>>> left_;
  std::atomic<bool> end_told_{false};  // this rank's end is published
  // Valid once all ranks have joined: written before `complete_` is set, and never again.
  std::atomic<bool> complete_{false};
  LocalPlace local_{environment.local_rank, environment.local_size,
                    environment.rank - environment.local_rank};
  bool single_host_ = true;
  std::string address_;
};

}  // namespace lockstep::inline v0_1::detail
