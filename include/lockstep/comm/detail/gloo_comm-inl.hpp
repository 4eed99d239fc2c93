#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <chrono>
#include <climits>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/backend_group.hpp"
#include "lockstep/comm/detail/process_group_comm-inl.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/libtorch_version.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/detail/process_group_gloo.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/detail/world_state.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1 {
namespace detail {

using Descriptors = std::set<std::pair<int, std::string>>;

/// Returns this process's descriptors that are not in `before`, and what they refer to: "socket:[4711]",
/// "anon_inode:[eventpoll]".
inline Descriptors opened_since(const Descriptors& before) {
  Descriptors found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    std::pair opened(std::atoi(entry.path().filename().c_str()),
                     std::filesystem::read_symlink(entry.path(), error).string());
    if (!before.contains(opened)) found.insert(std::move(opened));
  }
  return found;
}

inline int socket_option(int fd, int name) {
  int value = -1;
  socklen_t length = sizeof value;
  getsockopt(fd, SOL_SOCKET, name, &value, &length);
  return value;
}

/// Keeps the TCP sockets among `opened`, which Gloo opens without SOCK_CLOEXEC, from being inherited by child
/// processes: a helper process that outlives its rank would hold the rank's connections open, and no other
/// rank would see the rank die.
inline void keep_from_children(const Descriptors& opened) {
  for (const auto& [fd, target] : opened) {
    if (socket_option(fd, SO_PROTOCOL) != IPPROTO_TCP || (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0) continue;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    close_in_children(fd);
  }
}

/// ProcessGroupGloo, which has no `abort`, with its connections. Its destructor waits for the operations in flight.
class GlooBackend : public c10d::ProcessGroupGloo, public AbortableBackend {
 public:
  /// `loops`: the epoll instances of the devices in `options`, which watch all connections. If they are
  /// unknown it is empty, and abort() a no-op.
  GlooBackend(const StorePtr& store, int rank, int size, c10::intrusive_ptr<Options> options,
              std::vector<int> loops)
      : ProcessGroupGloo(store, rank, size, std::move(options)), loops_(std::move(loops)) {}

  /// Gloo forgets an operation whose transfer the end of a connection cuts off (Pair::signalException in
  /// gloo/transport/tcp/pair.cc passes over the unbound buffers of `tx_` and `rx_`): its thread, and with it the
  /// backend, then waits for the timeout of the operation. So transfers between live ranks may complete first, and
  /// reading ends, not writing. One with a killed rank keeps its thread, seldom: 1 of 76 groups with 64 MiB in flight.
  void abort() override {
    const auto end = std::chrono::steady_clock::now() + most_transfer;
    for (bool moving = true; moving && std::chrono::steady_clock::now() < end;) {
      moving = false;
      for_connections([&](int fd, bool sends) {
        tcp_info info{};
        int unread = 0;
        socklen_t length = sizeof info;
        getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length);
        ioctl(fd, FIONREAD, &unread);
        if (sends || unread > 0 || info.tcpi_last_data_recv < quiet_transfer.count()) moving = true;
      });
      if (moving) std::this_thread::sleep_for(abort_pause);
    }
    for_connections([](int fd, bool) { ::shutdown(fd, SHUT_RD); });
  }

 private:
  // Calls `use(fd, sends)` for each connection. `sends`: Gloo has bytes for it that the kernel has not taken.
  // The listener is left out: Gloo's thread would end the process if that failed.
  template <class Use>
  void for_connections(const Use& use) {
    for (const int loop : loops_) {
      std::ifstream watched(formatted("/proc/self/fdinfo/{}", loop));
      for (std::string line; std::getline(watched, line);) {
        int fd = -1;
        unsigned events = 0;
        unsigned long inode = 0;
        std::sscanf(line.c_str(), "tfd: %d events: %x data: %*x pos:%*d ino:%lx", &fd, &events, &inode);
        const Descriptor copy(fcntl(fd, F_DUPFD_CLOEXEC, 3));  // its number may be another socket's by now
        if (inode > 0 && socket_inode(copy.get()) == inode && socket_option(copy.get(), SO_ACCEPTCONN) == 0)
          use(copy.get(), (events & EPOLLOUT) != 0);
      }
    }
  }

  const std::vector<int> loops_;
};

/// Returns the network interfaces that Gloo binds to. Throws UsageError, which names an interface that Gloo cannot use.
inline std::vector<std::shared_ptr<gloo::transport::Device>> gloo_devices(const World& world,
                                                                          const GlooOptions& options) {
  std::string interfaces = options.interfaces;
  if (const char* chosen = std::getenv("GLOO_SOCKET_IFNAME"); interfaces.empty() && chosen)
    interfaces = chosen;
  std::vector<std::shared_ptr<gloo::transport::Device>> devices;
  for (const std::string& interface : entries_of(interfaces)) {
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
  if (state_of(world).single_host())
    return {c10d::ProcessGroupGloo::createDeviceForHostname(loopback_address())};
  // This host's name may resolve to its loopback, as on Debian: use the address that reaches the other ranks.
  if (const auto address = state_of(world).address_to_others(); !address.empty())
    return {c10d::ProcessGroupGloo::createDeviceForHostname(address)};
  return {c10d::ProcessGroupGloo::createDefaultDevice()};
}

/// Returns the options of a group whose backends are ProcessGroupGloos.
LOCKSTEP_PROCESS_WIDE inline ProcessGroupOptions gloo_backend(const World& world,
                                                              const GlooOptions& options) {
  ProcessGroupOptions group;
  group.timeout = checked_timeout("GlooOptions", options.timeout);
  if (options.threads < 1)
    throw UsageError(
        formatted("GlooOptions: with {} threads no collective could run: give at least 1", options.threads));
  group.make_backend = [world, options, timeout = group.timeout](const StorePtr& store, int rank, int size) {
    const SigpipeGuard guard;  // for Gloo's threads, which start here
    // Gloo's own timeout error says less than ours, so it must expire later.
    auto gloo = c10d::ProcessGroupGloo::Options::create(timeout + backend_slack);
    gloo->threads = static_cast<int>(std::min<std::int64_t>(options.threads, INT_MAX));
    std::vector<int> loops;
    static std::mutex one_at_a_time;
    std::unique_lock lock(one_at_a_time);
    const Descriptors before = opened_since({});
    gloo->devices = gloo_devices(world, options);
    for (const auto& [fd, target] : opened_since(before))
      if (target == "anon_inode:[eventpoll]") loops.push_back(fd);
    lock.unlock();
    if (loops.size() != gloo->devices.size()) loops.clear();  // another thread has opened one
    auto backend = c10::make_intrusive<GlooBackend>(store, rank, size, std::move(gloo), std::move(loops));
    keep_from_children(opened_since(before));
    // ProcessGroupGloo's destructor waits for this barrier. Without it a rank that leaves at once would
    // disconnect from a rank that is still connecting.
    backend->barrier();
    return backend;
  };
  return group;
}

}  // namespace detail

LOCKSTEP_INLINE GlooComm::GlooComm(const World& world, GlooOptions options)
    : HostComm(
          detail::world_group("the constructor of GlooComm", world, detail::gloo_backend(world, options))) {}

}  // namespace lockstep::inline v0_1
