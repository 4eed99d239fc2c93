#pragma once

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "lockstep/error.hpp"
#include "lockstep/world/child.hpp"

namespace lockstep::detail {

struct Listener {
  Descriptor fd;
  int port = 0;
};

/// Binds and listens on `port` (0: a free one) of this host, or of its loopback only. Throws RendezvousError
/// naming the port.
inline Listener listen_on(int port, bool loopback_only) {
  const auto fail = [&](const char* what) -> Listener {
    const int reason = errno;
    if (reason == EADDRINUSE)
      throw RendezvousError(
          fmt::format("port {} is already in use on this host (`ss -ltnp 'sport = :{}'` shows by whom): "
                      "set MASTER_PORT to a free one on every rank",
                      port, port));
    throw RendezvousError(fmt::format("cannot {} port {}: {}", what, port, std::strerror(reason)));
  };
  Listener listener;
  // One socket for both families where the host has IPv6; IPv4 alone elsewhere.
  const int family = loopback_only ? AF_INET : AF_INET6;
  listener.fd = Descriptor(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const bool six = listener.fd.open() && family == AF_INET6;
  if (!listener.fd.open()) listener.fd = Descriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!listener.fd.open()) return fail("open a socket for");
  const int on = 1, off = 0;
  setsockopt(listener.fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_storage address{};
  socklen_t length;
  if (six) {
    setsockopt(listener.fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    auto& in = reinterpret_cast<sockaddr_in6&>(address);
    in.sin6_family = AF_INET6;
    in.sin6_addr = in6addr_any;
    in.sin6_port = htons(static_cast<std::uint16_t>(port));
    length = sizeof in;
  } else {
    auto& in = reinterpret_cast<sockaddr_in&>(address);
    in.sin_family = AF_INET;
    in.sin_addr.s_addr = htonl(loopback_only ? INADDR_LOOPBACK : INADDR_ANY);
    in.sin_port = htons(static_cast<std::uint16_t>(port));
    length = sizeof in;
  }
  if (bind(listener.fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) return fail("bind");
  if (listen(listener.fd.get(), 1024) != 0) return fail("listen on");
  length = sizeof address;
  getsockname(listener.fd.get(), reinterpret_cast<sockaddr*>(&address), &length);
  listener.port = ntohs(six ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                            : reinterpret_cast<sockaddr_in&>(address).sin_port);
  return listener;
}

/// Waits until something answers at host:port. Throws RendezvousError that tells an unknown name, a refused
/// connection and silence apart.
inline void wait_for_listener(const std::string& host, int port, std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  const auto left = [&] {
    return std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  };
  std::string reason;
  for (auto pause = std::chrono::milliseconds(5);;
       pause = std::min(2 * pause, std::chrono::milliseconds(500))) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (status == EAI_NONAME)
      throw RendezvousError(
          fmt::format("the name '{}' of the master host is not known here (MASTER_ADDR): check its "
                      "spelling, or use the address",
                      host));
    if (status != 0) reason = fmt::format("its name cannot be looked up ({})", gai_strerror(status));
    for (auto* at = found; at != nullptr; at = at->ai_next) {
      Descriptor fd(socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      int error = 0;
      if (connect(fd.get(), at->ai_addr, at->ai_addrlen) != 0) error = errno;
      if (error == EINPROGRESS) {
        pollfd polled{fd.get(), POLLOUT, 0};
        const auto wait = std::max<long>(1, std::min<long>(left().count(), 5000));
        error = ETIMEDOUT;
        socklen_t length = sizeof error;
        if (poll(&polled, 1, static_cast<int>(wait)) > 0)
          getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      }
      if (error == 0) {
        freeaddrinfo(found);
        return;
      }
      reason = error == ECONNREFUSED
                   ? "it refuses the connection: nothing listens there; has rank 0 been started?"
               : error == ETIMEDOUT ? "it does not answer: is it up, and is a firewall between?"
                                    : fmt::format("it cannot be reached ({})", std::strerror(error));
    }
    if (found != nullptr) freeaddrinfo(found);
    if (left() <= pause)
      throw RendezvousError(fmt::format("no store at {}:{} after {} s: {}", host, port,
                                        std::chrono::duration<double>(limit).count(), reason));
    std::this_thread::sleep_for(pause);
  }
}

/// The address under which this host is reached by those who reach `host`: the name itself where that is this
/// host.
inline std::string address_towards(const std::string& host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0 || found == nullptr) return host;
  Descriptor fd(socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  std::string result = host;
  // Connecting a datagram socket sends nothing; it only asks which way the packets would go.
  if (connect(fd.get(), found->ai_addr, found->ai_addrlen) == 0 &&
      getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &length) == 0) {
    char mine[NI_MAXHOST], theirs[NI_MAXHOST];
    if (getnameinfo(reinterpret_cast<sockaddr*>(&own), length, mine, sizeof mine, nullptr, 0,
                    NI_NUMERICHOST) == 0 &&
        getnameinfo(found->ai_addr, found->ai_addrlen, theirs, sizeof theirs, nullptr, 0, NI_NUMERICHOST) ==
            0 &&
        std::string(mine) != theirs)
      result = mine;
  }
  freeaddrinfo(found);
  return result;
}

/// The name of this host, as it is shown in messages.
inline std::string host_name() {
  char name[256] = "?";
  gethostname(name, sizeof name - 1);
  return name;
}

}  // namespace lockstep::detail
