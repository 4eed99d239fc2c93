#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace lockstep::detail {

/// Creates the temporary file `path` and opens it for writing. Returns its descriptor, or -1 with errno set.
/// The file is always new: the function never opens the target of a symbolic link or another user's file. It
/// replaces a temporary file that an earlier process with the same id has left.
inline int open_new_file(const char* path, mode_t mode = 0666) {
  constexpr int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  const int file = ::open(path, flags, mode);
  // unlink removes a link itself, never its target, and no directory.
  if (file >= 0 || errno != EEXIST || ::unlink(path) != 0) return file;
  return ::open(path, flags, mode);
}

}  // namespace lockstep::detail
