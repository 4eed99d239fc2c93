#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/backend_group.hpp"
#include "lockstep/comm/detail/mpi_backend.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/comm/process_group_comm.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/rendezvous.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/detail/world_state.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1 {

struct MpiOptions {
  /// As GlooOptions::timeout.
  std::chrono::milliseconds timeout = detail::default_timeout(detail::collective_timeout);
  /// The communicator that is duplicated. Default: MPI_COMM_WORLD. Its ranks are those of the World.
  MPI_Comm comm = MPI_COMM_NULL;
};

namespace detail {

inline MPI_Comm world_unless_given(MPI_Comm comm) {
  return comm == MPI_COMM_NULL ? MPI_COMM_WORLD : comm;
}

/// Returns the text of `root` on every rank of `comm`.
inline std::string broadcast_text(MPI_Comm comm, std::string text, int root = 0) {
  int length = static_cast<int>(text.size());
  check_mpi(MPI_Bcast(&length, 1, MPI_INT, root, comm));
  text.resize(static_cast<std::size_t>(length));
  check_mpi(MPI_Bcast(text.data(), length, MPI_BYTE, root, comm));
  return text;
}

/// Returns the rank's place in `comm` and on its host, with the host of the store in `rendezvous`. Collective.
inline Environment mpi_place(MPI_Comm comm) {
  Environment env;
  check_mpi(MPI_Comm_rank(comm, &env.rank));
  check_mpi(MPI_Comm_size(comm, &env.size));
  MPI_Comm host = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, env.rank, MPI_INFO_NULL, &host));
  MPI_Comm_rank(host, &env.local_rank);
  MPI_Comm_size(host, &env.local_size);
  int first = env.rank;  // on this host
  check_mpi(MPI_Bcast(&first, 1, MPI_INT, 0, host));
  MPI_Comm_free(&host);
  env.launched = true;
  env.launcher = "MPI";
  if (const LauncherVariables* names = launcher_of(process_variable)) {
    env.launcher = names->launcher;
    env.rank_variables = formatted("{}, {}", names->rank, names->size);
    env.local_variable = names->local_rank;
  }
  if (env.size > 1) env.rendezvous = loopback_address();
  if (env.local_size == env.size) return env;
  // The address from which rank 0's host reaches the first rank elsewhere.
  int own = first == 0 ? env.size : env.rank, other = 0;
  check_mpi(MPI_Allreduce(&own, &other, 1, MPI_INT, MPI_MIN, comm));
  const std::string route = source_address_towards(broadcast_text(comm, host_name(), other));
  env.rendezvous = broadcast_text(comm, route.empty() || names_loopback(route) ? host_name() : route);
  return env;
}

/// Returns the World of the ranks of `comm`. See mpi_world.
inline World world_of(MPI_Comm comm, const WorldOptions& options) {
  Environment env = mpi_place(comm);
  if (env.size == 1) return world_from(env, options, false);
  process_rank = env.rank;
  const std::string host = env.rendezvous;
  const std::string url_host = host.find(':') == std::string::npos ? host : "[" + host + "]";  // IPv6
  env.rendezvous_origin = "the address of rank 0 in MPI";
  env.store_secret = broadcast_text(comm, env.rank == 0 ? random_secret() : std::string());
  // Rank 0 hosts the store before the others learn its address.
  std::string failure;
  std::optional<World> hosting;
  for (int tries = 0; env.rank == 0 && !hosting && tries < 5; ++tries) try {
      const int port = listen_on(host, 0).port;  // free again: another process may come first
      env.rendezvous = formatted("tcp://{}:{}", url_host, port);
      World world = world_from(env, options, false);
      state_of(world).rendezvous();
      hosting = std::move(world);
    } catch (const RendezvousError& error) {
      failure = error.what();
    }
  env.rendezvous = broadcast_text(comm, hosting ? env.rendezvous : std::string());
  failure = broadcast_text(comm, failure);
  if (env.rendezvous.empty())
    throw RendezvousError(formatted("rank 0 cannot host the store of the run: {}", failure));
  return hosting ? *hosting : world_from(env, options, false);
}

/// Returns a duplicate of `comm`. Collective.
inline std::shared_ptr<MpiCommunicator> duplicate(MPI_Comm comm, std::chrono::milliseconds timeout) {
  MpiEngine& engine = MpiEngine::get();
  auto made = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
  MPI_Request request = MPI_REQUEST_NULL;
  engine.call([&] { check_mpi(MPI_Comm_idup(comm, made.get(), &request)); });
  int done = 0;
  const auto completes = [&] {
    engine.call([&] { check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE)); });
    return done != 0;
  };
  if (engine.wait(MpiEngine::Clock::now() + timeout, completes))
    return std::make_shared<MpiCommunicator>(*made);
  static_cast<void>(made.release());  // MPI may still write to it
  throw TimeoutError(formatted("MPI_Comm_idup has not completed after {} ms", timeout.count()));
}

