#pragma once

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/comm/process_group_comm.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1 {

/// Collectives of CPU tensors, the default of a Trainer on CPUs: as ShmComm where all ranks of the group share a host,
/// else as GlooComm, with the same bits. All ranks of a group decide as one, also of a new_group. Where ranks of one host cannot share memory, rank 0
/// logs why, once for each group.
class CpuComm : public detail::HostComm<CpuComm> {
 public:
  /// As GlooComm's constructor, whose options are used where it is Gloo.
  explicit CpuComm(const World& world, GlooOptions options = {});

 private:
  using HostComm::HostComm;
};

static_assert(PointToPoint<CpuComm> && Splittable<CpuComm>);

}  // namespace lockstep::inline v0_1

#ifndef LOCKSTEP_COMPILED
#include "lockstep/comm/detail/shm_comm-inl.hpp"
#endif
