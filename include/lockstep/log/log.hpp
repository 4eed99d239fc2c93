#pragma once

#include <fmt/format.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/detail/format.hpp"
#include "lockstep/log/detail/console.hpp"

namespace lockstep {

/// The severity of a log line. Lines below LOCKSTEP_LOG_LEVEL (debug, info, warning or error; default info)
/// are dropped.
enum class Level { debug, info, warning, error };

}  // namespace lockstep

namespace lockstep::detail {

/// Returns the level of this name, std::nullopt for an unknown name.
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

/// A rank-aware logger. By default only rank 0 writes. `all()` returns a logger that writes on every rank,
/// with the rank as prefix; `timed()` returns one with the time of day as prefix. Debug and info go to
/// stdout, warnings and errors to stderr. Each call is one write, so that lines of several processes do not
/// interleave. Copies are independent. Thread-safe.
class Log {
 public:
  Log() = default;
  explicit Log(int rank) : rank_(rank) {}

  /// Returns a copy that writes on every rank.
  [[nodiscard]] Log all() const {
    Log copy = *this;
    copy.every_rank_ = true;
    return copy;
  }

  /// Returns a copy that prefixes each line with the local time, to milliseconds.
  [[nodiscard]] Log timed() const {
    Log copy = *this;
    copy.timed_ = true;
    return copy;
  }

  /// Returns a copy that drops lines below `level`.
  [[nodiscard]] Log at(Level level) const {
    Log copy = *this;
    copy.least_ = level;
    return copy;
  }

  /// Returns whether a line of this level would be written on this rank. Use it to skip expensive formatting.
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

  int rank_ = 0;
  bool every_rank_ = false;
  bool timed_ = false;
  Level least_ = detail::level_of_environment();
};

}  // namespace lockstep
