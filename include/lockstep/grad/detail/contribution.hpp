#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace lockstep::detail {

/// What one backward contributes to a reduction. `losses` are the roots of the search for unused parameters.
/// With a `count` the gradients are those of a sum over that many samples, otherwise of a mean.
struct Contribution {
  at::ArrayRef<at::Tensor> losses;
  std::optional<double> count = std::nullopt;
  bool nothing = false;  // this rank has no data

  /// Returns `before` plus the count; nullopt without a count. A negative or non-finite count, which backward
  /// refuses, adds 0.
  [[nodiscard]] std::optional<double> count_after(double before) const {
    if (!count) return std::nullopt;
    return before + (std::isfinite(*count) ? std::max(*count, 0.0) : 0.0);
  }
};

}  // namespace lockstep::detail
