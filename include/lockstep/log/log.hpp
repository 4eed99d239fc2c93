#pragma once

#if __has_include(<fmt/base.h>)
#include <fmt/base.h>
#else
#include <fmt/core.h>
#endif

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::inline v0_1 {

/// The severity of a log line. Lines below LOCKSTEP_LOG_LEVEL (debug, info, warning or error; default info)
/// are dropped.
enum class Level { debug, info, warning, error };

namespace detail {

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

}  // namespace detail

/// A rank-aware logger. By default only rank 0 writes. `all()` returns a logger that writes on every rank,
/// with the rank as prefix. Debug and info go to stdout, warnings and errors to stderr. Each call is one write,
/// so that lines of several processes do not interleave. Copies are independent. Thread-safe.
class Log {
 public:
  /// Constructs the logger of rank 0.
  Log() = default;
  /// Constructs a log that writes on rank 0 alone; `rank` is this process's.
  explicit Log(int rank) : rank_(rank) {}

  /// Returns a copy that writes on every rank.
  [[nodiscard]] Log all() const {
    Log copy = *this;
    copy.every_rank_ = true;
    return copy;
  }

  /// Returns a copy that drops lines below `level`.
  [[nodiscard]] Log at(Level level) const {
    Log copy = *this;
    copy.least_ = level;
    return copy;
  }

  /// Returns whether a line of this level would be written on this rank. Use it to skip expensive formatting.
  [[nodiscard]] bool should_log(Level level = Level::info) const {
    return level >= least_ && (every_rank_ || rank_ == 0);
  }

  /// Writes a line of Level::debug, formatted as by fmt::format.
  template <class... Args>
  void debug(fmt::format_string<Args...> text, Args&&... args) const {
    if (should_log(Level::debug)) write(Level::debug, detail::text_of(text), fmt::make_format_args(args...));
  }
  /// Writes a line of Level::info.
  template <class... Args>
  void info(fmt::format_string<Args...> text, Args&&... args) const {
    if (should_log(Level::info)) write(Level::info, detail::text_of(text), fmt::make_format_args(args...));
  }
  /// Writes a line of Level::warning.
  template <class... Args>
  void warning(fmt::format_string<Args...> text, Args&&... args) const {
    if (should_log(Level::warning))
      write(Level::warning, detail::text_of(text), fmt::make_format_args(args...));
  }
  /// Writes a line of Level::error.
  template <class... Args>
  void error(fmt::format_string<Args...> text, Args&&... args) const {
    if (should_log(Level::error)) write(Level::error, detail::text_of(text), fmt::make_format_args(args...));
  }

 private:
  void write(Level level, fmt::string_view text, fmt::format_args args) const;

  int rank_ = 0;
  bool every_rank_ = false;
  Level least_ = detail::level_of_environment();
};

/// Options of a Progress.
struct ProgressOptions {
  /// The prefix of each line, such as "epoch 1/3".
  std::string title;
  /// Minimum time between two updates of the bar on a terminal.
  std::chrono::milliseconds redraw{100};
  /// Minimum time between two lines in a file or pipe.
  std::chrono::milliseconds line_every{10000};
};

namespace detail {

/// The values that a progress line shows.
struct ProgressState {
  std::string title;
  std::size_t done = 0, total = 0;
  double seconds = 0;
  double samples = 0;
  std::optional<double> loss;
  std::string more{};  // follows the loss
};

/// Formats a duration in seconds as 0:07, 12:34 or 1:02:03.
std::string clock_text(double seconds);

/// Formats one line: `epoch 1/3: 788/1875, 10432 samples/s, loss 0.4321, 0:17 left`.
std::string progress_line(const ProgressState& state);

/// Formats one line with a bar, shorter than `columns` so that it never wraps: `epoch 1/3  42 %
/// [########............] 788/1875, ...`.
std::string progress_bar(const ProgressState& state, int columns);

}  // namespace detail

/// Shows the progress of a loop on rank 0: a bar on a terminal, otherwise a plain line at most every
/// `line_every`. Not thread-safe. The destructor ends the bar's line.
class Progress {
 public:
  /// `total` is the number of steps, 0 if unknown. Shows nothing if `log` does not write info lines on this rank.
  Progress(const Log& log, std::size_t total, ProgressOptions options = {});
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() { finish(); }

  /// Returns whether the next `advance` would show its `loss`. If false, the caller need not read the loss
  /// from the device.
  [[nodiscard]] bool due() const;

  /// Counts one more step, with `samples` samples over all ranks.
  void advance(double samples, std::optional<double> loss = std::nullopt);

  /// Shows the final state once; a no-op if no `advance` has shown anything. `loss` is the loss of the whole
  /// loop; without it the last step's loss, if any, is shown. `more` follows it, such as ", box 0.1234".
  void finish(std::optional<double> loss = std::nullopt, std::string more = {});

 private:
  using Clock = std::chrono::steady_clock;

  void show();

  ProgressOptions options_;
  bool enabled_;
  bool terminal_;
  bool shown_ = false, finished_ = false;
  Clock::time_point start_ = Clock::now(), last_ = start_;
  detail::ProgressState state_;
};

}  // namespace lockstep::inline v0_1

#ifndef LOCKSTEP_COMPILED
#include "lockstep/log/detail/log-inl.hpp"
#endif
