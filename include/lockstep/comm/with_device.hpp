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

/// Runs `program` with the communicator that `kind` asks for, of two types or, where the first is void, of
/// the second alone.
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

/// with_device, between two communicators, for a rank that sees `visible` devices.
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

/// Runs one program on whatever there is: `program(comm)`, a template over the communicator, is compiled for
/// CPUs and, in a program that links lockstep::cuda, for GPUs; here, once, one of the two is chosen, and all
/// inside is static. Returns what it returns.
///
///   lockstep::with_device(world, [&]<class Comm>(Comm comm) {
///     using Precision = std::conditional_t<lockstep::DeviceCommunicator<Comm>, lockstep::Fp16,
///     lockstep::Fp32>; lockstep::Trainer<Net, lockstep::DistributedSampler, Comm, Precision> trainer{world,
///     options, std::move(comm)};
///     ...
///   });
///
/// GPUs, over NcclComm, are chosen where this rank sees one, CPUs, over GlooComm, where not; `wanted`, or the
/// environment variable LOCKSTEP_DEVICE (cpu, gpu or auto), says otherwise. Nothing before it should use
/// CUDA: the device of this rank becomes the current one as its communicator is made. Collective. Throws
/// UsageError where a GPU is wanted and there is none for this rank, MismatchError where the ranks choose
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
