#pragma once

#include <chrono>
#include <string>

#include "lockstep/comm/detail/membership.hpp"
#include "lockstep/comm/with_device.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/cpu_affinity.hpp"
#include "lockstep/world/detail/gpus.hpp"
#include "lockstep/world/detail/store.hpp"
#include "lockstep/world/detail/store_keys.hpp"
#include "lockstep/world/detail/timeouts.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::optional<DeviceKind> device_variable(const Variables& variables) {
  const auto text = variables("LOCKSTEP_DEVICE");
  if (!text || *text == "auto") return std::nullopt;
  if (*text == "cpu") return DeviceKind::cpu;
  if (*text == "gpu") return DeviceKind::gpu;
  throw UsageError(detail::formatted("LOCKSTEP_DEVICE={} is unknown: it must be auto, cpu or gpu", *text));
}

LOCKSTEP_INLINE DeviceKind choose_device(const Environment& rank, std::optional<int> visible,
                                         std::optional<DeviceKind> wanted, const Variables& variables) {
  if (!wanted) wanted = device_variable(variables);
  if (wanted == DeviceKind::cpu || (!wanted && visible.value_or(0) == 0)) return DeviceKind::cpu;
  if (!visible)
    throw UsageError(
        detail::formatted("rank {} is to compute on a GPU, but this program was built without CUDA: link "
                          "lockstep::cuda, or compute on CPUs",
                          rank.rank));
  gpu_of_rank(rank, *visible, std::nullopt, variables);
  return DeviceKind::gpu;
}

LOCKSTEP_INLINE void agree_on_device(const World& world, DeviceKind kind) {
  if (world.size() == 1) return;
  const std::string own = detail::formatted("{} {}", kind == DeviceKind::gpu ? "GPUs" : "CPUs", world.rank());
  Membership membership(world, {world.rank()}, store_keys::device, default_timeout(std::chrono::minutes(5)));
  const std::string first =
      membership.at_store(Membership::making(), [rank = world.rank(), own](c10d::Store& store) {
        const std::string key = detail::formatted("{}", next_number(store, rank, "device"));
        return to_text(store.compareSet(key, {}, to_bytes(own)));
      });
  if (first.substr(0, 4) != own.substr(0, 4))
    throw MismatchError(detail::formatted(
        "rank {} would compute on {}, and rank {} on {}: set LOCKSTEP_DEVICE=cpu on all of them, "
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
