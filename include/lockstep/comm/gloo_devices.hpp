#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "lockstep/comm/gloo_options.hpp"
#include "lockstep/detail/process_group_gloo.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// True where all ranks are known to run on this host.
inline bool on_one_host(const World& world) {
  if (world.local_size() == world.size()) return true;
  const char* master = std::getenv("MASTER_ADDR");
  const std::string_view address = master ? master : "";
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

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
  if (on_one_host(world)) return {c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
  return {c10d::ProcessGroupGloo::createDefaultDevice()};
}

}  // namespace lockstep::detail
