#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <system_error>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/detail/temporary_file.hpp"
#include "lockstep/files.hpp"

namespace lockstep::inline v0_1::detail {

/// Returns the kind of `path` if a file cannot replace it, such as "a folder". Returns an empty string for a
/// regular file or a missing path. Renaming a file over a device, such as /dev/null, would remove the device
/// for the whole machine.
inline std::string kind_if_no_file(const std::filesystem::path& path) {
  std::error_code error;
  const auto type = std::filesystem::status(path, error).type();
  if (error == std::errc::too_many_symbolic_link_levels) return "a link that leads to itself";
  using enum std::filesystem::file_type;
  if (type == directory) return "a folder";
  if (type == fifo) return "a pipe";
  if (type == socket) return "a socket";
  if (type == block || type == character) return "a device";
  return type == unknown ? "no regular file" : "";
}

/// Returns the target of the symbolic links at `path`, which need not exist, so that saving keeps the links.
inline std::filesystem::path behind_links(std::filesystem::path path) {
  std::error_code error;
  for (int hops = 0; hops < 40 && std::filesystem::is_symlink(path, error); ++hops)
    path = path.parent_path() / std::filesystem::read_symlink(path, error);
  return path;
}

}  // namespace lockstep::inline v0_1::detail

namespace lockstep::inline v0_1 {

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
  int reason = 0;
  {
    detail::TemporaryFile file(path);
    if (!file.open() || !detail::write_all(file.get(), bytes) || ::fsync(file.get()) != 0 ||
        !file.replace(path))
      reason = errno;
  }  // the file is removed before an exception that nobody catches, which unwinds nothing
  if (reason != 0)
    throw CheckpointError(
        detail::formatted("could not write {} bytes to '{}': {}; the previous file is unchanged",
                          bytes.size(), path.string(), detail::reason_of(reason)));
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

}  // namespace lockstep::inline v0_1