/// Returns a communicator of some ranks of `base`, in the order in which they call it as `rank` 0 to `size` - 1. Collective
/// over them.
inline std::shared_ptr<MpiCommunicator> part_of(const MpiCommunicator& base, const StorePtr& store, int rank,
                                                int size) {
  int own = 0;
  MPI_Comm_rank(base.comm, &own);
  store->set(formatted("mpi/{}", rank), std::to_string(own));
  std::vector<int> members;
  for (int i = 0; i < size; ++i) members.push_back(std::stoi(store->get_to_str(formatted("mpi/{}", i))));
  MPI_Comm made = MPI_COMM_NULL;
  MpiEngine::get().call_blocking([&] {
    MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
    check_mpi(MPI_Comm_group(base.comm, &all));
    check_mpi(MPI_Group_incl(all, size, members.data(), &some));
    check_mpi(MPI_Comm_create_group(base.comm, some, 0, &made));
    MPI_Group_free(&all);
    MPI_Group_free(&some);
  });
  return std::make_shared<MpiCommunicator>(made);
}

/// Returns the options of a group whose backends are MpiBackends. Throws UsageError as MpiComm.
inline ProcessGroupOptions mpi_backend(const World& world, const MpiOptions& mpi) {
  ProcessGroupOptions group;
  group.timeout = checked_timeout("MpiOptions", mpi.timeout);
  MpiEngine::get();
  const MPI_Comm comm = world_unless_given(mpi.comm);
  int rank = 0, size = 0;
  check_mpi(MPI_Comm_rank(comm, &rank));
  check_mpi(MPI_Comm_size(comm, &size));
  if (rank != world.rank() || size != world.size())
    throw UsageError(formatted(
        "MpiComm: the MPI communicator is rank {} of {}, and the world is rank {} of {}: make the world "
        "by mpi_world, or give MpiOptions::comm the communicator of its ranks",
        rank, size, world.rank(), world.size()));
  group.make_backend = [comm, timeout = group.timeout,
                        base = std::make_shared<std::shared_ptr<MpiCommunicator>>()](
                           const StorePtr& store, int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
    if (*base) return c10::make_intrusive<MpiBackend>(part_of(**base, store, rank, size), rank, size);
    *base = duplicate(comm, timeout);
    return c10::make_intrusive<MpiBackend>(*base, rank, size);
  };
  return group;
}

}  // namespace detail

/// Returns the world of the ranks of an MPI communicator, `comm` (default: MPI_COMM_WORLD): rank, size, local rank and local
/// size are MPI's. Rank 0 hosts the store on a free port, and its address and a random secret travel over MPI: no variable
/// is read. Initializes MPI if it is not initialized; see MpiComm. Collective over `comm`. Blocks. Throws UsageError as
/// MpiComm, and RendezvousError if not every rank can connect to rank 0's host.
inline World mpi_world(MPI_Comm comm = MPI_COMM_NULL, const WorldOptions& options = {}) {
  detail::require_level(detail::process_variable);
  detail::MpiEngine& engine = detail::MpiEngine::get();
  std::optional<World> world;
  engine.call_blocking([&] { world = detail::world_of(detail::world_unless_given(comm), options); });
  return *world;
}

/// Collectives of CPU tensors over the MPI library of the program: a ProcessGroupComm with a backend of lockstep's own, for
/// clusters whose network MPI knows best. Not part of lockstep.hpp, so that other programs need no MPI.
///
/// The communicator works on a duplicate of MPI_COMM_WORLD or of `MpiOptions::comm`. With MPI_THREAD_MULTIPLE a thread of
/// lockstep moves collectives on, so that they overlap with computation. With MPI_THREAD_SERIALIZED launches and waits do,
/// and the program must not call MPI on another thread meanwhile. Less is refused.
///
/// What the destructor leaves in flight is completed by the thread or by later calls, and at the latest in MPI_Finalize: MPI
/// cannot cancel a collective. If the program has initialized MPI, it also finalizes it, after the last communicator has
/// gone. Otherwise the first mpi_world or MpiComm calls MPI_Init_thread, and a process that exits with code 0 calls
/// MPI_Finalize.
///
/// The order of sums, and so their bits, are those of the MPI library, as are min and max of NaN. MPI cannot cancel a
/// collective: after a failure, a timeout or abort() every call throws, and what is in flight is left with its tensors.
/// The launchers of MPI end all ranks if one dies, most of them before the others can report it.
class MpiComm : public detail::HostComm<MpiComm> {
 public:
  /// Performs the rendezvous and duplicates the MPI communicator. Collective. Blocks. Throws UsageError if MPI is finalized,
  /// provides less than MPI_THREAD_SERIALIZED, is another library than the program was compiled against or was started by
  /// the launcher of another one, or if its ranks are not those of the world; TimeoutError that names the missing ranks.
  explicit MpiComm(const World& world, MpiOptions options = {})
      : HostComm(
            detail::world_group("the constructor of MpiComm", world, detail::mpi_backend(world, options))) {}

 private:
  using HostComm::HostComm;
};

static_assert(PointToPoint<MpiComm> && Splittable<MpiComm>);

}  // namespace lockstep::inline v0_1
