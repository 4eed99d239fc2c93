#pragma once

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/temporary_file.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/process.hpp"

namespace lockstep::inline v0_1 {

/// A file to download, with its size in bytes. The content is not verified: a .gz file holds a CRC-32, which
/// its reader checks.
struct RemoteFile {
  std::string name;
  std::uint64_t size;
};

namespace detail {

/// Returns `lockstep-<user id>` in the temporary directory, and creates it if missing. Throws DataError unless it is a
/// folder of this user's that others cannot use, since others can create entries there.
inline std::filesystem::path temporary_cache_folder() {
  std::error_code error;
  const auto folder = std::filesystem::temp_directory_path(error) / formatted("lockstep-{}", ::geteuid());
  if (!error && ::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
    error.assign(errno, std::generic_category());
  struct stat found {};
  if (error || ::lstat(folder.c_str(), &found) != 0 || !S_ISDIR(found.st_mode) ||
      found.st_uid != ::geteuid() || (found.st_mode & 0077) != 0)
    throw DataError(formatted(
        "{}: cannot keep data there: {}; set XDG_CACHE_HOME to a folder of your own", folder.string(),
        error ? error.message() : "it is no folder of this user's that others cannot use"));
  return folder;
}

/// The result of a program.
struct ProgramEnd {
  int code;           ///< exit code; 127 if the program does not exist
  std::string error;  ///< its output on stderr
};

/// Runs a program found on PATH and blocks until it ends. It is killed if the calling thread ends.
inline ProgramEnd run_program(std::vector<std::string> words) {
  // Allocates before the fork: another thread may hold the allocator's lock.
  std::vector<char*> arguments;
  for (auto& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  // In memory, so that the program needs no file and never blocks on a full pipe.
  const Descriptor error(memfd_create("stderr of a download", MFD_CLOEXEC));
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) return {126, std::strerror(errno)};
  if (child == 0) {
    if (!die_with_parent(parent)) _exit(126);
    if (error.open()) dup2(error.get(), 2);
    execvp(arguments[0], arguments.data());
    _exit(errno == ENOENT ? 127 : 126);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  ProgramEnd end{WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), {}};
  char piece[4096];
  for (off_t at = 0; error.open();) {
    const ssize_t length = pread(error.get(), piece, sizeof piece, at);
    if (length <= 0) break;
    end.error.append(piece, static_cast<std::size_t>(length));
    at += length;
  }
  return end;
}

/// Returns the fault of a downloaded file, such as "12 bytes instead of 28881"; empty if it is complete.
inline std::string download_fault(const std::filesystem::path& path, const RemoteFile& file) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error) return error.message();
  return size == file.size ? "" : detail::formatted("{} bytes instead of {}", size, file.size);
}

/// Downloads `url` to `path` with curl or wget. Returns the error; empty on success.
inline std::string fetch(const std::string& url, const std::filesystem::path& path) {
  ProgramEnd end = run_program({"curl", "--fail", "--location", "--silent", "--show-error", "--retry", "2",
                                "--connect-timeout", "20", "--speed-limit", "1", "--speed-time", "60",
                                "--output", path.string(), url});
  if (end.code == 127)
    end = run_program({"wget", "--quiet", "--tries=3", "--timeout=20", "-O", path.string(), url});
  if (end.code == 0) return "";
  if (end.code == 127) return "neither curl nor wget is installed";
  std::string message, line;
  for (std::istringstream in(end.error); std::getline(in, line);)
    if (!line.empty()) message = line;
  return message.empty() ? detail::formatted("the download program ended with code {}", end.code) : message;
}

}  // namespace detail

/// Returns this user's cache directory, and creates it if missing: $XDG_CACHE_HOME/lockstep, else
/// ~/.cache/lockstep. If neither is set, or that directory is not this user's or not writable,
/// `lockstep-UID` in the temporary directory, with the user's number. Throws DataError if the latter
/// belongs to another user, is a symbolic link or is accessible to others.
inline std::filesystem::path cache_folder() {
  const auto variable = [](const char* name) {
    return std::string(std::getenv(name) ? std::getenv(name) : "");
  };
  std::filesystem::path folder;
  if (const auto cache = variable("XDG_CACHE_HOME"); !cache.empty())
    folder = std::filesystem::path(cache) / "lockstep";
  else if (const auto home = variable("HOME"); !home.empty())
    folder = std::filesystem::path(home) / ".cache" / "lockstep";
  if (folder.empty()) return detail::temporary_cache_folder();
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  struct stat found {};
  // `sudo -E` keeps HOME: another user's directory must not be used.
  if (!error && ::stat(folder.c_str(), &found) == 0 && S_ISDIR(found.st_mode) &&
      found.st_uid == ::geteuid() && ::access(folder.c_str(), W_OK | X_OK) == 0)
    return folder;
  return detail::temporary_cache_folder();
}

/// Downloads `files` into `folder` from the first of `mirrors` that has them. Gives each file its name only once its
/// size is right; such files are kept. Waits up to 10 minutes for another process that downloads the same file. Calls
/// `say(text)` before each download. Throws DataError with the file's name and the error of every mirror.
template <class Files, class Say>
void download_files(const std::filesystem::path& folder, const Files& files,
                    const std::vector<std::string>& mirrors, Say&& say) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error || ::access(folder.c_str(), W_OK | X_OK) != 0)
    throw DataError(detail::formatted("{}: downloads cannot be written there: {}", folder.string(),
                                      error ? error.message() : std::strerror(errno)));
  for (const RemoteFile& file : files) {
    const auto path = folder / file.name;
    if (detail::download_fault(path, file).empty()) continue;
    std::optional<detail::TemporaryFile> part(std::in_place, path, std::chrono::minutes(10));
    const auto refuse = [&](const std::string& text) {
      part.reset();  // removes it also where nobody catches the error
      throw DataError(text);
    };
    const auto unwritten = [&] {
      refuse(detail::formatted("{}: cannot be written: {}", path.string(), detail::reason_of(errno)));
    };
    if (!part->open()) unwritten();
    bool whole = detail::download_fault(path, file).empty();  // another process may have fetched it meanwhile
    std::string faults;
    for (auto mirror = mirrors.begin(); !whole && mirror != mirrors.end(); ++mirror) {
      const std::string url = *mirror + (mirror->ends_with('/') ? "" : "/") + file.name;
      say(detail::formatted("fetching {}", url));
      std::string fault = detail::fetch(url, part->name());
      if (fault.empty()) fault = detail::download_fault(part->name(), file);
      if (fault.empty() && !part->replace(path)) unwritten();
      whole = fault.empty();
      faults += detail::formatted("; {}: {}", url, fault);
    }
    if (!whole)
      refuse(detail::formatted("{} could not be downloaded{}; put it into {} by other means", file.name,
                               faults, folder.string()));
  }
}

}  // namespace lockstep::inline v0_1
