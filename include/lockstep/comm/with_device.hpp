#pragma once

#include <optional>
#include <type_traits>
#include <utility>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/host_share.hpp"
#include "lockstep/world/detail/world_state.hpp"
#include "lockstep/world/world.hpp"
#ifdef LOCKSTEP_HAS_CUDA
#include <c10/cuda/CUDAFunctions.h>

#include "lockstep/comm/nccl_comm.hpp"
#endif

namespace lockstep::inline v0_1 {
/// The kind of device that a program computes on.
enum class DeviceKind { cpu, gpu };
namespace detail {

/// Chooses this rank's device kind: `wanted`, else LOCKSTEP_DEVICE, else a GPU if one is visible. `visible`
/// is the number of visible CUDA devices, std::nullopt in a build without CUDA. Throws UsageError if the
/// choice is a GPU and this rank has none. Logs why it is not where CUDA_VISIBLE_DEVICES lists GPUs, and a warning if CUDA
/// sees none of those of this host.
inline DeviceKind choose_device(const Environment& rank, std::optional<int> visible,
                                std::optional<DeviceKind> wanted,
                                const Variables& variables = process_variable) {
  const bool asked = !wanted;
  if (const auto text = variables("LOCKSTEP_DEVICE"); text && !wanted && *text != "auto") {
    if (*text != "cpu" && *text != "gpu")
      throw UsageError(formatted("LOCKSTEP_DEVICE={} is unknown: it must be auto, cpu or gpu", *text));
    wanted = *text == "gpu" ? DeviceKind::gpu : DeviceKind::cpu;
  }
  if (!wanted && visible == 0 && visible_gpus() > 0)
    Log(rank.rank).warning("this host has {} GPUs, of which CUDA sees none: computing on CPUs",
                           visible_gpus());
  if (wanted == DeviceKind::cpu || (!wanted && visible.value_or(0) == 0)) {
    const auto listed = variables("CUDA_VISIBLE_DEVICES");
    if (asked && listed && !listed->empty() && !listed->starts_with('-'))
      Log(rank.rank).info("computing on CPUs, although CUDA_VISIBLE_DEVICES={}: {}", *listed,
                          wanted     ? "LOCKSTEP_DEVICE=cpu"
                          : !visible ? "this program was built without CUDA"
                                     : "there is no CUDA device");
    return DeviceKind::cpu;
  }
  if (!visible)
    throw UsageError(
        formatted("rank {} is to compute on a GPU, but this program was built without CUDA: link "
                  "lockstep::cuda, or compute on CPUs",
                  rank.rank));
  gpu_of_rank(rank, *visible, std::nullopt, variables);
  return DeviceKind::gpu;
}

}  // namespace detail

inline namespace LOCKSTEP_DEVICES {

/// Runs `program(comm)` with the communicator of the available device, and returns its result. `program` is a
/// template over the communicator. It is compiled for CpuComm and, in a program that links lockstep::cuda,
/// for NcclComm. The choice is made once, here, at run time; everything inside is static.
///
/// ```cpp
/// lockstep::with_device(world, [&]<class Comm>(Comm comm) {
///   constexpr bool on_gpu = lockstep::DeviceCommunicator<Comm>;
///   using Precision = std::conditional_t<on_gpu, lockstep::Fp16, lockstep::Fp32>;
///   lockstep::Trainer<Net, lockstep::DistributedSampler, Comm, Precision> trainer{
///       world, options, std::move(comm)};
/// });
/// ```
///
/// A rank that sees a GPU uses NcclComm, any other rank CpuComm. `wanted` overrides this, and so does the
/// environment variable LOCKSTEP_DEVICE (cpu, gpu or auto) if `wanted` is not set. Do not use CUDA before
/// this call: the rank's GPU becomes the current device when its communicator is constructed. Collective.
/// Throws UsageError if a GPU is wanted and this rank has none, MismatchError if the ranks choose
/// differently.
template <class Program>
decltype(auto) with_device(const World& world, Program&& program,
                           std::optional<DeviceKind> wanted = std::nullopt) {
#ifdef LOCKSTEP_HAS_CUDA
  static_assert(
      std::is_same_v<std::invoke_result_t<Program, NcclComm>, std::invoke_result_t<Program, CpuComm>>,
      "lockstep: the program of with_device returns the same type on GPUs and on CPUs");
  const int visible = c10::cuda::device_count();
  if (detail::choose_device(detail::state_of(world).current_environment(), visible, wanted) ==
      DeviceKind::gpu)
    return std::forward<Program>(program)(NcclComm{world});
#else
  detail::choose_device(detail::state_of(world).current_environment(), std::nullopt, wanted);
#endif
  return std::forward<Program>(program)(CpuComm{world});
}

}  // namespace LOCKSTEP_DEVICES

}  // namespace lockstep::inline v0_1
