#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/comm/process_group_comm.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep {

/// Collectives of CPU tensors among ranks of one host, in memory that they share: a ProcessGroupComm with a backend of
/// lockstep's own. Sums have the bits of GlooComm. A launch copies its input and returns; the waits compute. So a
/// collective completes once all ranks have launched it, whatever they do afterwards, and no other thread is needed.
///
/// Each rank holds at most 128 MiB of inputs in flight, which are allocated as they are needed and kept; what is beyond
/// them is copied when the rank next launches or waits. At most 16 messages from one rank to another may be on their way
/// before the receiver asks for one of them. The memory has no name, and ends with the processes.
///
/// CpuComm chooses between this and GlooComm.
class ShmComm : public ProcessGroupComm {
 public:
  /// Performs the rendezvous. Collective. Blocks. Throws TimeoutError that names the missing ranks, and
  /// CommunicationError on every rank, with the reason, if the ranks cannot share memory.
  explicit ShmComm(const World& world, ShmOptions options = {});

  /// See ProcessGroupComm::new_group.
  [[nodiscard]] std::optional<ShmComm> new_group(const std::vector<int>& ranks) {
    if (auto group = split_group(ranks)) return ShmComm(std::move(group));
    return std::nullopt;
  }

  // Not a DeviceCommunicator: its tensors are on the host.
  [[nodiscard]] at::Device tensor_device() const = delete;

 private:
  explicit ShmComm(std::shared_ptr<detail::BackendGroup> group) : ProcessGroupComm(std::move(group)) {}
};

static_assert(PointToPoint<ShmComm> && Splittable<ShmComm>);

}  // namespace lockstep

#ifndef LOCKSTEP_COMPILED
#include "lockstep/comm/detail/shm_comm-inl.hpp"
#endif
