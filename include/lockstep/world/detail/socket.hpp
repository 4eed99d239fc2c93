#pragma once

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/detail/at_most.hpp"
#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/timeouts.hpp"

namespace lockstep::inline v0_1::detail {

/// Returns the inode of a socket, 0 for any other descriptor.
inline ino_t socket_inode(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode) ? status.st_ino : 0;
}

/// Adds a socket that connects this process with other ranks. A child that is forked without exec closes its copies: a
/// helper process that outlives its rank would otherwise hold the rank's connections open, and no other rank would see
/// the rank die. It does not close a descriptor number that has been reused since. Thread-safe.
LOCKSTEP_PROCESS_WIDE inline void close_in_children(int fd) {
  struct Sockets {
    std::mutex mutex;
    std::map<int, ino_t> inodes;
  };
  static Sockets* const known = new Sockets();  // never destroyed: a thread may fork while the process ends
  const auto close_all = [] {
    for (const auto& [number, inode] : known->inodes)
      if (inode != 0 && socket_inode(number) == inode) close(number);
    known->mutex.unlock();
  };
  [[maybe_unused]] static const int registered =
      pthread_atfork([] { known->mutex.lock(); }, [] { known->mutex.unlock(); }, close_all);
  const std::lock_guard lock(known->mutex);
  known->inodes[fd] = socket_inode(fd);
}

/// Returns the name of this host for messages.
inline std::string host_name() {
  char name[256] = "?";
  gethostname(name, sizeof name - 1);
  return name;
}

/// An IPv4 or IPv6 address with a port.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = sizeof(sockaddr_storage);

  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  [[nodiscard]] sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  [[nodiscard]] int family() const { return storage.ss_family; }
  /// The port, in the byte order of the network.
  [[nodiscard]] in_port_t& port() {
    return family() == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(storage).sin6_port
                                : reinterpret_cast<sockaddr_in&>(storage).sin_port;
  }
  /// Returns the numeric address without the port: "10.0.0.1".
  [[nodiscard]] std::string text() const {
    char name[NI_MAXHOST];
    return getnameinfo(get(), length, name, sizeof name, nullptr, 0, NI_NUMERICHOST) == 0 ? name : "?";
  }
  [[nodiscard]] bool loopback() const { return names_loopback(text()); }
};

/// The addresses of a host name, without duplicates, or the non-zero status of getaddrinfo.
struct Resolved {
  std::vector<SocketAddress> addresses = {};
  int status = 0;
};

inline Resolved resolve(const std::string& host, int port, int flags = 0) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  Resolved result;
  result.status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  for (const auto* at = found; at != nullptr; at = at->ai_next) {
    SocketAddress address{.length = at->ai_addrlen};
    std::memcpy(&address.storage, at->ai_addr, at->ai_addrlen);
    const auto same = [&](const SocketAddress& known) { return known.text() == address.text(); };
    if (std::none_of(result.addresses.begin(), result.addresses.end(), same))
      result.addresses.push_back(address);
  }
  if (found != nullptr) freeaddrinfo(found);
  return result;
}

/// Returns the addresses of a master host within `lookup_timeout`, whether or not a name server answers. Repeats a
/// lookup that fails temporarily, and one of an unknown name, which may be that of a pod that has just started. Throws
/// RendezvousError for a name that cannot be resolved. `origin`: what determines the name.
inline std::vector<SocketAddress> resolve_master(const std::string& host, int port,
                                                 const std::string& origin) {
  if (auto numeric = resolve(host, port, AI_NUMERICHOST); numeric.status == 0) return numeric.addresses;
  const auto until = std::chrono::steady_clock::now() + lookup_timeout - 2 * last_retry_pause;
  // getaddrinfo has no timeout: it waits for each silent name server in turn.
  const auto [addresses, status] = at_most(lookup_timeout, Resolved{.status = EAI_AGAIN}, [=] {
    for (;; std::this_thread::sleep_for(last_retry_pause)) {
      auto found = resolve(host, port);
      const bool may_come = found.status == EAI_AGAIN || (found.status == EAI_NONAME && host != host_name());
      if (!may_come || std::chrono::steady_clock::now() >= until) return found;
    }
  });
  if (status == 0) return addresses;
  throw RendezvousError(formatted(
      "the name '{}' of the master host{} cannot be resolved on {} ({}): check its spelling, or use its "
      "address",
      host, origin.empty() ? "" : " (" + origin + ")", host_name(),
      status == EAI_AGAIN ? formatted("no name server answers within {} s", lookup_timeout.count() / 1000)
                          : std::string(gai_strerror(status))));
}

