#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <utility>

#include "lockstep/world/detail/own_sockets.hpp"

namespace lockstep::detail {

/// Keeps Gloo's TCP sockets from being inherited by child processes. Gloo opens them without SOCK_CLOEXEC. A
/// helper process that outlives its rank would hold the rank's connections open, and no other rank would see
/// the rank die.
///
/// A GlooSocketScope surrounds the connecting of a process group. It makes the TCP sockets that appear
/// meanwhile close-on-exec and adds them to OwnSockets. This includes a socket that another thread of the
/// program opens at that time without SOCK_CLOEXEC. Scopes may overlap: the scope that ends first marks the
/// sockets that exist by then.
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

}  // namespace lockstep::detail
