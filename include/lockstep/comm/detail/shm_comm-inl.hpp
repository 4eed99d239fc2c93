#pragma once

#include <chrono>
#include <memory>
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

namespace lockstep {
namespace detail {

/// Returns the options of a group whose backends are in shared memory, where its ranks can share some; else those that
/// `otherwise(memory, store, rank, size)` makes.
template <class Otherwise>
ProcessGroupOptions shm_backend(const World& world, std::chrono::milliseconds timeout, Otherwise otherwise) {
  ProcessGroupOptions group;
  group.timeout = timeout;
  group.make_backend = [timeout, local = world.local_size(), otherwise = std::move(otherwise)](
                           const StorePtr& store, int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
    const ShmBoard board{[&](const std::string& key, const std::string& value) { store->set(key, value); },
                         [&](const std::string& key) { return store->get_to_str(key); }};
    auto shared = share_memory(board, rank, size, timeout, local);
    if (!shared.memory) return otherwise(shared, store, rank, size);
    return c10::make_intrusive<ShmBackend>(std::move(shared.memory), rank, shared.spins);
  };
  return group;
}

}  // namespace detail

LOCKSTEP_INLINE ShmComm::ShmComm(const World& world, ShmOptions options)
    : ProcessGroupComm(detail::world_group(
          "the constructor of ShmComm", world,
          detail::shm_backend(world, detail::checked_timeout("ShmOptions", options.timeout),
                              [rank = world.rank()](const detail::SharedMemory& none, const detail::StorePtr&,
                                                    int, int) -> c10::intrusive_ptr<c10d::Backend> {
                                throw CommunicationError(
                                    detail::formatted(
                                        "the ranks cannot share memory: {}. CpuComm would use Gloo",
                                        none.several_hosts ? "they are on several hosts" : none.obstacle),
                                    rank);
                              }))) {}

LOCKSTEP_INLINE CpuComm::CpuComm(const World& world, GlooOptions options)
    : ProcessGroupComm(detail::world_group(
          "the constructor of CpuComm", world,
          detail::shm_backend(
              world, detail::checked_timeout("CpuComm's GlooOptions", options.timeout),
              [world, make_gloo = detail::gloo_backend(world, options).make_backend](
                  const detail::SharedMemory& none, const detail::StorePtr& store, int rank, int size) {
                if (!none.several_hosts && rank == 0)
                  world.log.all().warning("the ranks cannot share memory, and use Gloo: {}", none.obstacle);
                return make_gloo(store, rank, size);
              }))) {}

}  // namespace lockstep
