#pragma once

#include <optional>
#include <type_traits>
#include <utility>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/device_choice.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/world/detail/cpu_affinity.hpp"
#include "lockstep/world/world.hpp"
#ifdef LOCKSTEP_HAS_CUDA
#include <c10/cuda/CUDAFunctions.h>

#include "lockstep/comm/nccl_comm.hpp"
#endif

namespace lockstep::detail {

/// Runs `program` with the communicator type of `kind`: GpuComm or CpuComm. A void GpuComm leaves CpuComm
/// only.
template <class GpuComm, class CpuComm, class Program>
decltype(auto) run_on(DeviceKind kind, const World& world, Program&& program) {
  if constexpr (!std::is_void_v<GpuComm>) {
    static_assert(
        std::is_same_v<std::invoke_result_t<Program, GpuComm>, std::invoke_result_t<Program, CpuComm>>,
        "lockstep: the program of with_device returns the same type on GPUs and on CPUs");
    if (kind == DeviceKind::gpu) return std::forward<Program>(program)(GpuComm{world});
  }
  return std::forward<Program>(program)(CpuComm{world});
}

/// Implements with_device for two communicator types and a rank that sees `visible` devices.
template <class GpuComm, class CpuComm, class Program>
decltype(auto) with_device_of(std::optional<int> visible, const World& world, Program&& program,
                              std::optional<DeviceKind> wanted) {
  const DeviceKind kind = choose_device(world.environment(), visible, wanted);
  if (kind == DeviceKind::cpu && !wanted && visible == 0 && visible_gpus() > 0)
    world.log.warning("this host has {} GPUs, of which CUDA sees none: computing on CPUs", visible_gpus());
  agree_on_device(world, kind);
  return run_on<GpuComm, CpuComm>(kind, world, std::forward<Program>(program));
}

}  // namespace lockstep::detail

namespace lockstep {

/// Runs `program(comm)` with the communicator of the available device, and returns its result. `program` is a
/// template over the communicator. It is compiled for GlooComm and, in a program that links lockstep::cuda,
/// for NcclComm. The choice is made once, here, at run time; everything inside is static.
///
///   lockstep::with_device(world, [&]<class Comm>(Comm comm) {
///     constexpr bool on_gpu = lockstep::DeviceCommunicator<Comm>;
///     using Precision = std::conditional_t<on_gpu, lockstep::Fp16, lockstep::Fp32>;
///     lockstep::Trainer<Net, lockstep::DistributedSampler, Comm, Precision> trainer{
///         world, options, std::move(comm)};
///     ...
///   });
///
/// A rank that sees a GPU uses NcclComm, any other rank GlooComm. `wanted` overrides this, and so does the
/// environment variable LOCKSTEP_DEVICE (cpu, gpu or auto) if `wanted` is not set. Do not use CUDA before
/// this call: the rank's GPU becomes the current device when its communicator is constructed. Collective.
/// Throws UsageError if a GPU is wanted and this rank has none, MismatchError if the ranks choose
/// differently.
template <class Program>
decltype(auto) with_device(const World& world, Program&& program,
                           std::optional<detail::DeviceKind> wanted = std::nullopt) {
#ifdef LOCKSTEP_HAS_CUDA
  return detail::with_device_of<NcclComm, GlooComm>(static_cast<int>(c10::cuda::device_count()), world,
                                                    std::forward<Program>(program), wanted);
#else
  return detail::with_device_of<void, GlooComm>(std::nullopt, world, std::forward<Program>(program), wanted);
#endif
}

}  // namespace lockstep
