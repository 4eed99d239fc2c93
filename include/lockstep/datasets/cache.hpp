#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

#include "lockstep/datasets/detail/partial_files.hpp"
#include "lockstep/datasets/digits.hpp"
#include "lockstep/datasets/idx.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// Returns `lockstep-<user id>` in the temporary directory, and creates it if missing. Other users can create
/// entries there, so a directory that another user owns or may access, or a symbolic link, throws DataError.
inline std::filesystem::path temporary_cache_folder() {
  std::error_code error;
  const std::filesystem::path base = std::filesystem::temp_directory_path(error);
  if (error) {
    const char* named = std::getenv("TMPDIR");
    throw DataError(detail::formatted(
        "{}: the folder for temporary files cannot be used: {}; set TMPDIR or XDG_CACHE_HOME to "
        "a folder that can be "
        "written",
        named ? named : "/tmp", error.message()));
  }
  const std::filesystem::path folder = base / detail::formatted("lockstep-{}", ::geteuid());
  const auto refuse = [&](const std::string& fault) {
    throw DataError(
        detail::formatted("{}: cannot keep data there: {}; set XDG_CACHE_HOME to a folder of your own",
                          folder.string(), fault));
  };
  struct stat found {};
  if ((::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) || ::lstat(folder.c_str(), &found) != 0)
    refuse(std::strerror(errno));
  if (S_ISLNK(found.st_mode)) refuse("it is a symbolic link");
  if (!S_ISDIR(found.st_mode)) refuse("it is no folder");
  if (found.st_uid != ::geteuid()) refuse(detail::formatted("it belongs to user {}", found.st_uid));
  if ((found.st_mode & 0077) != 0)
    refuse(detail::formatted("others may use it (its mode is {:04o}, expected 0700)", found.st_mode & 07777));
  return folder;
}

}  // namespace lockstep::detail

namespace lockstep {

/// Returns this user's cache directory, and creates it if missing: $XDG_CACHE_HOME/lockstep, else
/// ~/.cache/lockstep. If neither is set, or that directory is not this user's or not writable, lockstep-<user
/// id> in the temporary directory. Throws DataError if that one belongs to another user, is a symbolic link
/// or is accessible to others.
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

/// Draws `train` and `test` digits into `folder` as MNIST's four files, and creates the folder if missing.
/// Writes each file atomically. Leaves a part unchanged if both its files exist. Throws DataError if writing
/// fails.
inline void draw_digits_into(const std::filesystem::path& folder, std::int64_t train, std::int64_t test) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw DataError(detail::formatted("{}: cannot be made: {}", folder.string(), error.message()));
  const auto draw = [&](std::string_view name, std::int64_t count, std::uint64_t seed) {
    const auto images = folder / detail::formatted("{}-images-idx3-ubyte", name);
    const auto labels = folder / detail::formatted("{}-labels-idx1-ubyte", name);
    if (std::filesystem::exists(images, error) && std::filesystem::exists(labels, error)) return;
    const Digits digits = draw_digits(count, seed);
    detail::make_file_whole(images, [&](const auto& part) { write_idx(part, digits.images); });
    detail::make_file_whole(labels, [&](const auto& part) { write_idx(part, digits.labels); });
  };
  draw("train", train, 1);
  draw("t10k", test, 2);
}

/// Returns a folder with drawn digits as MNIST's four files, `train` and `test` of them. The first call on a
/// host draws them, which takes seconds. With several ranks per host, call it inside
/// `world.local_zero_first`.
inline std::filesystem::path drawn_digits_folder(std::int64_t train = 60'000, std::int64_t test = 10'000) {
  // Increment the version whenever the drawing changes.
  const auto folder = cache_folder() / detail::formatted("digits-v1-{}-{}", train, test);
  draw_digits_into(folder, train, test);
  return folder;
}

}  // namespace lockstep
