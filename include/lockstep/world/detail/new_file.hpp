#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace lockstep::detail {

/// Creates the temporary file `path` and opens it for writing; returns its descriptor, or -1 with errno set.
/// The file is always a new one: neither the target of a symbolic link nor a file that another user has
/// placed there is ever opened. A temporary file that an earlier process of the same id has left is replaced.
inline int open_new_file(const char* path, mode_t mode = 0666) {
  constexpr int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  const int file = ::open(path, flags, mode);
  // Removes a link itself, never its target, and no folder.
  if (file >= 0 || errno != EEXIST || ::unlink(path) != 0) return file;
  return ::open(path, flags, mode);
}

}  // namespace lockstep::detail
