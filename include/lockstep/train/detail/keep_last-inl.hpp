#pragma once

#include <algorithm>
#include <charconv>
#include <string_view>
#include <system_error>
#include <utility>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/files.hpp"
#include "lockstep/train/keep_last.hpp"

namespace lockstep {

LOCKSTEP_INLINE KeepLast::KeepLast(std::int64_t n, const std::filesystem::path& pattern,
                                   std::function<void(const std::filesystem::path&)> write)
    : n_(n), folder_(pattern.parent_path()), write_(std::move(write)) {
  if (n < 1) throw UsageError(detail::formatted("KeepLast: n is {}: keep 1 checkpoint or more", n));
  const std::string name = pattern.filename().string();
  const std::size_t number = name.find("{}");
  if (number == std::string::npos || name.find("{}", number + 2) != std::string::npos ||
      folder_.string().find("{}") != std::string::npos)
    throw UsageError(detail::formatted(
        "KeepLast: the pattern is '{}': give a path whose file name, and not its folder, has one {{}} for "
        "the number of epochs, such as runs/epoch-{{}}.ckpt",
        pattern.string()));
  if (!write_)
    throw UsageError(
        "KeepLast has no write: give it a function of a path that calls Trainer::save_checkpoint");
  before_ = name.substr(0, number);
  after_ = name.substr(number + 2);
}

LOCKSTEP_INLINE std::filesystem::path KeepLast::path_of(std::int64_t epochs) const {
  return folder_ / (before_ + std::to_string(epochs) + after_);
}

LOCKSTEP_INLINE std::string KeepLast::newest_here() const {
  const std::filesystem::path folder = folder_.empty() ? "." : folder_;
  if (!std::filesystem::exists(folder)) return {};
  std::optional<std::int64_t> most;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.size() <= before_.size() + after_.size() || !name.starts_with(before_) ||
        !name.ends_with(after_))
      continue;
    const char* const first = name.data() + before_.size();
    const char* const last = name.data() + name.size() - after_.size();
    std::int64_t epochs = 0;
    if (const auto [end, error] = std::from_chars(first, last, epochs); error != std::errc() || end != last)
      continue;
    if (path_of(epochs).filename() != name) continue;  // another notation, such as 07
    most = std::max(most.value_or(epochs), epochs);
  }
  return most ? path_of(*most).string() : std::string();
}

LOCKSTEP_INLINE void KeepLast::prepare(std::int64_t epochs) const {
  std::error_code ignored;  // require_writable gives the reason
  if (!folder_.empty()) std::filesystem::create_directories(folder_, ignored);
  require_writable(path_of(epochs), "KeepLast");
}

LOCKSTEP_INLINE void KeepLast::remove_older(std::int64_t epochs, const Log& log) const {
  for (std::int64_t old = epochs - n_; old > 0; --old) {
    const std::filesystem::path path = path_of(old);
    std::error_code error;
    const bool removed = std::filesystem::remove(path, error);
    if (error) log.warning("the old checkpoint '{}' cannot be removed: {}", path.string(), error.message());
    if (!removed) return;
  }
}

}  // namespace lockstep
