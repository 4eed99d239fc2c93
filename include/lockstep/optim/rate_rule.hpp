#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <optional>

#include "lockstep/error.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep {

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
