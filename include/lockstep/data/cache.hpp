#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include "lockstep/data/digits.hpp"
#include "lockstep/data/idx.hpp"
#include "lockstep/data/parts.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// The folder in which this user's programs keep what they made or fetched: $XDG_CACHE_HOME/lockstep, else
/// ~/.cache/lockstep, else (no home, or one that cannot be written) lockstep-<user id> beside other temporary
/// files.
inline std::filesystem::path cache_folder() {
  const auto variable = [](const char* name) {
    return std::string(std::getenv(name) ? std::getenv(name) : "");
  };
  std::filesystem::path folder;
  if (const auto cache = variable("XDG_CACHE_HOME"); !cache.empty())
    folder = std::filesystem::path(cache) / "lockstep";
  else if (const auto home = variable("HOME"); !home.empty())
    folder = std::filesystem::path(home) / ".cache" / "lockstep";
  std::error_code error;
  if (!folder.empty()) {
    std::filesystem::create_directories(folder, error);
    if (!error && ::access(folder.c_str(), W_OK | X_OK) == 0) return folder;
  }
  folder = std::filesystem::temp_directory_path() / fmt::format("lockstep-{}", ::getuid());
  std::filesystem::create_directories(folder, error);
  if (error || ::access(folder.c_str(), W_OK | X_OK) != 0)
    throw DataError(fmt::format("{}: no folder to keep data in can be written; set XDG_CACHE_HOME to one",
                                folder.string()));
  return folder;
}

/// Makes `folder` whole or not at all: `fill(temporary)` fills a new folder beside it, which then takes its
/// name. Where the folder exists, or another process was faster, that one stays. Returns whether this call
/// made it.
template <class Fill>
bool make_folder_whole(const std::filesystem::path& folder, Fill&& fill) {
  if (std::filesystem::exists(folder)) return false;
  detail::remove_stale_parts(folder.parent_path());
  const std::filesystem::path temporary = detail::part_of(folder);
  std::error_code ignored;
  std::filesystem::remove_all(temporary, ignored);
  try {
    std::filesystem::create_directories(temporary);
    fill(temporary);
    std::error_code error;
    std::filesystem::rename(temporary, folder, error);
    if (!error) return true;
    if (!std::filesystem::exists(folder))
      throw std::filesystem::filesystem_error("rename", temporary, folder, error);
  } catch (const std::filesystem::filesystem_error& error) {
    std::filesystem::remove_all(temporary, ignored);
    throw DataError(fmt::format("{}: cannot be made: {}", folder.string(), error.code().message()));
  } catch (...) {
    std::filesystem::remove_all(temporary, ignored);
    throw;
  }
  std::filesystem::remove_all(temporary, ignored);
  return false;
}

/// A folder that holds drawn digits as MNIST's four files: `train` and `test` of them, drawn by the first
/// call on this host, which takes seconds, and found by later ones. Several ranks of a host: call it inside
/// `world.local_zero_first`.
inline std::filesystem::path drawn_digits_folder(std::int64_t train = 60'000, std::int64_t test = 10'000) {
  // The number behind v changes whenever the drawing does.
  const auto folder = cache_folder() / fmt::format("digits-v1-{}-{}", train, test);
  make_folder_whole(folder, [&](const std::filesystem::path& part) {
    const auto write = [&](std::string_view name, std::int64_t count, std::uint64_t seed) {
      const Digits digits = draw_digits(count, seed);
      write_idx(part / fmt::format("{}-images-idx3-ubyte", name), digits.images);
      write_idx(part / fmt::format("{}-labels-idx1-ubyte", name), digits.labels);
    };
    write("train", train, 1);
    write("t10k", test, 2);
  });
  return folder;
}

}  // namespace lockstep
