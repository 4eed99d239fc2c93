#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/detail/linkage.hpp"
#include "lockstep/log/log.hpp"

namespace lockstep {

/// Options of a Progress.
struct ProgressOptions {
  /// The prefix of each line, such as "epoch 1/3".
  std::string title;
  /// The shortest time between two updates of the bar, and between two plain lines.
  std::chrono::milliseconds redraw{100};
  std::chrono::milliseconds line_every{10000};
};

}  // namespace lockstep

namespace lockstep::detail {

/// The values that a progress line shows.
struct ProgressState {
  std::string title;
  std::size_t done = 0, total = 0;
  double seconds = 0;
  double samples = 0;
  std::optional<double> loss;
};

/// Formats a duration in seconds as 0:07, 12:34 or 1:02:03.
std::string clock_text(double seconds);

std::string progress_facts(const ProgressState& state);

/// Formats one line: `epoch 1/3: 788/1875, 10432 samples/s, loss 0.4321, 0:17 left`. Without a total: `epoch
/// 1/3: 788, 10432 samples/s, loss 0.4321, 0:13 in all`.
std::string progress_line(const ProgressState& state);

/// Formats one line with a bar, shorter than `columns` so that it never wraps: `epoch 1/3  42 %
/// [########............] 788/1875, ...`.
std::string progress_bar(const ProgressState& state, int columns);

}  // namespace lockstep::detail

namespace lockstep {

/// Shows the progress of a loop on rank 0: a bar on a terminal, otherwise a plain line from time to time. Not
/// thread-safe. The destructor ends the bar's line.
class Progress {
 public:
  /// `total` is the number of steps, 0 if unknown. Shows nothing if `log` does not write info lines on this
  /// rank.
  Progress(const Log& log, std::size_t total, ProgressOptions options = {});
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() { finish(); }

  /// Returns whether an `advance` now would show `loss`. If false, its value need not be read from a device.
  [[nodiscard]] bool due() const;

  /// Counts one more step, with `samples` samples over all ranks.
  void advance(double samples, std::optional<double> loss = std::nullopt);

  /// Shows the final state once; a no-op if nothing was shown before. `loss` is the loss of the whole loop;
  /// without it the last step's loss, if any, is shown.
  void finish(std::optional<double> loss = std::nullopt);

 private:
  using Clock = std::chrono::steady_clock;

  void show();

  ProgressOptions options_;
  bool shown_;
  bool terminal_;
  bool said_ = false, finished_ = false;
  Clock::time_point start_ = Clock::now(), last_ = start_;
  detail::ProgressState state_;
};

}  // namespace lockstep

#ifndef LOCKSTEP_COMPILED
#include "lockstep/log/detail/progress-inl.hpp"
#endif
