#pragma once

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "lockstep/comm/detail/gloo_sockets.hpp"
#include "lockstep/comm/detail/sigpipe_guard.hpp"
#include "lockstep/comm/gloo_options.hpp"
#include "lockstep/detail/process_group_gloo.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// The network interfaces that Gloo binds to. Throws UsageError naming one that it cannot use.
inline std::vector<std::shared_ptr<gloo::transport::Device>> gloo_devices(const World& world,
                                                                          const GlooOptions& options) {
  std::string interfaces = options.interfaces;
  if (const char* chosen = std::getenv("GLOO_SOCKET_IFNAME"); interfaces.empty() && chosen)
    interfaces = chosen;
  std::vector<std::shared_ptr<gloo::transport::Device>> devices;
  std::size_t begin = 0;
  while (begin < interfaces.size()) {
    const std::size_t end = std::min(interfaces.find(',', begin), interfaces.size());
    const std::string interface = interfaces.substr(begin, end - begin);
    begin = end + 1;
    if (interface.empty()) continue;
    try {
      devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(interface));
    } catch (const std::exception&) {
      throw UsageError(
          fmt::format("Gloo cannot use the network interface '{}': set GLOO_SOCKET_IFNAME to one that `ip "
                      "addr` shows with an "
                      "address",
                      interface));
    }
  }
  if (!devices.empty()) return devices;
  // A host's name often leads nowhere, and the loopback is there always.
  if (world.single_host()) return {c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
  // A name of this host may be one for its loopback, as on Debian: the interface that leads to the others.
  if (const auto address = world.address_to_others(); !address.empty())
    return {c10d::ProcessGroupGloo::createDeviceForHostname(address)};
  return {c10d::ProcessGroupGloo::createDefaultDevice()};
}

/// A process group of `size` ranks that meet in `store`, of which this process is `rank`. Blocks until all
/// have come.
inline c10::intrusive_ptr<c10d::ProcessGroupGloo> connect_gloo(const StorePtr& store, int rank, int size,
                                                               const World& world,
                                                               const GlooOptions& options) {
  const SigpipeGuard guard;  // for Gloo's threads, which start here
  const GlooSocketScope sockets;
  // Gloo's own timeout says less than ours, so it comes later.
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout + std::chrono::seconds(10));
  gloo->threads = options.threads;
  gloo->devices = gloo_devices(world, options);
  auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, std::move(gloo));
  // The destructor waits for it: else a rank that leaves at once would hang up on one that is still
  // connecting.
  group->barrier();
  return group;
}

}  // namespace lockstep::detail
