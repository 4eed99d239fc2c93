#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <numbers>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1 {

namespace detail {

/// A learning rate curve: `curve(t)` returns the factor of the learning rate at the zero-based step or epoch
/// `t`. It depends on `t` alone, so all ranks agree and a resumed run needs no state.
///
/// Each curve below is the closed form of Python's scheduler of the same name for a learning rate of 1. An invalid
/// option throws UsageError when the curve is called. PerStep and PerEpoch make a Trainer's Schedule from a curve.
template <class C>
concept RateCurve = requires(const C& curve, std::int64_t t) {
  { curve(t) } -> std::convertible_to<double>;
};

}  // namespace detail

namespace detail {
inline void require_positive(std::int64_t value, const char* curve, const char* option) {
  if (value < 1) throw UsageError(detail::formatted("{}: {} is {}: give 1 or more", curve, option, value));
}
}  // namespace detail

/// Returns `factor` for the first `total_iters`, then 1. Counterpart: torch.optim.lr_scheduler.ConstantLR.
struct ConstantLR {
  double factor = 1.0 / 3;
  std::int64_t total_iters = 5;
  double operator()(std::int64_t t) const { return t >= total_iters ? 1 : factor; }
};

/// Interpolates linearly from `start_factor` at 0 to `end_factor` at `total_iters`, then stays constant; the
/// defaults make a warm-up. Counterpart: torch.optim.lr_scheduler.LinearLR.
struct LinearLR {
  double start_factor = 1.0 / 3, end_factor = 1;
  std::int64_t total_iters = 5;
  double operator()(std::int64_t t) const {
    detail::require_positive(total_iters, "LinearLR", "total_iters");
    return start_factor + (end_factor - start_factor) * static_cast<double>(std::min(total_iters, t)) /
                              static_cast<double>(total_iters);
  }
};

/// Anneals from 1 at 0 to `eta_min_factor` at `T_max` along half a cosine wave, then stays constant, whereas
/// Python's rises again. `eta_min_factor` is Python's eta_min divided by the learning rate. Throws UsageError
/// if T_max < 1. Counterpart: torch.optim.lr_scheduler.CosineAnnealingLR.
struct CosineAnnealingLR {
  std::int64_t T_max = 1;
  double eta_min_factor = 0;
  double operator()(std::int64_t t) const {
    detail::require_positive(T_max, "CosineAnnealingLR", "T_max");
    const double done = static_cast<double>(std::min(T_max, t)) / static_cast<double>(T_max);
    return eta_min_factor + (1 - eta_min_factor) * (1 + std::cos(std::numbers::pi * done)) / 2;
  }
};

/// Returns (1 - t / total_iters)^power, and 0 from `total_iters` on. Throws UsageError if total_iters < 1.
/// Counterpart: torch.optim.lr_scheduler.PolynomialLR.
struct PolynomialLR {
  std::int64_t total_iters = 5;
  double power = 1;
  double operator()(std::int64_t t) const {
    detail::require_positive(total_iters, "PolynomialLR", "total_iters");
    return std::pow(1 - static_cast<double>(std::min(total_iters, t)) / static_cast<double>(total_iters),
                    power);
  }
};

/// Multiplies by `gamma` every `step_size`. Counterpart: torch.optim.lr_scheduler.StepLR.
struct StepLR {
  std::int64_t step_size = 1;
  double gamma = 0.1;
  double operator()(std::int64_t t) const {
    detail::require_positive(step_size, "StepLR", "step_size");
    return std::pow(gamma, static_cast<double>(t / step_size));
  }
};

/// Multiplies by `gamma` at each milestone; a repeated milestone counts each time. Counterpart:
/// torch.optim.lr_scheduler.MultiStepLR.
struct MultiStepLR {
  std::vector<std::int64_t> milestones;
  double gamma = 0.1;
  double operator()(std::int64_t t) const {
    const auto passed = std::count_if(milestones.begin(), milestones.end(),
                                      [t](std::int64_t milestone) { return milestone <= t; });
    return std::pow(gamma, static_cast<double>(passed));
  }
};

