#pragma once

#if !__has_include(<nccl.h>) || !__has_include(<cuda_runtime_api.h>) || !__has_include(<c10/cuda/CUDAStream.h>)
#error \
    "lockstep: NcclComm needs the headers of CUDA, of NCCL and of a LibTorch for CUDA: link lockstep::cuda, or leave this header out"
#endif

#include "lockstep/comm/detail/nccl/comm.hpp"
#include "lockstep/comm/detail/nccl/cuda/cuda_device.hpp"

namespace lockstep {

/// Collectives of CUDA tensors over NCCL; see BasicNcclComm. One GPU per rank: that of the local rank, or
/// NcclOptions::device. Not part of lockstep.hpp, so that CPU-only programs need no CUDA headers.
/// Counterpart: torch.distributed.ProcessGroupNCCL.
using NcclComm = detail::BasicNcclComm<detail::CudaDevice>;

static_assert(Reducing<NcclComm> && Gathering<NcclComm> && PointToPoint<NcclComm> && Splittable<NcclComm>);

}  // namespace lockstep
