#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/backend_group.hpp"
#include "lockstep/comm/detail/process_group_comm-inl.hpp"
#include "lockstep/comm/detail/sigpipe_guard.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/detail/process_group_gloo.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep {
namespace detail {

/// Keeps Gloo's TCP sockets, which it opens without SOCK_CLOEXEC, from being inherited by child processes: a helper
/// process that outlives its rank would hold the rank's connections open, and no other rank would see the rank die.
/// Marks the TCP sockets that appear while it lives, and adds them to OwnSockets. Scopes may overlap.
class GlooSocketScope {
 public:
  GlooSocketScope() : before_(tcp_sockets()) {}
  ~GlooSocketScope() {
    for (const auto& [fd, inode] : tcp_sockets()) {
      const auto old = before_.find(fd);
      if (old != before_.end() && old->second == inode) continue;
      fcntl(fd, F_SETFD, FD_CLOEXEC);
      OwnSockets::add(fd);
    }
  }
  GlooSocketScope(const GlooSocketScope&) = delete;
  GlooSocketScope& operator=(const GlooSocketScope&) = delete;

 private:
  using Sockets = std::map<int, ino_t>;

  // Returns the TCP sockets of this process that a child process would inherit.
  static Sockets tcp_sockets() {
    Sockets found;
    const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), closedir);
    while (const dirent* entry = folder ? readdir(folder.get()) : nullptr) {
      const int fd = std::atoi(entry->d_name);
      const ino_t inode = socket_inode(fd);
      int family = 0, type = 0;
      socklen_t length = sizeof(int);
      if (inode == 0 || (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0 ||
          getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &length) != 0 ||
          getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0)
        continue;
      if ((family == AF_INET || family == AF_INET6) && type == SOCK_STREAM) found[fd] = inode;
    }
    return found;
  }

  Sockets before_;
};

/// Returns the network interfaces that Gloo binds to. Throws UsageError, which names an interface that Gloo cannot use.
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
          detail::formatted("Gloo cannot use the network interface '{}': set GLOO_SOCKET_IFNAME to one that "
                            "`ip addr` shows with an address",
                            interface));
    }
  }
  if (!devices.empty()) return devices;
  // A host's name may not resolve to a usable address; the loopback always exists.
  if (world.single_host()) return {c10d::ProcessGroupGloo::createDeviceForHostname(loopback_address())};
  // This host's name may resolve to its loopback, as on Debian: use the address that reaches the other ranks.
  if (const auto address = world.address_to_others(); !address.empty())
    return {c10d::ProcessGroupGloo::createDeviceForHostname(address)};
  return {c10d::ProcessGroupGloo::createDefaultDevice()};
}

/// Connects a process group of `size` ranks through `store`. Blocks until all ranks have joined.
inline c10::intrusive_ptr<c10d::ProcessGroupGloo> connect_gloo(const StorePtr& store, int rank, int size,
                                                               const World& world,
                                                               const GlooOptions& options) {
  const SigpipeGuard guard;  // for Gloo's threads, which start here
  const GlooSocketScope sockets;
  // Gloo's own timeout error says less than ours, so it must expire later.
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout + std::chrono::seconds(10));
  gloo->threads = options.threads;
  gloo->devices = gloo_devices(world, options);
  auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, std::move(gloo));
  // ProcessGroupGloo's destructor waits for this barrier. Without it a rank that leaves at once would
  // disconnect from a rank that is still connecting.
  group->barrier();
  return group;
}

/// Returns the options of a group whose backends are ProcessGroupGloos.
inline ProcessGroupOptions gloo_backend(const World& world, const GlooOptions& gloo) {
  ProcessGroupOptions options;
  options.timeout = gloo.timeout;
  options.make_backend = [world, gloo](const StorePtr& store, int rank, int size) {
    return c10::intrusive_ptr<c10d::Backend>(connect_gloo(store, rank, size, world, gloo));
  };
  return options;
}

}  // namespace detail

LOCKSTEP_INLINE GlooComm::GlooComm(const World& world, GlooOptions options)
    : GlooComm([&] {
        const detail::CallScope scope("the constructor of GlooComm");
        return std::make_shared<detail::BackendGroup>(
            world, detail::all_ranks(world.size()),
            detail::Membership::next_name(world, "comm", detail::checked(options).timeout),
            detail::gloo_backend(world, detail::checked(options)));
      }()) {}

LOCKSTEP_INLINE GlooComm::GlooComm(std::shared_ptr<detail::BackendGroup> group)
    : ProcessGroupComm(std::move(group)) {}

LOCKSTEP_INLINE std::optional<GlooComm> GlooComm::new_group(const std::vector<int>& ranks) {
  if (auto group = split_group(ranks)) return GlooComm(std::move(group));
  return std::nullopt;
}

}  // namespace lockstep
