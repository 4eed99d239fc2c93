#pragma once

#include <fmt/format.h>

#include <cstdlib>
#include <string>

#include "lockstep/detail/format.hpp"
#include "lockstep/log/detail/console.hpp"
#include "lockstep/log/log.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::optional<Level> level_named(std::string_view name) {
  if (name == "debug") return Level::debug;
  if (name == "info") return Level::info;
  if (name == "warning") return Level::warning;
  if (name == "error") return Level::error;
  return std::nullopt;
}

LOCKSTEP_INLINE Level level_of_environment() {
  const char* name = std::getenv("LOCKSTEP_LOG_LEVEL");
  return level_named(name ? name : "info").value_or(Level::info);
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE Log Log::all() const {
  Log copy = *this;
  copy.every_rank_ = true;
  return copy;
}

LOCKSTEP_INLINE Log Log::timed() const {
  Log copy = *this;
  copy.timed_ = true;
  return copy;
}

LOCKSTEP_INLINE Log Log::at(Level level) const {
  Log copy = *this;
  copy.least_ = level;
  return copy;
}

LOCKSTEP_INLINE bool Log::speaks(Level level) const {
  return level >= least_ && (every_rank_ || rank_ == 0);
}

LOCKSTEP_INLINE void Log::write(Level level, fmt::string_view format, fmt::format_args args) const {
  const std::string whole = fmt::vformat(format, args);
  std::string_view text = whole;
  static constexpr const char* names[] = {"debug: ", "", "warning: ", "error: "};
  const std::string front = (every_rank_ ? detail::formatted("[rank {}] ", rank_) : std::string()) +
                            (timed_ ? detail::time_of_day() + " " : std::string()) +
                            names[static_cast<int>(level)];
  std::string lines;
  // Every line of a multi-line text gets the prefix.
  while (true) {
    const auto end = text.find('\n');
    lines += front;
    lines += text.substr(0, end);
    lines += '\n';
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  detail::write_lines(level >= Level::warning ? stderr : stdout, lines);
}

}  // namespace lockstep
