#pragma once

// NCCL and all code that depends on its version. The oldest is 2.18, which introduced ncclCommSplit.
#include <nccl.h>

#include <c10/core/ScalarType.h>

#include <cstddef>

#include "lockstep/comm/detail/nccl/device.hpp"

#ifdef LOCKSTEP_NCCL_VERSION_CODE  // set by a test, to compile as if the header were older
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

/// NCCL's memory and registration, since 2.19. A null handle marks memory that NCCL left unregistered.
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

/// Returns a configuration whose calls never block the host: they return in_progress instead.
inline ncclConfig_t nccl_config() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

/// Returns the version of the NCCL that this process has loaded.
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

/// Returns NCCL's operation. ncclAvg multiplies each rank's floating numbers by 1 / size and adds them.
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
