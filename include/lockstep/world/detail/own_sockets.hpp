#pragma once

#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "lockstep/detail/linkage.hpp"

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

}  // namespace lockstep::detail
