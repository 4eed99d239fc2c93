#pragma once

#include <type_traits>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/comm/process_group_comm.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1 {

/// Collectives of CPU tensors over LibTorch's own Gloo: a ProcessGroupComm that creates its ProcessGroupGloo,
/// and one for each sub-group. Where the calls of the ranks differ, a rank that receives more data than it
/// expects ends inside Gloo, without an exception; under `launch` the error of the process names the calls.
/// Counterpart: torch.distributed.ProcessGroupGloo.
class GlooComm : public detail::HostComm<GlooComm> {
 public:
  /// Performs the rendezvous. Collective. Blocks. Throws TimeoutError that names the missing ranks, and MismatchError if
  /// some ranks compute on CPUs and others do not.
  explicit GlooComm(const World& world, GlooOptions options = {});

 private:
  using HostComm::HostComm;
};

static_assert(PointToPoint<GlooComm> && Splittable<GlooComm> && !std::is_copy_assignable_v<GlooComm>);

}  // namespace lockstep::inline v0_1

#ifndef LOCKSTEP_COMPILED
#include "lockstep/comm/detail/gloo_comm-inl.hpp"
#endif
