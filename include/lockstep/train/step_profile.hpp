#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/grad/ddp_options.hpp"

namespace lockstep::inline v0_1 {

/// The phases of an optimizer step on one rank. All times are host time: with a GPU, forward, backward and
/// optimizer end when their work is launched.
enum class StepPhase {
  data,           ///< waiting for this rank's batches
  forward,        ///< the model and the loss
  backward,       ///< until the last gradient, with the part of the reduction that it hides
  communication,  ///< waiting for the ranks: the rest of the reduction, and buffers before a forward
  optimizer       ///< clearing gradients, GradientCallbacks and the optimizer's step
};
/// The number of phases.
inline constexpr int step_phases = 5;

/// One phase of a step. A step has several spans of a phase if it has several micro-batches.
struct PhaseSpan {
  StepPhase phase;                                   ///< What the time went to.
  std::chrono::steady_clock::time_point begin, end;  ///< Of this rank's clock.
};

/// Where the time of one optimizer step went on this rank.
struct StepProfile {
  /// Contiguous, in order of time.
  std::span<const PhaseSpan> spans;
  /// Samples of this rank in the step; 0 if its batches are not Countable.
  double samples = 0;
  /// Samples of all ranks; for a stream, this rank's times the number of ranks.
  double global_samples = 0;
  /// Learning rate of the optimizer's first group.
  double lr = 0;
  /// The reduction of the step, with BucketReport::completed. Empty for LocalComm.
  const DdpReport& reduction;

  /// Returns the time of all spans of a phase.
  [[nodiscard]] double seconds(StepPhase phase) const {
    std::chrono::duration<double> sum{0};
    for (const PhaseSpan& span : spans)
      if (span.phase == phase) sum += span.end - span.begin;
    return sum.count();
  }
  /// Returns the time of the step in seconds, without the callbacks after it.
  [[nodiscard]] double seconds() const {
    return spans.empty() ? 0 : std::chrono::duration<double>(spans.back().end - spans.front().begin).count();
  }
};

namespace detail {
/// Notes the ends of the phases of a step: one clock read each. A TrainingStep gets it as its last callback.
class StepTimer {
 public:
  using Clock = std::chrono::steady_clock;

  void begin() {
    spans_.clear();
    samples_ = 0;
    last_ = Clock::now();
  }
  void end(StepPhase phase) {
    const auto now = Clock::now();
    spans_.push_back({phase, std::exchange(last_, now), now});
  }
  void count(std::int64_t samples) { samples_ += static_cast<double>(samples); }

  /// Splits the backward that reduced into backward and communication. `reduction` must outlive the result.
  StepProfile profile(const DdpReport& reduction, double global_samples, double lr) {
    const auto gradients = reduction.began + std::chrono::duration_cast<Clock::duration>(
                                                 std::chrono::duration<double>(reduction.backward));
    for (std::size_t i = 0; i < spans_.size(); ++i) {
      PhaseSpan& span = spans_[i];
      if (span.phase != StepPhase::backward || reduction.began < span.begin || gradients >= span.end)
        continue;
      const PhaseSpan rest{StepPhase::communication, gradients, span.end};
      span.end = gradients;
      spans_.insert(spans_.begin() + static_cast<std::ptrdiff_t>(i) + 1, rest);
      break;
    }
    return {spans_, samples_, global_samples, lr, reduction};
  }

 private:
  std::vector<PhaseSpan> spans_;
  Clock::time_point last_;
  double samples_ = 0;
};

/// In the place of a StepTimer where no callback is a ProfileCallback: reads no clock.
struct NoStepTimer {};

template <class... Callbacks>
inline constexpr bool has_step_timer = (std::is_same_v<Callbacks, StepTimer> || ...);

/// Calls `work(timer)` if there is a StepTimer among the callbacks; else compiles to nothing.
template <class Work, class... Callbacks>
void with_step_timer([[maybe_unused]] const Work& work, [[maybe_unused]] Callbacks&... callbacks) {
  const auto call = [&]<class E>([[maybe_unused]] E& callback) {
    if constexpr (std::is_same_v<E, StepTimer>) work(callback);
  };
  (call(callbacks), ...);
}

/// Ends a phase of the running step.
template <class... Callbacks>
void end_phase(StepPhase phase, Callbacks&... callbacks) {
  with_step_timer([phase](auto& timer) { timer.end(phase); }, callbacks...);
}
}  // namespace detail

}  // namespace lockstep::inline v0_1
