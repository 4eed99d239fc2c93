#pragma once

#include "lockstep/comm/with_device.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/world/detail/host_share.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE DeviceKind choose_device(const Environment& rank, std::optional<int> visible,
                                         std::optional<DeviceKind> wanted, const Variables& variables) {
  if (const auto text = variables("LOCKSTEP_DEVICE"); text && !wanted && *text != "auto") {
    if (*text != "cpu" && *text != "gpu")
      throw UsageError(formatted("LOCKSTEP_DEVICE={} is unknown: it must be auto, cpu or gpu", *text));
    wanted = *text == "gpu" ? DeviceKind::gpu : DeviceKind::cpu;
  }
  if (!wanted && visible == 0 && visible_gpus() > 0)
    Log(rank.rank).warning("this host has {} GPUs, of which CUDA sees none: computing on CPUs",
                           visible_gpus());
  if (wanted == DeviceKind::cpu || (!wanted && visible.value_or(0) == 0)) return DeviceKind::cpu;
  if (!visible)
    throw UsageError(
        formatted("rank {} is to compute on a GPU, but this program was built without CUDA: link "
                  "lockstep::cuda, or compute on CPUs",
                  rank.rank));
  gpu_of_rank(rank, *visible, std::nullopt, variables);
  return DeviceKind::gpu;
}

}  // namespace lockstep::detail
