#pragma once

#include <fmt/format.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/log/detail/console.hpp"

namespace lockstep {

/// How much a line matters. Below LOCKSTEP_LOG_LEVEL (debug, info, warning or error; info without it) it is
/// not said.
enum class Level { debug, info, warning, error };

}  // namespace lockstep

namespace lockstep::detail {

/// The level of this name; nothing where there is none.
inline std::optional<Level> level_named(std::string_view name) {
  if (name == "debug") return Level::debug;
  if (name == "info") return Level::info;
  if (name == "warning") return Level::warning;
  if (name == "error") return Level::error;
  return std::nullopt;
}

inline Level level_of_environment() {
  const char* name = std::getenv("LOCKSTEP_LOG_LEVEL");
  return level_named(name ? name : "info").value_or(Level::info);
}

}  // namespace lockstep::detail

namespace lockstep {

/// A logger that knows its rank. By default rank 0 alone speaks; `all()` gives one through which every rank
/// does, with its rank in front, and `timed()` one that puts the time of day in front. Info and debug go to
/// stdout, warnings and errors to stderr, each line in one write, so that the lines of several processes
/// never tear. Copies are independent; any thread may write.
class Log {
 public:
  Log() = default;
  explicit Log(int rank) : rank_(rank) {}

  /// The same logger, heard from every rank.
  [[nodiscard]] Log all() const {
    Log copy = *this;
    copy.every_rank_ = true;
    return copy;
  }

  /// The same logger with hours, minutes, seconds and milliseconds (local time) in front of each line.
  [[nodiscard]] Log timed() const {
    Log copy = *this;
    copy.timed_ = true;
    return copy;
  }

  /// The same logger, silent below `level`.
  [[nodiscard]] Log at(Level level) const {
    Log copy = *this;
    copy.least_ = level;
    return copy;
  }

  /// Whether a line of this level would be written here; what it costs to prepare can then be left out.
  [[nodiscard]] bool speaks(Level level = Level::info) const {
    return level >= least_ && (every_rank_ || rank_ == 0);
  }

  template <class... Args>
  void debug(fmt::format_string<Args...> text, Args&&... args) const {
    if (speaks(Level::debug)) write(Level::debug, fmt::format(text, std::forward<Args>(args)...));
  }
  template <class... Args>
  void info(fmt::format_string<Args...> text, Args&&... args) const {
    if (speaks(Level::info)) write(Level::info, fmt::format(text, std::forward<Args>(args)...));
  }
  template <class... Args>
  void warning(fmt::format_string<Args...> text, Args&&... args) const {
    if (speaks(Level::warning)) write(Level::warning, fmt::format(text, std::forward<Args>(args)...));
  }
  template <class... Args>
  void error(fmt::format_string<Args...> text, Args&&... args) const {
    if (speaks(Level::error)) write(Level::error, fmt::format(text, std::forward<Args>(args)...));
  }

 private:
  void write(Level level, std::string_view text) const {
    static constexpr const char* names[] = {"debug: ", "", "warning: ", "error: "};
    const std::string front = (every_rank_ ? fmt::format("[rank {}] ", rank_) : std::string()) +
                              (timed_ ? detail::time_of_day() + " " : std::string()) +
                              names[static_cast<int>(level)];
    std::string lines;
    // A text of several lines has the same in front of each.
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

  int rank_ = 0;
  bool every_rank_ = false;
  bool timed_ = false;
  Level least_ = detail::level_of_environment();
};

}  // namespace lockstep
