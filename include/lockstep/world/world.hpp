#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/world/environment.hpp"

namespace lockstep {
class World;
struct WorldOptions;
}  // namespace lockstep

namespace lockstep::detail {
struct Rendezvous;
class Membership;
class StoreConnection;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Does what World::from_environment does, with `variables` in place of those of the process. `launched`: announces the
/// failures of this process to the other ranks, and how it ends.
LOCKSTEP_PROCESS_WIDE World world_from(const Variables& variables, const WorldOptions& options,
                                       bool launched);

/// The number of RankZeroScopes that this thread is in.
LOCKSTEP_PROCESS_WIDE inline thread_local int rank_zero_scope_depth = 0;
}  // namespace lockstep::detail

namespace lockstep {

/// Makes collectives on this thread throw CommunicationError during its lifetime, since the other ranks are
/// not in the scope and would not join.
class RankZeroScope {
 public:
  RankZeroScope() { ++detail::rank_zero_scope_depth; }
  ~RankZeroScope() { --detail::rank_zero_scope_depth; }
  RankZeroScope(const RankZeroScope&) = delete;
  RankZeroScope& operator=(const RankZeroScope&) = delete;
};

/// Throws CommunicationError if `collective` is called inside a rank-zero scope. Each collective calls it first.
inline void forbid_in_rank_zero_scope(std::string_view collective) {
  if (detail::rank_zero_scope_depth > 0)
    throw CommunicationError(detail::formatted(
        "{} called inside a rank-zero scope: the other ranks are not in it and would never answer. "
        "Call it outside, on every rank",
        collective));
}

struct WorldOptions {
  /// Of `threads`: the cores of the launcher on this host divided by its ranks there, at most the cores that this process
  /// may run on. Without an effect unless srun, mpirun or mpiexec has started the process, and if OMP_NUM_THREADS or
  /// MKL_NUM_THREADS is set.
  static constexpr int share = -1;
  /// The number of threads of LibTorch's operations (at::set_num_threads), which is part of their results' bits. 0: unchanged.
  int threads = 0;
};

/// This process's place among all ranks of the run. A cheap value: copies share one connection to the store,
/// opened at first use. Thread-safe. `store()` is one client, so that concurrent calls on it are serialized.
class World {
 public:
  /// Constructs the world of a single process: rank 0 of 1, without a rendezvous.
  World();

  /// Constructs the world of an environment that the program has read or made.
  explicit World(Environment environment);

  /// Returns the world that the environment variables describe: those of torchrun, or those of srun, mpirun or
  /// mpiexec. Without any of them, returns the world of a single process, which opens no port and looks up no name; if
  /// a launcher has started it as its only rank, the first call writes the line about the run (see `store`).
  /// torchrun's variables are RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, set by a
  /// launcher or by hand. Under a launcher that lockstep does
  /// not know, the program or its script sets them before this call. Calls with equal rank, size and rendezvous return
  /// copies of one World. Installs no handler: `launch` reports what ends the process to the other ranks;
  /// without it they see a connection close. Throws UsageError for inconsistent variables.
  static World from_environment(const WorldOptions& options = {});

  /// Returns the world of `size` ranks that rendezvous at `url`, tcp://host:port, hosted by rank 0. Throws UsageError for an invalid argument.
  /// Counterpart: torch.distributed.init_process_group with init_method.
  static World join(const std::string& url, int rank, int size, const WorldOptions& options = {});

  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  /// The rank among the processes of this host, and their number. Without a launcher's LOCAL_RANK, the first
  /// call blocks until all ranks have joined, as `store` does.
  [[nodiscard]] int local_rank() const;
  /// Returns the number of processes on this host; see `local_rank`.
  [[nodiscard]] int local_size() const;
  /// Returns the environment. Without LOCAL_RANK, its local rank and size are valid once all ranks have joined.
  [[nodiscard]] Environment environment() const;

  /// Returns whether all ranks run on this host. Blocks until all ranks have joined, as `store` does.
  [[nodiscard]] bool single_host() const;
  /// Returns the address by which this host reaches the others, empty if there is none or it is unknown.
  /// Blocks until all ranks have joined, as `store` does.
  [[nodiscard]] std::string address_to_others() const;

  /// Returns the key-value store of the rendezvous. Collective: the first call blocks until every rank has
  /// joined, at most LOCKSTEP_RENDEZVOUS_TIMEOUT seconds (default: 300) from the start of the connection.
  /// Rank 0 then writes one line about the run to stderr: the ranks, their hosts, the launcher, the rendezvous
  /// and the threads. LOCKSTEP_LOG_LEVEL=warning hides it. The same timeout applies to each call on the store.
  /// Throws RendezvousError that names missing ranks, ranks that disagree on the world size, two processes
  /// with one rank, or two ranks of a host with one local rank; PeerError if a rank fails meanwhile.
  /// Counterpart: torch.distributed.Store.
  [[nodiscard]] detail::StorePtr store() const;

