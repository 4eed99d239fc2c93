#pragma once

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// Returns the path of the partial file that `process` writes and renames to `path` when it is complete.
inline std::filesystem::path part_of(const std::filesystem::path& path, pid_t process = ::getpid()) {
  return detail::formatted("{}.{}.part", path.string(), process);
}

/// Returns the process whose partial file of `path` has the file name `name`, or 0 if `name` is not a partial
/// file of `path`.
inline pid_t process_of_part(const std::filesystem::path& path, std::string_view name) {
  const std::string begin = path.filename().string() + ".";
  pid_t process = 0;
  if (!name.starts_with(begin)) return 0;
  std::from_chars(name.data() + begin.size(), name.data() + name.size(), process);
  return process > 0 && part_of(path, process).filename() == name ? process : 0;
}

/// Removes the partial files of `path` that killed processes have left: regular files of this user with
/// exactly the name that `part_of` returns, unmodified for an hour, of a process that does not run on this
/// host. Leaves all other entries of the folder in place.
inline void remove_stale_parts(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  for (auto entry = fs::directory_iterator(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const pid_t process = process_of_part(path, entry->path().filename().string());
    if (process == 0 || kill(process, 0) == 0 || errno != ESRCH) continue;
    struct stat file {};
    if (lstat(entry->path().c_str(), &file) != 0 || !S_ISREG(file.st_mode) || file.st_uid != geteuid() ||
        std::time(nullptr) - file.st_mtime < 3600)
      continue;
    ::unlink(entry->path().c_str());  // never removes a folder, even if one has taken the name by now
  }
}

/// Creates the file `path` atomically: `fill(part)` writes the empty partial file `part` beside it, which is
/// then renamed. If `fill` throws, `path` is unchanged. Throws DataError if the folder is not writable.
template <class Fill>
void make_file_whole(const std::filesystem::path& path, Fill&& fill) {
  remove_stale_parts(path);
  const std::filesystem::path part = part_of(path);
  const auto refuse = [&] {
    throw DataError(detail::formatted("{}: cannot be written: {}", path.string(), std::strerror(errno)));
  };
  if (!open_new_file(part.c_str()).open()) refuse();
  try {
    fill(part);
    if (std::rename(part.c_str(), path.c_str()) != 0) refuse();
  } catch (...) {
    ::unlink(part.c_str());
    throw;
  }
}

}  // namespace lockstep::detail
