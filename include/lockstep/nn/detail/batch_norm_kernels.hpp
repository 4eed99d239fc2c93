#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

namespace lockstep::detail {

/// The running statistics [C] that a training step updates, undefined where there are none, by
/// `running = (1 - momentum) * running + momentum * batch`.
struct RunningStatistics {
  at::Tensor mean, variance;
  double momentum;
};

/// Of the joined batch, per channel: mean and 1 / sqrt(variance + eps) [C], in the dtype that the kernels
/// compute in; and the number of values a channel has, in the form in which the kernels want it back.
struct JoinedStatistics {
  at::Tensor mean, invstd, count;
};

/// The arithmetic of a synchronised batch norm on one kind of device; the ranks meet between `local` and
/// `join`, and between `sums` and `input_gradient`. `input` and `gradient` are [N, C, ...] of one shape and
/// memory format, dense; `weight` and `bias` [C] or undefined. None of these functions blocks the host where
/// the device has a stream. What travels keeps the precision: the sum of squared deviations where the kernels
/// can give it, since 1 / sqrt(variance + eps) forgets a variance that is far below eps.
struct BatchNormKernels {
  /// What this rank knows of its batch, which may be empty: a row [2C + 1] that ends with the count.
  at::Tensor (*local)(const at::Tensor& input, double eps);
  /// Joins every rank's row [ranks, 2C + 1] in the order of the ranks, so that all get the same bits, and
  /// updates the running statistics: the mean where there is a value, the variance where there are two.
  JoinedStatistics (*join)(const at::Tensor& rows, const at::Tensor& input, double eps,
                           const RunningStatistics& running);
  /// (input - mean) * invstd * weight + bias.
  at::Tensor (*normalize)(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                          const JoinedStatistics& joined);
  /// Over this rank's batch, per channel: the sum of gradient, then that of gradient * (input - mean), as
  /// [2C].
  at::Tensor (*sums)(const at::Tensor& gradient, const at::Tensor& input, const JoinedStatistics& joined);
  /// The input's gradient, with `sums` over all ranks.
  at::Tensor (*input_gradient)(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
                               const JoinedStatistics& joined, const at::Tensor& sums);
};

}  // namespace lockstep::detail
