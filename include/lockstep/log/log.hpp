#pragma once

#if __has_include(<fmt/base.h>)
#include <fmt/base.h>
#else
#include <fmt/core.h>
#endif

#include <optional>
#include <string>
#include <string_view>

#include "lockstep/detail/linkage.hpp"

namespace lockstep {

/// The severity of a log line. Lines below LOCKSTEP_LOG_LEVEL (debug, info, warning or error; default info)
/// are dropped.
enum class Level { debug, info, warning, error };

}  // namespace lockstep

namespace lockstep::detail {

/// Returns the level of this name, std::nullopt for an unknown name.
std::optional<Level> level_named(std::string_view name);

/// Returns LOCKSTEP_LOG_LEVEL, or info.
Level level_of_environment();

/// Returns the text of a fmt::format_string, which converts to it only before fmt 11.
template <class Format>
fmt::string_view text_of(const Format& format) {
  if constexpr (requires { format.str; })
    return format.str;
  else
    return format;
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
  [[nodiscard]] Log all() const;

  /// Returns a copy that prefixes each line with the local time, to milliseconds.
  [[nodiscard]] Log timed() const;

  /// Returns a copy that drops lines below `level`.
  [[nodiscard]] Log at(Level level) const;

  /// Returns whether a line of this level would be written on this rank. Use it to skip expensive formatting.
  [[nodiscard]] bool speaks(Level level = Level::info) const;

  template <class... Args>
  void debug(fmt::format_string<Args...> text, Args&&... args) const {
    if (speaks(Level::debug)) write(Level::debug, detail::text_of(text), fmt::make_format_args(args...));
  }
  template <class... Args>
  void info(fmt::format_string<Args...> text, Args&&... args) const {
    if (speaks(Level::info)) write(Level::info, detail::text_of(text), fmt::make_format_args(args...));
  }
  template <class... Args>
  void warning(fmt::format_string<Args...> text, Args&&... args) const {
    if (speaks(Level::warning)) write(Level::warning, detail::text_of(text), fmt::make_format_args(args...));
  }
  template <class... Args>
  void error(fmt::format_string<Args...> text, Args&&... args) const {
    if (speaks(Level::error)) write(Level::error, detail::text_of(text), fmt::make_format_args(args...));
  }

 private:
  void write(Level level, fmt::string_view text, fmt::format_args args) const;

  int rank_ = 0;
  bool every_rank_ = false;
  bool timed_ = false;
  Level least_ = detail::level_of_environment();
};

}  // namespace lockstep

#ifndef LOCKSTEP_COMPILED
#include "lockstep/log/detail/log-inl.hpp"
#endif
