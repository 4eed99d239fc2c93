#pragma once

// NCCL itself, and all that depends on its version: from 2.18 on, which first had ncclCommSplit.
#include <nccl.h>

#include <c10/core/ScalarType.h>

#include <cstddef>

#include "lockstep/comm/detail/nccl/device.hpp"

#ifdef LOCKSTEP_NCCL_VERSION_CODE  // a test's, to compile as if the header were older
#define LOCKSTEP_NCCL_VERSION LOCKSTEP_NCCL_VERSION_CODE
#else
#define LOCKSTEP_NCCL_VERSION NCCL_VERSION_CODE
#endif

#if LOCKSTEP_NCCL_VERSION < 21800
#error \
    "lockstep: NcclComm needs NCCL 2.18 or newer: build against the nccl.h of a newer torch, or leave NcclComm out"
#endif

namespace lockstep::detail {

/// The version of nccl.h.
inline constexpr int compiled_nccl_version = LOCKSTEP_NCCL_VERSION;

inline NcclResult result_of(ncclResult_t result) {
  return static_cast<NcclResult>(result);
}

/// Memory of NCCL's own, and registration: from 2.19 on. A null handle is NCCL's for what it leaves out.
#if LOCKSTEP_NCCL_VERSION >= 21900
inline constexpr bool nccl_has_buffers = true;
inline ncclResult_t nccl_allocate(void** memory, std::size_t bytes) {
  return ncclMemAlloc(memory, bytes);
}
inline void nccl_free(void* memory) {
  ncclMemFree(memory);
}
inline ncclResult_t nccl_register(ncclComm_t comm, void* memory, std::size_t bytes, void** handle) {
  return ncclCommRegister(comm, memory, bytes, handle);
}
inline ncclResult_t nccl_deregister(ncclComm_t comm, void* handle) {
  return handle ? ncclCommDeregister(comm, handle) : ncclSuccess;
}
#else
inline constexpr bool nccl_has_buffers = false;
inline ncclResult_t nccl_allocate(void**, std::size_t) {
  return ncclInvalidUsage;
}
inline void nccl_free(void*) {}
inline ncclResult_t nccl_register(ncclComm_t, void*, std::size_t, void**) {
  return ncclInvalidUsage;
}
inline ncclResult_t nccl_deregister(ncclComm_t, void*) {
  return ncclInvalidUsage;
}
#endif

static_assert(static_cast<int>(NcclResult::remote_error) == ncclRemoteError);
static_assert(static_cast<int>(NcclResult::in_progress) == ncclInProgress);

/// Communicators never block the host: whatever takes longer says that it is in progress.
inline ncclConfig_t nccl_config() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

/// The version of the NCCL in this process.
inline int loaded_nccl_version() {
  int version = 0;
  ncclGetVersion(&version);
  return version;
}

inline ncclDataType_t nccl_type_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return ncclFloat64;
    case at::kHalf:
      return ncclFloat16;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kChar:
      return ncclInt8;
    case at::kByte:
      return ncclUint8;
    case at::kInt:
      return ncclInt32;
    case at::kLong:
      return ncclInt64;
    default:
      return ncclFloat32;
  }
}

/// Averages are NCCL's own: for floating types each rank's numbers times 1 / size, and their sum.
inline ncclRedOp_t nccl_op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::avg:
      return ncclAvg;
    case ReduceOp::min:
      return ncclMin;
    case ReduceOp::max:
      return ncclMax;
    case ReduceOp::product:
      return ncclProd;
    default:
      return ncclSum;
  }
}

}  // namespace lockstep::detail
