#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>

#include "lockstep/detail/descriptor.hpp"

namespace lockstep::inline v0_1::detail {

/// How long a writer waits for another one of the same file.
inline constexpr std::chrono::seconds file_lock_timeout{60};

/// Locks an open file without waiting. Returns false, with errno EWOULDBLOCK, if another process holds the
/// lock. A file system without locks does not protect writers of one file from each other.
inline bool try_lock(int descriptor) {
  return ::flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

/// The new file that replaces another one: beside it, always with the same name, and locked while it is
/// written. A killed process leaves one file at most, which the next writer removes; no writer removes the
/// file of a process that lives. The file is always new: neither the target of a link nor another user's file
/// is written. It has the permissions of the file that it replaces.
class TemporaryFile {
 public:
  static constexpr const char* suffix = ".lockstep.tmp";

  explicit TemporaryFile(const std::filesystem::path& path, std::chrono::seconds timeout = file_lock_timeout)
      : name_(path.string() + suffix) {
    struct ::stat replaced {};
    const bool replaces = ::stat(path.c_str(), &replaced) == 0;
    const mode_t mode = replaces ? replaced.st_mode & 0777 : 0666;
    const auto until = std::chrono::steady_clock::now() + timeout;
    while (!file_.open()) {
      if (std::chrono::steady_clock::now() >= until) {
        errno = EWOULDBLOCK;
        return;
      }
      Descriptor made(::open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode));
      if (made.open()) {
        // Between the two calls another writer may have taken the file for one that was left.
        if (try_lock(made.get()) && has_name(made)) file_ = std::move(made);
      } else if (errno != EEXIST || !remove_left()) {
        return;
      }
    }
    if (replaces) ::fchmod(file_.get(), mode);  // the bits that the umask takes from a new file
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (file_.open()) ::unlink(name_.c_str());
  }

  /// Returns whether the file was created; if not, errno is set.
  [[nodiscard]] bool open() const { return file_.open(); }
  [[nodiscard]] int get() const { return file_.get(); }
  [[nodiscard]] const std::string& name() const { return name_; }

  /// Renames the file to `path`. Returns false, with errno set, if that fails.
  bool replace(const std::filesystem::path& path) {
    return ::rename(name_.c_str(), path.c_str()) == 0 && file_.close();
  }

 private:
  [[nodiscard]] bool has_name(const Descriptor& file) const {
    struct ::stat own {};
    struct ::stat named {};
    return ::fstat(file.get(), &own) == 0 && ::lstat(name_.c_str(), &named) == 0 &&
           own.st_dev == named.st_dev && own.st_ino == named.st_ino;
  }

  /// Removes the file of this name if nobody writes it, else waits a little. Returns false, with errno set,
  /// if that fails.
  [[nodiscard]] bool remove_left() const {
    constexpr int flags = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    Descriptor left(::open(name_.c_str(), O_WRONLY | flags));  // NFS locks no file that is open for reading
    if (!left.open() && errno == EACCES) left = Descriptor(::open(name_.c_str(), O_RDONLY | flags));
    if (!left.open()) {
      if (errno == ENOENT) return true;
      const bool link_or_pipe = errno == ELOOP || errno == ENXIO;
      return link_or_pipe && ::unlink(name_.c_str()) == 0;
    }
    if (try_lock(left.get())) return !has_name(left) || ::unlink(name_.c_str()) == 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return true;
  }

  std::string name_;
  Descriptor file_;
};

inline std::string reason_of(int error) {
  return error == EWOULDBLOCK ? "another process is writing it" : std::strerror(error);
}

}  // namespace lockstep::inline v0_1::detail
