// NCCL 2.18 has no memory of its own: what is asked for then says so.
#include "lockstep/comm/detail/nccl/cuda/nccl_api.hpp"

static_assert(lockstep::detail::compiled_nccl_version == 21800);
static_assert(!lockstep::detail::nccl_has_buffers);

ncclResult_t without_buffers(ncclComm_t comm) {
  using namespace lockstep::detail;
  void* nothing = nullptr;
  const bool refused = nccl_allocate(&nothing, 1) == ncclInvalidUsage &&
                       nccl_register(comm, nothing, 1, &nothing) == ncclInvalidUsage &&
                       nccl_deregister(comm, nothing) == ncclInvalidUsage;
  nccl_free(nothing);
  return refused ? ncclSuccess : ncclInternalError;
}