/// Returns gamma^t. Counterpart: torch.optim.lr_scheduler.ExponentialLR.
struct ExponentialLR {
  double gamma = 0.9;
  double operator()(std::int64_t t) const { return std::pow(gamma, static_cast<double>(t)); }
};

/// Follows `first` before `milestone`, then `second`, whose t starts at 0. Nest for more than two:
/// `SequentialLR{LinearLR{.total_iters = 500}, 500, CosineAnnealingLR{.T_max = 9500}}`. Counterpart:
/// torch.optim.lr_scheduler.SequentialLR.
template <class First, class Second>
struct SequentialLR {
  static_assert(detail::RateCurve<First> && detail::RateCurve<Second>,
                "lockstep: SequentialLR takes a curve, the number of steps or epochs that it lasts, and the "
                "curve that follows it");
  First first;
  std::int64_t milestone;
  Second second;
  double operator()(std::int64_t t) const { return t < milestone ? first(t) : second(t - milestone); }
};
template <class First, class Second>
SequentialLR(First, std::int64_t, Second) -> SequentialLR<First, Second>;
template <class First, class Second>
SequentialLR(First, int, Second) -> SequentialLR<First, Second>;

/// A Schedule (see train/extras.hpp) that evaluates its curve at the optimizer step.
template <class Curve>
struct PerStep {
  static_assert(detail::RateCurve<Curve>,
                "lockstep: PerStep takes a curve, such as CosineAnnealingLR, which is called with the number "
                "of a step and gives the factor of the rate");
  Curve curve;
  double rate_factor(std::int64_t /*epoch*/, std::int64_t step) const { return curve(step); }
};
template <class Curve>
PerStep(Curve) -> PerStep<Curve>;

/// A Schedule that evaluates its curve at the epoch, so that all steps of an epoch have one factor.
template <class Curve>
struct PerEpoch {
  static_assert(detail::RateCurve<Curve>,
                "lockstep: PerEpoch takes a curve, such as StepLR, which is called with the number of an "
                "epoch and gives the factor of the rate");
  Curve curve;
  double rate_factor(std::int64_t epoch, std::int64_t /*step*/) const { return curve(epoch); }
};
template <class Curve>
PerEpoch(Curve) -> PerEpoch<Curve>;

/// How the learning rate scales with the global batch size.
enum class RateRule {
  /// Scales linearly: the rule of Goyal et al. (arXiv 1706.02677), for SGD.
  linear,
  /// Scales with the square root, which keeps the variance of an update: common for Adam.
  square_root,
};

/// The samples of one optimizer step.
struct GlobalBatch {
  std::int64_t per_rank = 1;      ///< samples per backward
  std::int64_t accumulation = 1;  ///< backward calls per optimizer step
  std::int64_t reference = 256;   ///< the batch size for which the rate was tuned
};

/// Returns `lr` scaled by `rule` with the ratio of the global batch to the reference, and logs it. Throws
/// UsageError if a batch size or count is below 1, or `lr` is negative or not finite.
inline double scaled_rate(double lr, RateRule rule, const GlobalBatch& batch, const World& world) {
  if (batch.per_rank < 1 || batch.accumulation < 1 || batch.reference < 1)
    throw UsageError(
        detail::formatted("scaled_rate: {} samples per rank, {} backward calls per step and a reference of "
                          "{}: give 1 or more for each",
                          batch.per_rank, batch.accumulation, batch.reference));
  if (!(lr >= 0) || !std::isfinite(lr))
    throw UsageError(detail::formatted("scaled_rate: a learning rate of {}: give 0 or more", lr));
  const std::int64_t global = batch.per_rank * world.size() * batch.accumulation;
  const double ratio = static_cast<double>(global) / static_cast<double>(batch.reference);
  const auto [factor, name] =
      rule == RateRule::linear ? std::pair(ratio, "linear") : std::pair(std::sqrt(ratio), "square root");
  world.log.info(
      "learning rate {:.6g} ({} rule: {:.6g} for a batch of {}; global batch {} = {} x {} ranks x {})",
      lr * factor, name, lr, batch.reference, global, batch.per_rank, world.size(), batch.accumulation);
  return lr * factor;
}

}  // namespace lockstep::inline v0_1
