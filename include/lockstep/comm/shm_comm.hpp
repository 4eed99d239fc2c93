#pragma once

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/comm/process_group_comm.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1 {

/// Collectives of CPU tensors among ranks of one host, in memory that they share: a ProcessGroupComm with a backend of
/// lockstep's own. Sums have the bits of GlooComm. A launch copies its input and returns; the waits compute. So a
/// collective completes once all ranks have launched it, whatever they do afterwards, and no other thread is needed.
///
/// Each rank holds at most 128 MiB of inputs in flight, which are allocated as they are needed and kept; what is beyond
/// them is copied when the rank next launches or waits. At most 16 messages from one rank to another may be on their way
/// before the receiver asks for one of them. The memory has no name, and ends with the processes.
///
/// CpuComm chooses between this and GlooComm.
class ShmComm : public detail::HostComm<ShmComm> {
 public:
  /// Performs the rendezvous. Collective. Blocks. Throws TimeoutError that names the missing ranks, and
  /// CommunicationError on every rank, with the reason, if the ranks cannot share memory.
  explicit ShmComm(const World& world, ShmOptions options = {});

 private:
  using HostComm::HostComm;
};

static_assert(PointToPoint<ShmComm> && Splittable<ShmComm>);

}  // namespace lockstep::inline v0_1

#ifndef LOCKSTEP_COMPILED
#include "lockstep/comm/detail/shm_comm-inl.hpp"
#endif
