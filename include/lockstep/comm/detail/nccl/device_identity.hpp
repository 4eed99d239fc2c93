#pragma once

#include <cstddef>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/detail/membership.hpp"
#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/printable.hpp"

namespace lockstep::detail {

/// The first NCCL version in which ranks may share a GPU, if NCCL_MULTI_RANK_GPU_ENABLE is set.
inline constexpr int first_nccl_with_shared_gpus = 23000;

/// Returns the device identity that ranks exchange at rendezvous: the device, its NCCL version, and whether
/// the user allows sharing it.
template <NcclDevice D>
std::string identity_text(const D& device) {
  return detail::formatted("{} {} {}", device.identity(), device.version(), device.shares_devices() ? 1 : 0);
}

/// Returns the identity of a rank without a device, with the reason.
inline std::string no_device_text(const std::string& reason) {
  return "!" + reason;
}

/// Checks the device identities of all ranks, by rank in the group: a rank without a GPU, two ranks on one
/// GPU and different NCCL versions would all hang. `ranks` are global ranks. Throws the same UsageError or
/// MismatchError on every rank.
inline void check_identities(const std::vector<std::string>& identities, const std::vector<int>& ranks,
                             int own_rank) {
  struct Identity {
    std::string device;
    int version = 0;
    bool shares = false;
  };
  std::vector<Identity> all;
  for (const std::string& text : identities) {
    if (text.starts_with("!")) throw UsageError(printable(text.substr(1)), own_rank);
    const auto blank = text.find(' ');
    all.push_back({printable(text.substr(0, blank)), std::stoi(text.substr(blank)), text.ends_with(" 1")});
  }
  std::map<std::string, std::size_t> owners;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].version != all[0].version)
      throw MismatchError(
          detail::formatted(
              "rank {} has NCCL {} and rank {} has NCCL {}: run all ranks with one LibTorch and NCCL",
              ranks[0], version_text(all[0].version), ranks[i], version_text(all[i].version)),
          own_rank);
    const auto [owner, alone] = owners.emplace(all[i].device, i);
    const Identity &one = all[owner->second], &other = all[i];
    if (alone || (one.shares && other.shares && other.version >= first_nccl_with_shared_gpus)) continue;
    std::string remedy = "start one rank a GPU, and give each its own LOCAL_RANK or CUDA_VISIBLE_DEVICES";
    if (one.shares && other.shares)
      remedy = detail::formatted(
          "NCCL_MULTI_RANK_GPU_ENABLE lets them from NCCL {} on, and this is {}: install a "
          "newer torch, or start one rank a GPU",
          version_text(first_nccl_with_shared_gpus), version_text(other.version));
    else if (one.shares || other.shares)
      remedy = detail::formatted(
          "NCCL_MULTI_RANK_GPU_ENABLE is set for rank {} and not for rank {}: set it for "
          "all, or start one rank a GPU",
          ranks[one.shares ? owner->second : i], ranks[one.shares ? i : owner->second]);
    throw UsageError(detail::formatted("ranks {} and {} are on one GPU ({}): {}", ranks[owner->second],
                                       ranks[i], other.device, remedy),
                     own_rank);
  }
}

/// Opens the device of this rank as `options` select it. Collective: the ranks exchange their device
/// identities. Every rank throws the same UsageError or MismatchError if a rank has no device, if its NCCL is
/// too old for `options.buffers`, or if two identities conflict.
template <NcclDevice D>
D open_together(Membership& membership, const NcclOptions& options) {
  const World& world = membership.world();
  std::optional<D> device;
  std::string identity;
  try {
    device.emplace(D::open(world, options.device));
    identity = options.buffers == NcclBuffers::torch || device->has_buffers()
                   ? identity_text(*device)
                   : no_device_text(no_buffers_text(device->version()));
  } catch (const std::exception& error) {
    identity = no_device_text(first_line(error));
  }
  check_identities(membership.join(identity), membership.ranks(), world.rank());
  return *device;
}

}  // namespace lockstep::detail
