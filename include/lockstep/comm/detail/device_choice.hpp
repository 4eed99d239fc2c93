#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "lockstep/comm/detail/call_number.hpp"
#include "lockstep/comm/detail/default_timeout.hpp"
#include "lockstep/comm/detail/membership.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/gpus.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// The kind of device that a program computes on.
enum class DeviceKind { cpu, gpu };

/// Returns the value of LOCKSTEP_DEVICE, or std::nullopt if it is unset or "auto". Throws UsageError for any
/// value but auto, cpu and gpu.
inline std::optional<DeviceKind> device_variable(const Variables& variables) {
  const auto text = variables("LOCKSTEP_DEVICE");
  if (!text || *text == "auto") return std::nullopt;
  if (*text == "cpu") return DeviceKind::cpu;
  if (*text == "gpu") return DeviceKind::gpu;
  throw UsageError(detail::formatted("LOCKSTEP_DEVICE={} is unknown: it must be auto, cpu or gpu", *text));
}

/// Chooses this rank's device kind: `wanted`, else LOCKSTEP_DEVICE, else a GPU if one is visible. `visible`
/// is the number of visible CUDA devices, std::nullopt in a build without CUDA. Throws UsageError if the
/// choice is a GPU and this rank has none.
inline DeviceKind choose_device(const Environment& rank, std::optional<int> visible,
                                std::optional<DeviceKind> wanted,
                                const Variables& variables = process_variable) {
  if (!wanted) wanted = device_variable(variables);
  if (wanted == DeviceKind::cpu || (!wanted && visible.value_or(0) == 0)) return DeviceKind::cpu;
  if (!visible)
    throw UsageError(
        detail::formatted("rank {} is to compute on a GPU, but this program was built without CUDA: link "
                          "lockstep::cuda, or compute on CPUs",
                          rank.rank));
  gpu_of_rank(rank, *visible, -1, variables);
  return DeviceKind::gpu;
}

/// Checks that all ranks chose the same device kind: ranks on GPUs and ranks on CPUs would wait for each
/// other. Throws MismatchError, which names two ranks that differ. Every rank calls it.
inline void agree_on_device(const World& world, DeviceKind kind) {
  if (world.size() == 1) return;
  const std::string own = detail::formatted("{} {}", kind == DeviceKind::gpu ? "GPUs" : "CPUs", world.rank());
  Membership membership(world, {world.rank()}, "lockstep/device", default_timeout(std::chrono::minutes(5)));
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

}  // namespace lockstep::detail
