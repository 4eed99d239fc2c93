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

#include <fmt/format.h>

#include "lockstep/error.hpp"
#include "lockstep/world/detail/new_file.hpp"

namespace lockstep::detail {

/// The partial file in which a process writes what becomes `path` once it is whole.
inline std::filesystem::path part_of(const std::filesystem::path& path, pid_t process = ::getpid()) {
  return fmt::format("{}.{}.part", path.string(), process);
}

/// The process whose partial file of `path` has the file name `name`; 0 where it is no such name.
inline pid_t process_of_part(const std::filesystem::path& path, std::string_view name) {
  const std::string begin = path.filename().string() + ".";
  pid_t process = 0;
  if (!name.starts_with(begin)) return 0;
  std::from_chars(name.data() + begin.size(), name.data() + name.size(), process);
  return process > 0 && part_of(path, process).filename() == name ? process : 0;
}

/// Removes the partial files of `path` that killed processes have left: this user's regular files of exactly
/// the name that `part_of` gives, unchanged for an hour, of a process that does not run on this host. Any
/// other entry of the folder, which is the user's, stays as it is.
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
    ::unlink(entry->path().c_str());  // which removes no folder, whatever has the name by now
  }
}

/// Makes the file `path` whole or not at all: `fill(part)` overwrites the empty file `part` beside it, which
/// then takes its name. What `fill` throws leaves `path` as it was. Throws DataError where the folder cannot
/// be written.
template <class Fill>
void make_file_whole(const std::filesystem::path& path, Fill&& fill) {
  remove_stale_parts(path);
  const std::filesystem::path part = part_of(path);
  const auto refuse = [&] {
    throw DataError(fmt::format("{}: cannot be written: {}", path.string(), std::strerror(errno)));
  };
  const int created = open_new_file(part.c_str());
  if (created < 0) refuse();
  ::close(created);
  try {
    fill(part);
    if (std::rename(part.c_str(), path.c_str()) != 0) refuse();
  } catch (...) {
    ::unlink(part.c_str());
    throw;
  }
}

}  // namespace lockstep::detail
