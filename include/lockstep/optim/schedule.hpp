#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <numbers>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "lockstep/error.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep {

// Curves: `curve(t)` is the factor of the learning rate at t = 0, 1, 2, ..., a function of t alone, so that
// all ranks agree and a resumed run needs no state. Each is the closed form of Python's scheduler of that
// name, for a rate of 1. PerStep and PerEpoch make a Trainer's Schedule of a curve.

/// A curve: called with a number of steps or epochs, from 0, it gives the factor of the rate.
template <class C>
concept RateCurve = requires(const C& curve, std::int64_t t) {
  { curve(t) } -> std::convertible_to<double>;
};

}  // namespace lockstep

namespace lockstep::detail {
inline void require_length(std::int64_t length, const char* curve) {
  if (length < 1) throw UsageError(fmt::format("{}: a length of {}: give 1 or more", curve, length));
}
}  // namespace lockstep::detail

namespace lockstep {

/// ConstantLR: `factor` until `length`, then 1.
struct ConstantCurve {
  double factor = 1;
  std::int64_t length = 0;
  double operator()(std::int64_t t) const { return t >= length ? 1 : factor; }
};

/// LinearLR: from `start` at 0 to `end` at `length`, a straight line, and `end` from there on. With the
/// defaults a warm-up.
struct LinearCurve {
  std::int64_t length = 1;
  double start = 1.0 / 3, end = 1;
  double operator()(std::int64_t t) const {
    detail::require_length(length, "LinearCurve");
    return start + (end - start) * static_cast<double>(std::min(length, t)) / static_cast<double>(length);
  }
};

/// CosineAnnealingLR: from 1 at 0 to `floor` (eta_min over the rate) at `length`, and `floor` from there on,
/// where Python's would rise again.
struct CosineCurve {
  std::int64_t length = 1;
  double floor = 0;
  double operator()(std::int64_t t) const {
    detail::require_length(length, "CosineCurve");
    const double done = static_cast<double>(std::min(length, t)) / static_cast<double>(length);
    return floor + (1 - floor) * (1 + std::cos(std::numbers::pi * done)) / 2;
  }
};

/// PolynomialLR: (1 - t / length) to the power, and 0 from `length` on.
struct PolynomialCurve {
  std::int64_t length = 1;
  double power = 1;
  double operator()(std::int64_t t) const {
    detail::require_length(length, "PolynomialCurve");
    return std::pow(1 - static_cast<double>(std::min(length, t)) / static_cast<double>(length), power);
  }
};

/// StepLR: times `gamma` after every `every`.
struct StepCurve {
  std::int64_t every = 1;
  double gamma = 0.1;
  double operator()(std::int64_t t) const {
    detail::require_length(every, "StepCurve");
    return std::pow(gamma, static_cast<double>(t / every));
  }
};

/// MultiStepLR: times `gamma` at each milestone; one that is there twice counts twice.
struct MultiStepCurve {
  std::vector<std::int64_t> milestones;
  double gamma = 0.1;
  double operator()(std::int64_t t) const {
    const auto passed = std::count_if(milestones.begin(), milestones.end(),
                                      [t](std::int64_t milestone) { return milestone <= t; });
    return std::pow(gamma, static_cast<double>(passed));
  }
};

/// ExponentialLR: gamma to the power of t.
struct ExponentialCurve {
  double gamma = 0.9;
  double operator()(std::int64_t t) const { return std::pow(gamma, static_cast<double>(t)); }
};

/// SequentialLR of two: `first` before `milestone`, then `second`, which begins at its own 0:
/// `Then{LinearCurve{.length = 500}, 500, CosineCurve{.length = 9500}}`. More follow by nesting.
template <class First, class Second>
struct Then {
  static_assert(RateCurve<First> && RateCurve<Second>,
                "lockstep: Then takes a curve, the number of steps or epochs that it lasts, and the curve "
                "that follows it");
  First first;
  std::int64_t milestone;
  Second second;
  double operator()(std::int64_t t) const { return t < milestone ? first(t) : second(t - milestone); }
};
template <class First, class Second>
Then(First, std::int64_t, Second) -> Then<First, Second>;
template <class First, class Second>
Then(First, int, Second) -> Then<First, Second>;

/// A Schedule (see train/extras.hpp) whose curve runs over optimizer steps.
template <class Curve>
struct PerStep {
  static_assert(RateCurve<Curve>,
                "lockstep: PerStep takes a curve, such as CosineCurve, which is called with the number of a "
                "step and gives the factor of the rate");
  Curve curve;
  double rate_factor(std::int64_t /*epoch*/, std::int64_t step) const { return curve(step); }
};
template <class Curve>
PerStep(Curve) -> PerStep<Curve>;

/// A Schedule whose curve runs over epochs: one factor for all steps of an epoch.
template <class Curve>
struct PerEpoch {
  static_assert(RateCurve<Curve>,
                "lockstep: PerEpoch takes a curve, such as StepCurve, which is called with the number of an "
                "epoch and gives the factor of the rate");
  Curve curve;
  double rate_factor(std::int64_t epoch, std::int64_t /*step*/) const { return curve(epoch); }
};
template <class Curve>
PerEpoch(Curve) -> PerEpoch<Curve>;

/// How the learning rate follows the global batch.
enum class RateRule {
  /// As it is.
  constant,
  /// In proportion: the rule of Goyal et al. (arXiv 1706.02677), for SGD.
  linear,
  /// With the square root, which keeps the variance of an update: common for Adam.
  square_root,
};

/// The batch that one optimizer step sees, and the one for which a rate was found.
struct GlobalBatch {
  /// Samples of one rank in one backward.
  std::int64_t per_rank = 1;
  /// Backward calls before each optimizer step.
  std::int64_t accumulation = 1;
  /// The batch for which the rate is good, often the one that a paper gives.
  std::int64_t reference = 256;
  /// Ranks that train together; the world's where it is not given.
  std::optional<int> ranks = std::nullopt;
};

/// `lr` times global batch / reference, or times its root; the global batch is per_rank x ranks x
/// accumulation. Says on the world's log what it did. Throws UsageError for a batch below 1 or a rate that is
/// none.
inline double scaled_rate(double lr, RateRule rule, const GlobalBatch& batch, const World& world) {
  if (batch.per_rank < 1 || batch.accumulation < 1 || batch.reference < 1)
    throw UsageError(
        fmt::format("scaled_rate: {} samples a rank, {} backward calls a step and a reference of {}: "
                    "each must be 1 or more",
                    batch.per_rank, batch.accumulation, batch.reference));
  if (!(lr >= 0) || !std::isfinite(lr))
    throw UsageError(fmt::format("scaled_rate: a learning rate of {}: give 0 or more", lr));
  const int ranks = batch.ranks.value_or(world.size());
  if (ranks < 1) throw UsageError(fmt::format("scaled_rate: {} ranks: give 1 or more", ranks));
  const std::int64_t global = batch.per_rank * ranks * batch.accumulation;
  const double ratio = static_cast<double>(global) / static_cast<double>(batch.reference);
  double factor = 1;
  const char* name = "constant";
  if (rule == RateRule::linear) {
    factor = ratio;
    name = "linear";
  } else if (rule == RateRule::square_root) {
    factor = std::sqrt(ratio);
    name = "square root";
  }
  world.log.info(
      "learning rate {:.6g} ({} rule: {:.6g} for a batch of {}; global batch {} = {} x {} ranks x {})",
      lr * factor, name, lr, batch.reference, global, batch.per_rank, ranks, batch.accumulation);
  return lr * factor;
}

}  // namespace lockstep
