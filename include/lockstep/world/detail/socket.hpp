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
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/at_most.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/environment.hpp"

namespace lockstep::detail {

/// Returns the inode of a socket, 0 for any other descriptor.
inline ino_t socket_inode(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode) ? status.st_ino : 0;
}

/// The sockets that connect this process with the other ranks. A child that is forked without exec closes its
/// copies: a helper process that outlives its rank would otherwise hold the rank's connections open, and no
/// other rank would see the rank die.
///
/// Thread-safe.
class OwnSockets {
 public:
  /// Adds a socket. A child does not close a descriptor number that has been reused since.
  static void add(int fd) {
    auto& known = instance();
    const std::lock_guard lock(known.mutex_);
    known.inodes_[fd] = socket_inode(fd);
  }

 private:
  // Never destroyed: a thread may fork while the process ends.
  LOCKSTEP_PROCESS_WIDE static OwnSockets& instance() {
    static OwnSockets* known = [] {
      auto* made = new OwnSockets();
      pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                     [] {
                       for (const auto& [fd, inode] : instance().inodes_)
                         if (inode != 0 && socket_inode(fd) == inode) close(fd);
                       instance().mutex_.unlock();
                     });
      return made;
    }();
    return *known;
  }

  std::mutex mutex_;
  std::map<int, ino_t> inodes_;
};

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

  /// Returns the numeric address without the port: "10.0.0.1".
  [[nodiscard]] std::string text() const {
    char name[NI_MAXHOST];
    return getnameinfo(get(), length, name, sizeof name, nullptr, 0, NI_NUMERICHOST) == 0 ? name : "?";
  }
  [[nodiscard]] int port() const {
    return ntohs(family() == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(storage).sin6_port
                                      : reinterpret_cast<const sockaddr_in&>(storage).sin_port);
  }
  [[nodiscard]] bool loopback() const { return names_loopback(text()); }
};

/// The addresses of a host name, without duplicates, or the non-zero status of getaddrinfo.
struct Resolved {
  std::vector<SocketAddress> addresses;
  int status = 0;
};

inline Resolved resolve(const std::string& host, int port, int flags = 0) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  Resolved result;
  result.status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  for (auto* at = result.status == 0 ? found : nullptr; at != nullptr; at = at->ai_next) {
    SocketAddress address;
    std::memcpy(&address.storage, at->ai_addr, at->ai_addrlen);
    address.length = at->ai_addrlen;
    const auto same = [&](const SocketAddress& known) { return known.text() == address.text(); };
    if (std::none_of(result.addresses.begin(), result.addresses.end(), same))
      result.addresses.push_back(address);
  }
  if (result.status == 0) freeaddrinfo(found);
  return result;
}

/// Resolves a name within `timeout`, whether or not a name server answers. Repeats a lookup that fails temporarily, and
/// one of an unknown name, which may be that of a pod that has just started, unless it is this host's own.
inline Resolved resolve_within(const std::string& host, int port, std::chrono::milliseconds timeout) {
  if (auto numeric = resolve(host, port, AI_NUMERICHOST); numeric.status == 0) return numeric;
  struct Shared {
    std::mutex mutex;
    Resolved found{{}, EAI_AGAIN};
  };
  const auto shared = std::make_shared<Shared>();
  // getaddrinfo has no timeout: it waits for each silent name server in turn.
  at_most(timeout, [shared, host, port, until = std::chrono::steady_clock::now() + timeout] {
    for (;;) {
      auto found = resolve(host, port);
      const bool may_come = found.status == EAI_AGAIN || (found.status == EAI_NONAME && host != host_name());
      const bool again = may_come && std::chrono::steady_clock::now() + last_retry_pause < until;
      {
        const std::lock_guard lock(shared->mutex);
        shared->found = std::move(found);
      }
      if (!again) return;
      std::this_thread::sleep_for(last_retry_pause);
    }
  });
  const std::lock_guard lock(shared->mutex);
  return shared->found;
}

/// Throws RendezvousError for the name of a master host that resolve_within has not resolved. `origin`: what
/// determines the name.
[[noreturn]] inline void throw_unresolved(const std::string& host, int status,
                                          const RendezvousOrigin& origin) {
  throw RendezvousError(detail::formatted(
      "the name '{}' of the master host{} cannot be resolved on {} ({}): check its spelling, or {} its "
      "address",
      host, origin.text.empty() ? "" : " (" + origin.text + ")", host_name(),
      status == EAI_AGAIN
          ? detail::formatted("no name server answers within {} s", lookup_timeout.count() / 1000)
          : std::string(gai_strerror(status)),
      origin.set_host));
}

