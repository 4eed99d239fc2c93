#pragma once

#include <sys/inotify.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace lockstep_test {

/// Sees every file and folder that any process makes in a folder, also those that have gone again.
class FolderWatch {
 public:
  explicit FolderWatch(const std::filesystem::path& folder) : fd_(inotify_init1(IN_NONBLOCK | IN_CLOEXEC)) {
    if (fd_ < 0 || inotify_add_watch(fd_, folder.c_str(), IN_CREATE) < 0)
      throw std::runtime_error("cannot watch " + folder.string());
  }
  ~FolderWatch() { close(fd_); }
  FolderWatch(const FolderWatch&) = delete;
  FolderWatch& operator=(const FolderWatch&) = delete;

  /// The names of those made since the last call.
  std::vector<std::string> made() {
    std::vector<std::string> names;
    alignas(inotify_event) char buffer[1 << 16];
    ssize_t length = 0;
    while ((length = read(fd_, buffer, sizeof buffer)) > 0)
      for (const char* at = buffer; at < buffer + length;) {
        const auto* event = reinterpret_cast<const inotify_event*>(at);
        names.emplace_back(event->name);
        at += sizeof *event + event->len;
      }
    return names;
  }

 private:
  int fd_;
};

}  // namespace lockstep_test
