#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace lockstep::detail {

/// What a backward gives to the reduction, while it runs. `losses` are walked where unused parameters are
/// searched for; with a `count` the gradients are those of a sum over that many, else of a mean.
struct Contribution {
  at::ArrayRef<at::Tensor> losses;
  std::optional<double> count = std::nullopt;
  bool nothing = false;  // this rank has no data

  /// The count with those before it; of one that cannot be, which backward will refuse, nothing.
  [[nodiscard]] std::optional<double> count_after(double before) const {
    if (!count) return std::nullopt;
    return before + (std::isfinite(*count) ? std::max(*count, 0.0) : 0.0);
  }
};

}  // namespace lockstep::detail