/// Returns whether an interface of this host has this address.
inline bool is_own_address(SocketAddress address) {
  if (address.family() == AF_INET6)
    reinterpret_cast<sockaddr_in6&>(address.storage).sin6_port = 0;
  else
    reinterpret_cast<sockaddr_in&>(address.storage).sin_port = 0;
  const Descriptor fd(socket(address.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return fd.open() && bind(fd.get(), address.get(), address.length) == 0;
}

struct Listener {
  Descriptor fd;
  int port = 0;
  /// The address at which clients on this host reach the listener.
  std::string address = {};
  /// True if the requested host has addresses and none of them is this host's.
  bool host_is_elsewhere = false;
};

/// The address of this host that a listener for clients of `host` binds. None means all interfaces.
///
/// The loopback, if `host` names it explicitly (127.0.0.1, ::1, localhost); otherwise the address of this host that
/// `host` resolves to. All interfaces, if `host` resolves to several addresses, to none of this host's, or is a name
/// for the loopback, as in Debian's "127.0.1.1 nodeA": other hosts resolve such a name to another address. choose_bind
/// throws RendezvousError for a name that cannot be resolved, unless it is this host's own.
struct BindChoice {
  std::vector<SocketAddress> address;  // one or none
  bool host_is_elsewhere = false;
};
inline BindChoice choose_bind(const std::string& host, int port, const RendezvousOrigin& origin = {}) {
  if (host.empty()) return {};
  const auto found = resolve_within(host, port, lookup_timeout);
  if (found.status != 0 && host != host_name()) throw_unresolved(host, found.status, origin);
  if (found.addresses.empty()) return {};
  const auto loopback = [](const SocketAddress& address) { return address.loopback(); };
  if (std::all_of(found.addresses.begin(), found.addresses.end(), loopback)) {
    if (!names_loopback(host)) return {};
    // Every client tries IPv4 for "localhost".
    const auto four = std::find_if(found.addresses.begin(), found.addresses.end(),
                                   [](const auto& address) { return address.family() == AF_INET; });
    return {{four == found.addresses.end() ? found.addresses.front() : *four}, false};
  }
  if (std::none_of(found.addresses.begin(), found.addresses.end(), is_own_address)) return {{}, true};
  if (found.addresses.size() > 1) return {};
  return {found.addresses, false};
}

/// Another socket listens on the port.
struct PortInUse : RendezvousError {
  using RendezvousError::RendezvousError;
};

/// Listens on `port` (0: any free port) for clients of `host`, see choose_bind; on all interfaces if `host`
/// is empty. Throws PortInUse, or another RendezvousError, which name the port.
inline Listener listen_on(const std::string& host, int port, const RendezvousOrigin& origin = {}) {
  const auto fail = [&](const char* what) -> Listener {
    const int reason = errno;
    if (reason == EADDRINUSE)
      throw PortInUse(detail::formatted(
          "port {} is already in use on this host (`ss -ltnp 'sport = :{}'` shows by whom): "
          "{} a free one on every rank",
          port, port, origin.set_port));
    if (reason == EACCES)
      throw RendezvousError(
          detail::formatted("cannot {} port {}: permission denied: {} one above 1023 on every rank", what,
                            port, origin.set_port));
    throw RendezvousError(detail::formatted("cannot {} port {}: {}", what, port, std::strerror(reason)));
  };
  const auto choice = choose_bind(host, port, origin);
  Listener listener;
  listener.host_is_elsewhere = choice.host_is_elsewhere;
  SocketAddress address;
  if (!choice.address.empty()) {
    address = choice.address.front();
    listener.fd = Descriptor(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  } else {
    // One socket for both families if the host has IPv6, IPv4 alone otherwise.
    listener.fd = Descriptor(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const bool six = listener.fd.open();
    if (!six) listener.fd = Descriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (six) {
      const int off = 0;
      setsockopt(listener.fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
      auto& in = reinterpret_cast<sockaddr_in6&>(address.storage);
      in.sin6_family = AF_INET6;
      in.sin6_addr = in6addr_any;
      in.sin6_port = htons(static_cast<std::uint16_t>(port));
      address.length = sizeof in;
    } else {
      auto& in = reinterpret_cast<sockaddr_in&>(address.storage);
      in.sin_family = AF_INET;
      in.sin_addr.s_addr = htonl(INADDR_ANY);
      in.sin_port = htons(static_cast<std::uint16_t>(port));
      address.length = sizeof in;
    }
  }
  if (!listener.fd.open()) return fail("open a socket for");
  OwnSockets::add(listener.fd.get());
  const int on = 1;
  setsockopt(listener.fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(listener.fd.get(), address.get(), address.length) != 0) return fail("bind");
  if (listen(listener.fd.get(), 1024) != 0) return fail("listen on");
  SocketAddress bound;
  getsockname(listener.fd.get(), bound.get(), &bound.length);
  listener.port = bound.port();
  listener.address = choice.address.empty() ? loopback_address() : bound.text();
  return listener;
}

/// Sets up a connection of the store: sends small messages at once, detects a dead peer host within minutes,
/// and keeps the socket out of forked children.
inline void tune_connection(int fd) {
  OwnSockets::add(fd);
  const int on = 1, idle = 60, interval = 10, count = 6;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
}

/// Waits for `events` on a descriptor. Returns false at `until`.
inline bool poll_until(int fd, short events, std::chrono::steady_clock::time_point until) {
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now()).count();
    pollfd polled{fd, events, 0};
    const int ready = poll(&polled, 1, static_cast<int>(std::clamp<long>(left, 0, 3'600'000)));
    if (ready > 0) return true;
    if (left <= 0) return false;
  }
}

/// A non-blocking connection to host:port, or the reason why the attempt failed.
struct ConnectAttempt {
  Descriptor fd;
  std::string reason;
};

/// Tries each address of `host` once, at most until `until`. Throws RendezvousError for a name that cannot be resolved.
inline ConnectAttempt try_connect(const std::string& host, int port,
                                  std::chrono::steady_clock::time_point until,
                                  const RendezvousOrigin& origin = {}) {
  const auto found = resolve_within(host, port, lookup_timeout);
  if (found.status != 0) throw_unresolved(host, found.status, origin);
  ConnectAttempt attempt;
  for (const SocketAddress& address : found.addresses) {
    Descriptor fd(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    int error = fd.open() && connect(fd.get(), address.get(), address.length) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      error = ETIMEDOUT;
      socklen_t length = sizeof error;
      if (poll_until(fd.get(), POLLOUT, until)) getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    }
    if (error == 0) {
      tune_connection(fd.get());
      attempt.fd = std::move(fd);
      return attempt;
    }
    attempt.reason = error == ECONNREFUSED ? "it refuses the connection: nothing listens there"
                     : error == ETIMEDOUT
                         ? "it does not answer: the host is down, or a firewall is between"
                         : detail::formatted("it cannot be reached ({})", std::strerror(error));
  }
  return attempt;
}

/// The remedy where nobody serves the address of the store that rank 0 hosts.
inline constexpr const char* start_rank_zero =
    "Start rank 0 on that host with the same WORLD_SIZE, or correct the address on every rank";

/// Calls `attempt` until it returns an empty string instead of a reason, with pauses that grow to half a
/// second. Calls `waiting(reason)` after each failure. Throws RendezvousError with the last reason and the
/// remedy after `timeout`. `where` names the store: "nodeA:29500 (MASTER_ADDR=nodeA, MASTER_PORT=29500)".
template <class Attempt, class Waiting>
void retry_at(const std::string& where, std::chrono::milliseconds timeout, Attempt attempt, Waiting waiting,
              const std::string& remedy = start_rank_zero) {
  const auto until = std::chrono::steady_clock::now() + timeout;
  for (auto pause = first_retry_pause;; pause = std::min(2 * pause, last_retry_pause)) {
    const std::string reason = attempt(until);
    if (reason.empty()) return;
    if (std::chrono::steady_clock::now() + pause >= until)
      throw RendezvousError(detail::formatted("no store at {} after {} s: {}. {}", where,
                                              std::chrono::duration<double>(timeout).count(), reason,
                                              remedy));
    waiting(reason);
    std::this_thread::sleep_for(pause);
  }
}

/// Returns the deadline of a single attempt to connect: 5 s, at most `until`.
inline std::chrono::steady_clock::time_point end_of_attempt(std::chrono::steady_clock::time_point until) {
  return std::min(until, std::chrono::steady_clock::now() + attempt_timeout);
}

/// Returns the address that this host sends from to reach `host`, empty if there is no route. Connecting a
/// datagram socket sends nothing.
inline std::string source_address_towards(const std::string& host) {
  const auto found = resolve(host, 9);
  for (const SocketAddress& address : found.addresses) {
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
  const auto found = resolve(host, 9);
  const auto own = source_address_towards(host);
  const auto is_own = [&](const SocketAddress& address) { return address.text() == own; };
  if (own.empty() || std::any_of(found.addresses.begin(), found.addresses.end(), is_own)) return host;
  return own;
}

}  // namespace lockstep::detail
