#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/report/detail/trace_recorder.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/step_profile.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1::detail {

/// Thins a growing series to at most 1024 evenly spaced values.
class SparseSeries {
 public:
  /// Adds the next value, and calls `y()` for it, if it is kept.
  template <class Function>
  void add(double x, Function&& y) {
    if (next_++ % stride_ == 0) keep(x, y());
  }
  void clear() { *this = {}; }
  /// Returns "[[x,y],...]".
  [[nodiscard]] std::string json() const;

 private:
  void keep(double x, double y);

  std::size_t next_ = 0, stride_ = 1;
  std::vector<std::pair<double, double>> values_;
};

/// Records one epoch of a rank for a RunReport.
class RunRecorder {
 public:
  /// `loss`: also records the losses of the steps.
  void step(const StepReport& report, const StepProfile& profile, bool loss);
  /// Returns two JSON objects, separated by a zero byte: the sums of the epoch, and the data that the page
  /// shows of the last epoch only. Begins a new epoch.
  std::string take_epoch(const World& world);
  [[nodiscard]] const SparseSeries& losses() const { return losses_; }

 private:
  std::int64_t steps_ = 0;
  double seconds_ = 0, samples_ = 0, busy_ = 0;
  std::array<double, step_phases> phases_{};
  SparseSeries busy_series_, losses_;
  TracedStep last_;
  std::optional<std::chrono::steady_clock::time_point> reduced_;  // the end of the previous reduction
};

/// The content of a RunReport's page, on the rank that writes it.
class RunPage {
 public:
  RunPage(std::string title, const World& world, int ranks);

  /// Adds an epoch. `ranks` holds the result of RunRecorder::take_epoch on each rank.
  void add_epoch(const EpochReport& report, const std::vector<std::string>& ranks);
  void add_scalar(std::string_view tag, double value, std::int64_t step);
  /// Returns the HTML page.
  [[nodiscard]] std::string html(const SparseSeries& losses) const;

 private:
  std::string title_, environment_;
  std::vector<std::string> epochs_;  // JSON
  std::string ranks_;                // of the last epoch
  std::vector<std::pair<std::string, std::string>> scalars_;
};

}  // namespace lockstep::inline v0_1::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/report/detail/run_recorder-inl.hpp"
#endif
