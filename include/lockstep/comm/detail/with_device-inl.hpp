#pragma once

#include <chrono>
#include <string>

#include "lockstep/comm/detail/group.hpp"
#include "lockstep/comm/with_device.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/host_share.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/timeouts.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE DeviceKind choose_device(const Environment& rank, std::optional<int> visible,
                                         std::optional<DeviceKind> wanted, const Variables& variables) {
  if (const auto text = variables("LOCKSTEP_DEVICE"); text && !wanted && *text != "auto") {
    if (*text != "cpu" && *text != "gpu")
      throw UsageError(formatted("LOCKSTEP_DEVICE={} is unknown: it must be auto, cpu or gpu", *text));
    wanted = *text == "gpu" ? DeviceKind::gpu : DeviceKind::cpu;
  }
  if (wanted == DeviceKind::cpu || (!wanted && visible.value_or(0) == 0)) return DeviceKind::cpu;
  if (!visible)
    throw UsageError(
        formatted("rank {} is to compute on a GPU, but this program was built without CUDA: link "
                  "lockstep::cuda, or compute on CPUs",
                  rank.rank));
  gpu_of_rank(rank, *visible, std::nullopt, variables);
  return DeviceKind::gpu;
}

LOCKSTEP_INLINE void agree_on_device(const World& world, DeviceKind kind) {
  if (world.size() == 1) return;
  const std::string own = detail::formatted("{} {}", kind == DeviceKind::gpu ? "GPUs" : "CPUs", world.rank());
  Group group(world, {world.rank()}, "lockstep/device", default_timeout(std::chrono::minutes(5)));
  const std::string first = group.ask(Group::making(), [&](RunClient run) {
    const auto call = run.add(store_keys::calls_of_rank("device", world.rank()), 1);
    return run.compare_set(formatted("lockstep/device/{}", call), {}, own);
  });
  if (first.substr(0, 4) != own.substr(0, 4))
    throw MismatchError(
        formatted("rank {} would compute on {}, and rank {} on {}: set LOCKSTEP_DEVICE=cpu on all of them, "
                  "or give each a GPU and a program built with CUDA",
                  first.substr(5), first.substr(0, 4), world.rank(), own.substr(0, 4)));
}

LOCKSTEP_INLINE DeviceKind agreed_device(const World& world, std::optional<int> visible,
                                         std::optional<DeviceKind> wanted) {
  const DeviceKind kind = choose_device(world.environment(), visible, wanted);
  if (kind == DeviceKind::cpu && !wanted && visible == 0 && visible_gpus() > 0)
    world.log.warning("this host has {} GPUs, of which CUDA sees none: computing on CPUs", visible_gpus());
  agree_on_device(world, kind);
  return kind;
}

}  // namespace lockstep::detail
