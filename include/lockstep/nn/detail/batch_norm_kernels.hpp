#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

namespace lockstep::detail {

/// The running statistics [C], undefined if they are not tracked. A training step updates them by
/// `running = (1 - momentum) * running + momentum * batch`.
struct RunningStatistics {
  at::Tensor mean, variance;
  double momentum;
};

/// The statistics of the joined batch: mean and 1 / sqrt(variance + eps) per channel [C], in the dtype of the
/// kernels, and the number of values per channel, in the form that the kernels take it.
struct JoinedStatistics {
  at::Tensor mean, invstd, count;
};

/// The arithmetic of synchronized batch norm on one type of device. The ranks exchange data between `local`
/// and `join`, and between `sums` and `input_gradient`. `input` and `gradient` are dense [N, C, ...] tensors
/// of one shape and memory format; `weight` and `bias` are [C] or undefined. None of these functions blocks
/// the host if the device has streams. Where the kernels allow it, the ranks exchange the sum of squared
/// deviations, which keeps the precision: 1 / sqrt(variance + eps) loses a variance far below eps.
struct BatchNormKernels {
  /// Returns the statistics of this rank's batch, which may be empty: a row [2C + 1] that ends with the
  /// count.
  at::Tensor (*local)(const at::Tensor& input, double eps);
  /// Joins the rows of all ranks [ranks, 2C + 1] in an order equal on every rank, so that all ranks get equal
  /// bits. Updates the running mean if there is at least one value, and the running variance if there are at
  /// least two.
  JoinedStatistics (*join)(const at::Tensor& rows, const at::Tensor& input, double eps,
                           const RunningStatistics& running);
  /// Returns (input - mean) * invstd * weight + bias.
  at::Tensor (*normalize)(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                          const JoinedStatistics& joined);
  /// Returns, as [2C], the per-channel sums over this rank's batch: first of gradient, then of
  /// gradient * (input - mean).
  at::Tensor (*sums)(const at::Tensor& gradient, const at::Tensor& input, const JoinedStatistics& joined);
  /// Returns the input's gradient. `sums` is summed over all ranks.
  at::Tensor (*input_gradient)(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
                               const JoinedStatistics& joined, const at::Tensor& sums);
};

}  // namespace lockstep::detail
