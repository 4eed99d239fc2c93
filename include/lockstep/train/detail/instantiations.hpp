#pragma once

// Templates of most programs: those over the default communicator and hook, and the optimizers. With LOCKSTEP_COMPILED a
// program only declares them, and compiled.cpp, which defines LOCKSTEP_INSTANTIATES, instantiates them once.

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/optim/optimizers.hpp"

#ifdef LOCKSTEP_INSTANTIATES
#define LOCKSTEP_EXTERN
#else
#define LOCKSTEP_EXTERN extern
#endif

LOCKSTEP_EXTERN template class lockstep::GroupOptions<lockstep::SGDOptions>;
LOCKSTEP_EXTERN template class lockstep::GroupOptions<lockstep::AdamOptions>;

namespace lockstep::inline v0_1::detail {

LOCKSTEP_EXTERN template class GroupedOptimizer<SGD, SGDState, SGDOptions>;
LOCKSTEP_EXTERN template class GroupedOptimizer<Adam, AdamState, AdamOptions>;
LOCKSTEP_EXTERN template class UsageExchange<CpuComm>;
LOCKSTEP_EXTERN template class BucketReduction<CpuComm, AllReduceHook>;
LOCKSTEP_EXTERN template class Reducer<CpuComm, AllReduceHook>;
LOCKSTEP_EXTERN template void compare_and_broadcast(const CheckedModel&, const DdpOptions&,
                                                    const AllReduceHook&, CpuComm&);

}  // namespace lockstep::inline v0_1::detail

#undef LOCKSTEP_EXTERN
