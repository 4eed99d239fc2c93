#pragma once

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/grad/detail/poison_check.hpp"

namespace lockstep_test {

/// CpuComm whose backwards do not wait for the check of the buckets, as those on GPUs do not. For programs
/// that reduce every model so.
struct LateComm : lockstep::CpuComm {
  explicit LateComm(const lockstep::World& world) : CpuComm(world) {
    lockstep::detail::checks_cpu_late = true;
  }
};

}  // namespace lockstep_test
