#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/files.hpp"

namespace lockstep::detail {

/// Returns the kind of `path` if a file cannot replace it, such as "a folder". Returns an empty string for a
/// regular file or a missing path. Renaming a file over a device, such as /dev/null, would remove the device
/// for the whole machine.
inline std::string kind_if_no_file(const std::filesystem::path& path) {
  std::error_code error;
  const auto type = std::filesystem::status(path, error).type();
  if (error == std::errc::too_many_symbolic_link_levels) return "a link that leads to itself";
  switch (type) {
    case std::filesystem::file_type::directory:
      return "a folder";
    case std::filesystem::file_type::fifo:
      return "a pipe";
    case std::filesystem::file_type::socket:
      return "a socket";
    case std::filesystem::file_type::block:
    case std::filesystem::file_type::character:
      return "a device";
    case std::filesystem::file_type::unknown:
      return "no regular file";
    default:
      return "";
  }
}

/// Returns the target of the symbolic links at `path`, which need not exist, so that saving keeps the links.
inline std::filesystem::path behind_links(std::filesystem::path path) {
  std::error_code error;
  for (int hops = 0; hops < 40 && std::filesystem::is_symlink(path, error); ++hops)
    path = path.parent_path() / std::filesystem::read_symlink(path, error);
  return path;
}

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
  explicit TemporaryFile(const std::filesystem::path& path) : name_(path.string() + ".lockstep.tmp") {
    struct ::stat replaced {};
    const bool replaces = ::stat(path.c_str(), &replaced) == 0;
    const mode_t mode = replaces ? replaced.st_mode & 0777 : 0666;
    const auto until = std::chrono::steady_clock::now() + file_lock_timeout;
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

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE void require_writable(const std::filesystem::path& path,
                                      std::optional<std::string_view> option) {
  const std::string where = option ? detail::formatted("{}: cannot save to '{}'", *option, path.string())
                                   : detail::formatted("cannot save to '{}'", path.string());
  if (path.empty()) throw UsageError(detail::formatted("{}: it is no file name; give one", where));
  if (const auto kind = detail::kind_if_no_file(path); !kind.empty())
    throw UsageError(detail::formatted("{}: it is {}; give the name of a file", where, kind));
  if (!detail::TemporaryFile(detail::behind_links(path)).open())
    throw UsageError(detail::formatted("{}: {}; give a path in a folder that exists and can be written",
                                       where, detail::reason_of(errno)));
}

LOCKSTEP_INLINE void write_file_atomically(const std::filesystem::path& name, std::string_view bytes) {
  if (const auto kind = detail::kind_if_no_file(name); !kind.empty())
    throw CheckpointError(
        detail::formatted("could not write {} bytes to '{}': it is {}; give the name of a file", bytes.size(),
                          name.string(), kind));
  const std::filesystem::path path = detail::behind_links(name);
  detail::TemporaryFile file(path);
  if (!file.open() || !detail::write_all(file.get(), bytes) || ::fsync(file.get()) != 0 ||
      !file.replace(path)) {
    const int reason = errno;
    throw CheckpointError(
        detail::formatted("could not write {} bytes to '{}': {}; the previous file is unchanged",
                          bytes.size(), path.string(), detail::reason_of(reason)));
  }
  // The sync of the folder makes the rename survive a power failure. Not every file system supports it.
  const auto folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  const detail::Descriptor directory(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.open()) ::fsync(directory.get());
}

LOCKSTEP_INLINE std::string read_file(const std::filesystem::path& path) {
  const auto refuse = [&](std::string_view why) {
    throw CheckpointError(detail::formatted("could not read '{}': {}", path.string(), why));
  };
  // Before opening: opening a device may have side effects.
  if (const auto kind = detail::kind_if_no_file(path); !kind.empty())
    refuse(detail::formatted("it is {}; give the name of a file", kind));
  const detail::Descriptor file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct ::stat status {};
  if (!file.open() || ::fstat(file.get(), &status) != 0) refuse(std::strerror(errno));
  if (!S_ISREG(status.st_mode)) refuse("it is no regular file; give the name of one");
  if (status.st_size == 0) refuse("it is empty; restore it from a copy");
  std::string bytes;
  try {
    bytes.resize(static_cast<std::size_t>(status.st_size));
  } catch (const std::exception&) {  // std::bad_alloc or std::length_error
    refuse(detail::formatted("there is no memory for its {} bytes", status.st_size));
  }
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = ::read(file.get(), bytes.data() + done, bytes.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(std::strerror(errno));
    if (got == 0) refuse(detail::formatted("it ended after {} of {} bytes", done, bytes.size()));
    done += static_cast<std::size_t>(got);
  }
  return bytes;
}

}  // namespace lockstep
