#pragma once

#include <chrono>
#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/comm/detail/backend_group.hpp"
#include "lockstep/comm/detail/gloo_comm-inl.hpp"
#include "lockstep/comm/detail/process_group_comm-inl.hpp"
#include "lockstep/comm/detail/shm_backend.hpp"
#include "lockstep/comm/detail/shm_exchange.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/comm/shm_comm.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1 {
namespace detail {

/// Returns the options of a group whose backends are in shared memory. Where its ranks cannot share some, they are those
/// that `gloo` makes; without it, throws CommunicationError.
inline ProcessGroupOptions shm_backend(const World& world, std::chrono::milliseconds timeout,
                                       ProcessGroupOptions::MakeBackend gloo = {}) {
  ProcessGroupOptions group;
  group.timeout = timeout;
  group.make_backend = [world, timeout, gloo = std::move(gloo)](
                           const StorePtr& store, int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
    const ShmBoard board{[&](const std::string& key, const std::string& value) { store->set(key, value); },
                         [&](const std::string& key) { return store->get_to_str(key); }};
    auto shared = share_memory(board, rank, size, timeout, world.local_size());
    if (shared.memory) return c10::make_intrusive<ShmBackend>(std::move(shared.memory), rank, shared.spins);
    if (!gloo)
      throw CommunicationError(
          formatted("the ranks cannot share memory: {}. CpuComm would use Gloo",
                    shared.several_hosts ? "they are on several hosts" : shared.obstacle),
          world.rank());
    if (!shared.several_hosts && rank == 0)
      world.log.all().warning("the ranks cannot share memory, and use Gloo: {}", shared.obstacle);
    return gloo(store, rank, size);
  };
  return group;
}

}  // namespace detail

LOCKSTEP_INLINE ShmComm::ShmComm(const World& world, ShmOptions options)
    : HostComm(detail::world_group(
          "the constructor of ShmComm", world,
          detail::shm_backend(world, detail::checked_timeout("ShmOptions", options.timeout)))) {}

LOCKSTEP_INLINE CpuComm::CpuComm(const World& world, GlooOptions options)
    : HostComm(detail::world_group(
          "the constructor of CpuComm", world,
          detail::shm_backend(world, detail::checked_timeout("CpuComm's GlooOptions", options.timeout),
                              detail::gloo_backend(world, options).make_backend))) {}

}  // namespace lockstep::inline v0_1
