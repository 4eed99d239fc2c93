#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/log/log.hpp"

namespace lockstep::inline v0_1 {
class World;
struct WorldOptions;
}  // namespace lockstep::inline v0_1

namespace lockstep::inline v0_1::detail {
struct Environment;
struct WorldState;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Does what World::from_environment does, for a rank whose place is known. `launched`: `launch` has called it, and tells the
/// other ranks how this process ends.
LOCKSTEP_PROCESS_WIDE World world_from(Environment environment, const WorldOptions& options, bool launched);
/// Returns what lockstep itself needs of a World. Valid as long as a copy of it lives.
WorldState& state_of(const World& world);

/// The number of RankZeroScopes that this thread is in.
LOCKSTEP_PROCESS_WIDE inline thread_local int rank_zero_scope_depth = 0;
}  // namespace lockstep::inline v0_1::detail

namespace lockstep::inline v0_1 {

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
  std::int64_t threads = 0;
};

/// This process's place among all ranks of the run. A cheap value: copies share one connection to the store,
/// opened at first use. Thread-safe. `store()` is one client, so that concurrent calls on it are serialized.
class World {
 public:
  /// Constructs the world of a single process: rank 0 of 1, without a rendezvous.
  World();

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
  /// Returns the key-value store of the rendezvous. Collective: the first call blocks until every rank has
  /// joined, at most LOCKSTEP_RENDEZVOUS_TIMEOUT seconds (default: 300) from the start of the connection.
  /// Rank 0 then writes one line about the run to stderr: the ranks, their hosts, the launcher, the rendezvous
  /// and the threads. LOCKSTEP_LOG_LEVEL=warning hides it. The same timeout applies to its calls; append throws.
  /// Throws RendezvousError that names missing ranks, ranks that disagree on the world size, two processes
  /// with one rank, or two ranks of a host with one local rank; PeerError if a rank fails meanwhile.
  /// Counterpart: torch.distributed.Store.
  [[nodiscard]] detail::StorePtr store() const;

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
    const RankZeroScope scope;
    const LocalTurn turn(*this, timeout);
    return std::forward<Work>(work)();
  }

  /// This rank's logger. By default only rank 0 writes; see Log::all.
  Log log;

 private:
  friend World detail::world_from(detail::Environment environment, const WorldOptions& options,
                                  bool launched);
  friend detail::WorldState& detail::state_of(const World& world);

  explicit World(detail::Environment environment);

  // A rank's turn in local_zero_first. The constructor blocks, except on the first rank of the host, until that has
  // finished. The destructor reports to the local ranks whether the first rank's work has ended by an exception.
  struct LocalTurn {
    LocalTurn(const World& world, std::chrono::milliseconds timeout);
    ~LocalTurn();
    LocalTurn(const LocalTurn&) = delete;
    LocalTurn& operator=(const LocalTurn&) = delete;

    const World& world;
    std::string key;  // in the store, on the first rank of several; empty elsewhere
    const int exceptions = std::uncaught_exceptions();
  };

  std::shared_ptr<detail::WorldState> state_;
};

}  // namespace lockstep::inline v0_1

#ifndef LOCKSTEP_COMPILED
#include "lockstep/world/detail/world-inl.hpp"
#endif
