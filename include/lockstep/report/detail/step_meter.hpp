#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/step_profile.hpp"

namespace lockstep::inline v0_1::detail {

/// The logged values of one step.
struct StepValues {
  std::int64_t epoch = 0, step = 0;
  double loss = std::numeric_limits<double>::quiet_NaN();
  double lr = 0;
  double samples_per_second = 0;  // of all ranks, since the previously logged step
  double seconds = 0;             // of the step
};

/// Takes the values of every n-th step. Reads the loss, which synchronizes with the device, only then.
class StepMeter {
 public:
  /// Throws UsageError, which names `options`, if `every` is below 1.
  StepMeter(std::int64_t every, std::string_view options) : every_(every) {
    if (every < 1)
      throw UsageError(formatted("{}::every is {}: it must be a number of steps, 1 or more", options, every));
  }

  std::optional<StepValues> take(const StepReport& report, const StepProfile& profile) {
    const double seconds = profile.seconds();
    samples_ += profile.global_samples;
    seconds_ += seconds;
    if ((report.step + 1) % every_ != 0) return std::nullopt;
    StepValues values{report.epoch, report.step, report.loss(), profile.lr, samples_ / seconds_, seconds};
    samples_ = seconds_ = 0;
    return values;
  }

 private:
  std::int64_t every_;
  double samples_ = 0, seconds_ = 0;
};

}  // namespace lockstep::inline v0_1::detail