/// Returns whether an interface of this host has this address.
inline bool is_own_address(SocketAddress address) {
  address.port() = 0;
  const Descriptor fd(socket(address.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return fd.open() && bind(fd.get(), address.get(), address.length) == 0;
}

struct Listener {
  Descriptor fd;
  int port = 0;
  std::string address = {};        ///< at which clients on this host reach the listener
  bool host_is_elsewhere = false;  ///< the requested host has addresses, and none of them is this host's
  std::string doubt = {};          ///< what may keep clients on other hosts from reaching it
};

/// Another socket listens on the port.
struct PortInUse : RendezvousError {
  using RendezvousError::RendezvousError;
};

/// Listens on `port` (0: any free port) for clients of `host`. Binds the loopback if `host` names it explicitly
/// (127.0.0.1, ::1, localhost), else the address of this host that `host` resolves to. Binds all interfaces if `host`
/// is empty, or resolves to several addresses, to none of this host's, or to the loopback, as in Debian's "127.0.1.1
/// nodeA": other hosts resolve such a name to another address. So does this host's own name if it cannot be resolved.
/// Throws PortInUse, or another RendezvousError, which name the port, and RendezvousError for an unknown name.
inline Listener listen_on(const std::string& host, int port, const std::string& origin = {}) {
  Listener listener;
  std::vector<SocketAddress> addresses;
  try {
    if (!host.empty()) addresses = resolve_master(host, port, origin);
  } catch (const RendezvousError&) {
    if (host != host_name()) throw;
  }
  listener.host_is_elsewhere =
      !addresses.empty() && std::none_of(addresses.begin(), addresses.end(), is_own_address);
  const bool explicitly = names_loopback(host);
  const bool all =
      addresses.empty() ||
      (!explicitly && (addresses.size() > 1 || addresses[0].loopback() || listener.host_is_elsewhere));
  if (explicitly)  // every client tries IPv4 for "localhost"
    std::stable_partition(addresses.begin(), addresses.end(),
                          [](const SocketAddress& address) { return address.family() == AF_INET; });
  if (all) {  // one socket for both families if the host has IPv6, IPv4 alone otherwise
    addresses = resolve("::", port, AI_NUMERICHOST).addresses;
    addresses.push_back(resolve("0.0.0.0", port, AI_NUMERICHOST).addresses.at(0));
  }
  SocketAddress bound;
  for (std::size_t i = 0; i < addresses.size() && !listener.fd.open(); ++i) {
    bound = addresses[i];
    listener.fd = Descriptor(socket(bound.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  }
  const int on = 1, off = 0, fd = listener.fd.get();
  if (all && bound.family() == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      bind(fd, bound.get(), bound.length) != 0 || listen(fd, 1024) != 0) {
    if (errno == EADDRINUSE)
      throw PortInUse(
          formatted("port {} is already in use on this host (`ss -ltnp 'sport = :{}'` shows by whom): use a "
                    "free one on every rank (MASTER_PORT, or the URL of World::join)",
                    port, port));
    const char* why =
        errno == EACCES ? "permission denied: use one above 1023 on every rank" : std::strerror(errno);
    throw RendezvousError(formatted("cannot listen on port {}: {}", port, why));
  }
  close_in_children(fd);
  getsockname(fd, bound.get(), &bound.length);
  listener.port = ntohs(bound.port());
  listener.address = all ? loopback_address() : bound.text();
  return listener;
}

/// Sets up a connection of the store: sends small messages at once, detects a dead peer host within minutes,
/// and keeps the socket out of forked children.
inline void tune_connection(int fd) {
  close_in_children(fd);
  const int options[][3] = {{IPPROTO_TCP, TCP_NODELAY, 1},
                            {SOL_SOCKET, SO_KEEPALIVE, 1},
                            {IPPROTO_TCP, TCP_KEEPIDLE, 60},
                            {IPPROTO_TCP, TCP_KEEPINTVL, 10},
                            {IPPROTO_TCP, TCP_KEEPCNT, 6}};
  for (const auto& [level, option, value] : options) setsockopt(fd, level, option, &value, sizeof value);
}

/// Waits for `events` on a descriptor. Returns false at `until`.
inline bool poll_until(int fd, short events, std::chrono::steady_clock::time_point until) {
  for (pollfd polled{fd, events, 0};;) {
    const auto left = std::chrono::ceil<Milliseconds>(until - std::chrono::steady_clock::now()).count();
    const int ready = poll(&polled, 1, static_cast<int>(std::clamp<long>(left, 0, 3'600'000)));
    if (ready > 0 || left <= 0) return ready > 0;
  }
}

/// A non-blocking connection to host:port, or the reason why the attempt failed.
struct ConnectAttempt {
  Descriptor fd;
  std::string reason;
};

/// Tries each address of `host` once, at most for `attempt_timeout` and until `until`. Throws RendezvousError
/// for a name that cannot be resolved.
inline ConnectAttempt try_connect(const std::string& host, int port,
                                  std::chrono::steady_clock::time_point until,
                                  const std::string& origin = {}) {
  const auto addresses = resolve_master(host, port, origin);
  until = std::min(until, std::chrono::steady_clock::now() + attempt_timeout);
  ConnectAttempt attempt;
  auto left = static_cast<int>(addresses.size());
  for (const SocketAddress& address : addresses) {
    const auto now = std::chrono::steady_clock::now(), share = now + std::max(until - now, {}) / left--;
    Descriptor fd(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    int error = fd.open() && connect(fd.get(), address.get(), address.length) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      error = ETIMEDOUT;
      socklen_t length = sizeof error;
      if (poll_until(fd.get(), POLLOUT, share)) getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    }
    if (error == 0) {
      tune_connection(fd.get());
      return {std::move(fd), {}};
    }
    attempt.reason = error == ECONNREFUSED ? "it refuses the connection: nothing listens there"
                     : error == ETIMEDOUT  ? "it does not answer: the host is down, or a firewall is between"
                                           : formatted("it cannot be reached ({})", std::strerror(error));
  }
  return attempt;
}

/// Returns the address that this host sends from to reach `host`, empty if there is no route. Connecting a
/// datagram socket sends nothing.
inline std::string source_address_towards(const std::string& host) {
  for (const SocketAddress& address : resolve(host, 9).addresses) {
    const Descriptor fd(socket(address.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
    SocketAddress own;
    if (fd.open() && connect(fd.get(), address.get(), address.length) == 0 &&
        getsockname(fd.get(), own.get(), &own.length) == 0)
      return own.text();
  }
  return {};
}

/// Returns the address at which hosts that reach `host` reach this host: `host` itself if it is this host.
inline std::string address_towards(const std::string& host) {
  const auto own = source_address_towards(host);
  const auto found = resolve(host, 9).addresses;
  const auto is_own = [&](const SocketAddress& address) { return address.text() == own; };
  return own.empty() || std::any_of(found.begin(), found.end(), is_own) ? host : own;
}

}  // namespace lockstep::inline v0_1::detail