  /// Returns another client of the store, each call on which times out after `timeout`. Does not wait for other ranks to
  /// join. Throws RendezvousError.
  [[nodiscard]] detail::StorePtr connect_again(
      std::chrono::milliseconds timeout = std::chrono::seconds(10)) const;

  /// Returns this process's connection to the store, null in a world of one rank.
  [[nodiscard]] std::shared_ptr<detail::StoreConnection> connection() const;

  /// Returns whether this process hosts the store, so that it should leave last.
  [[nodiscard]] bool hosts_store() const;

  /// Marks this rank as finished. If `code` is not 0 and this rank has not made a communicator, publishes
  /// that as its failure, since other ranks may wait for it. If this rank hosts the store and `code` is 0,
  /// blocks until every rank has finished or one has failed, at most 5 minutes. Called by `launch`.
  void leave(int code = 0) const;

  /// Runs `work` on world rank 0 only. A collective inside `work` throws CommunicationError at once.
  template <class Work>
  void rank_zero(Work&& work) const {
    if (rank() != 0) return;
    RankZeroScope scope;
    std::forward<Work>(work)();
  }

  /// Runs `work` on every rank, first on the first rank of each host, then on the other ranks there, which wait at most
  /// `timeout`. They can use what the first one downloads or unpacks. All local ranks must call it; without a
  /// launcher's LOCAL_RANK, all ranks must. Returns the result of `work`. Throws PeerError if the first rank failed,
  /// TimeoutError if the wait exceeds `timeout`. A collective inside `work` throws CommunicationError.
  template <class Work>
  auto local_zero_first(Work&& work, std::chrono::milliseconds timeout = std::chrono::minutes(30)) const {
    RankZeroScope scope;
    const LocalPlace place = local_place();
    if (place.size == 1) return std::forward<Work>(work)();
    const std::string key = enter_local_zero_first(place, timeout);
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

  /// This rank's logger. By default only rank 0 writes; see Log::all.
  Log log;

 private:
  friend class detail::Membership;
  friend World detail::world_from(const Variables& variables, const WorldOptions& options, bool launched);

  // This rank's place on its host. `first` is the world rank of the host's first rank.
  struct LocalPlace {
    int rank = 0, size = 1, first = 0;
  };

  struct State;

  // Reports the outcome of `work` to the local ranks, also if it throws.
  struct Outcome {
    const World& world;
    const std::string& key;
    bool good = false;
    ~Outcome();
  };

  // Joins a call of local_zero_first: on every rank but the host's first, blocks until the first has
  // finished. Returns the call's key in the store.
  std::string enter_local_zero_first(const LocalPlace& place, std::chrono::milliseconds timeout) const;

  const detail::Rendezvous& rendezvous() const;

  // `given` overrides the rendezvous timeout when only a failure is reported.
  const detail::Rendezvous& rendezvous_within(std::optional<std::chrono::milliseconds> given) const;

  // Returns a function that logs what this rank waits for, after 5 s and then every minute. It logs only on
  // local rank 0; without LOCAL_RANK that is every rank. It asks for the text only when a line is due.
  [[nodiscard]] std::function<void(const std::function<std::string()>&)> waiting_notice(
      std::chrono::milliseconds timeout) const;

  // Blocks until every rank has joined.
  void await_all() const;

  // Finds the ranks that share this host, unless a launcher has numbered them, and the address by which this
  // host reaches the others.
  void place_ranks(const detail::Rendezvous& joined) const;

  [[nodiscard]] LocalPlace local_place() const;

  // Publishes a failure, also where this rank has not joined and others wait for it. Returns whether it is the
  // first, or true if this rank cannot know. May block.
  [[nodiscard]] bool publish_to_waiting(const Failure& failure) const;
  void announce_failures() const;

  // Publishes a non-zero exit code of a rank without a communicator as its failure: other ranks may wait for
  // it at the rendezvous. No-op under lockstep's launcher, which sees the exit code.
  void announce_exit_code(int code) const;

  // Records that this rank has made a communicator. Returns whether it is the first.
  bool begin_communicating() const;

  // Whether one launcher has started all ranks, and so sees how each of them ends.
  [[nodiscard]] bool launched_here() const;

  // Returns whether other ranks may wait for this one at a rendezvous that this rank can still join, and no
  // launcher reports this rank's failure to them.
  [[nodiscard]] bool others_may_wait() const;

  // `number` is the rank of this host's first, or -1 if it is unknown.
  void wait_for_first(const std::string& first, int number, const std::string& key,
                      std::chrono::milliseconds timeout) const;

  std::shared_ptr<State> state_;
};

}  // namespace lockstep

#ifndef LOCKSTEP_COMPILED
#include "lockstep/world/detail/world-inl.hpp"
#endif
