#pragma once

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include <fmt/format.h>

namespace lockstep::detail {

/// Where this process makes what will be `path` once it is whole.
inline std::filesystem::path part_of(const std::filesystem::path& path) {
  return fmt::format("{}.{}.part", path.string(), ::getpid());
}

/// Removes from `folder` the parts that killed processes have left there: those that nobody has written to
/// for an hour, and whose process is not on this host.
inline void remove_stale_parts(const std::filesystem::path& folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  for (auto entry = fs::directory_iterator(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    // "name.1234.part" and "name.1234.part.errors"
    fs::path name = entry->path().filename();
    if (name.extension() == ".errors") name = name.stem();
    if (name.extension() != ".part") continue;
    const std::string number = name.stem().extension().string();
    const long pid = number.size() > 1 ? std::strtol(number.c_str() + 1, nullptr, 10) : 0;
    if (pid <= 0 || kill(static_cast<pid_t>(pid), 0) == 0 || errno != ESRCH) continue;
    std::error_code unknown;
    const auto written = fs::last_write_time(entry->path(), unknown);
    if (unknown || fs::file_time_type::clock::now() - written < std::chrono::hours(1)) continue;
    fs::remove_all(entry->path(), unknown);
  }
}

}  // namespace lockstep::detail
