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

/// Collectives of CPU tensors, the default of a Trainer on CPUs: as ShmComm where all ranks of the group share a host,
/// else as GlooComm, with the same bits. All ranks decide as one. Where ranks of one host cannot share memory, rank 0
/// logs why, once for each group.
class CpuComm : public ProcessGroupComm {
 public:
  /// As GlooComm's constructor, whose options are used where it is Gloo.
  explicit CpuComm(const World& world, GlooOptions options = {});

  /// See ProcessGroupComm::new_group. Decides anew.
  [[nodiscard]] std::optional<CpuComm> new_group(const std::vector<int>& ranks) {
    if (auto group = split_group(ranks)) return CpuComm(std::move(group));
    return std::nullopt;
  }

  // Not a DeviceCommunicator: its tensors are on the host.
  [[nodiscard]] at::Device tensor_device() const = delete;

 private:
  explicit CpuComm(std::shared_ptr<detail::BackendGroup> group) : ProcessGroupComm(std::move(group)) {}
};

static_assert(PointToPoint<CpuComm> && Splittable<CpuComm>);

}  // namespace lockstep

#ifndef LOCKSTEP_COMPILED
#include "lockstep/comm/detail/shm_comm-inl.hpp"
#endif
