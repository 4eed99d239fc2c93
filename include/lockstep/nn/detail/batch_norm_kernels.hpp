#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/batch_norm_backward_elemt.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/batch_norm_gather_stats_with_counts.h>
#include <ATen/ops/batch_norm_stats.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceType.h>

#include "lockstep/detail/const_data.hpp"

namespace lockstep::inline v0_1::detail {

/// The running statistics [C], undefined if they are not tracked. A training step updates them by
/// `running = (1 - momentum) * running + momentum * batch`.
struct RunningStatistics {
  at::Tensor mean, variance;
  double momentum;
};

/// The statistics of the combined batch: mean and 1 / sqrt(variance + eps) per channel [C], in the dtype of
/// the kernels, and the number of values per channel, in the form that the kernels take it.
struct JoinedStatistics {
  at::Tensor mean, invstd, count;
};

/// The arithmetic of synchronized batch norm on one type of device. The ranks exchange data between `local`
/// and `join`, and between `sums` and `input_gradient`. `input` and `gradient` are dense [N, C, ...] tensors
/// of one shape and memory format; `weight` and `bias` are [C] or undefined. None of these functions blocks
/// the host if the device has streams.
struct BatchNormKernels {
  /// Returns the statistics of this rank's batch: a row [2C + 1] that ends with the count.
  at::Tensor (*local)(const at::Tensor& input, double eps);
  /// Joins the rows of all ranks [ranks, 2C + 1] in an order equal on every rank, so that all ranks get equal bits.
  /// Updates the running mean if there is at least one value, and the running variance if there are at least two.
  JoinedStatistics (*join)(const at::Tensor& rows, const at::Tensor& input, double eps,
                           const RunningStatistics& running);
  at::Tensor (*normalize)(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                          const JoinedStatistics& joined);
  /// Returns, as [2C], the per-channel sums over this rank's batch: first of gradient, then of
  /// gradient * (input - mean).
  at::Tensor (*sums)(const at::Tensor& gradient, const at::Tensor& input, const JoinedStatistics& joined);
  /// Returns the input's gradient. `sums` is summed over all ranks.
  at::Tensor (*input_gradient)(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
                               const JoinedStatistics& joined, const at::Tensor& sums);
};

/// Returns the dtype of statistics and parameters in ATen's kernels.
inline at::ScalarType statistics_dtype(const at::Tensor& input) {
  return at::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type();
}

inline at::Tensor converted(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() ? tensor.to(dtype) : tensor;
}

}  // namespace lockstep::inline v0_1::detail

/// Synchronized batch norm on ATen's CPU kernels for batch norm, which are vectorized and keep the memory
/// format. Exchanged data and per-channel arithmetic are float64.
namespace lockstep::inline v0_1::detail::cpu_batch_norm {

inline at::Tensor affine(const at::Tensor& input, const at::Tensor& scale, const at::Tensor& shift,
                         const at::Tensor& mean) {
  return std::get<0>(at::native_batch_norm(input, scale, shift, mean, at::ones_like(mean), /*training=*/false,
                                           /*momentum=*/0, /*eps=*/0));
}

inline at::Tensor local(const at::Tensor& input, double /*eps*/) {
  const std::int64_t channels = input.size(1);
  at::Tensor row = at::zeros({2 * channels + 1}, at::TensorOptions(at::kDouble).device(input.device()));
  if (input.numel() == 0) return row;
  const auto [mean, variance] =
      at::batch_norm_update_stats(input.to(statistics_dtype(input)), {}, {}, /*momentum=*/0);
  const auto count = static_cast<double>(input.numel() / channels);
  row.narrow(0, 0, channels).copy_(mean);
  row.narrow(0, channels, channels).copy_(variance).mul_(count);
  row.select(0, 2 * channels).fill_(count);
  return row;
}

inline void blend(const at::Tensor& running, const at::Tensor& batch, double momentum) {
  if (!running.defined()) return;
  at::Tensor target = running;
  target.copy_(target.to(at::kDouble).mul_(1 - momentum).add_(batch, momentum));
}

/// Joins the rows by Chan's formula, in rank order.
inline JoinedStatistics join(const at::Tensor& rows, const at::Tensor& input, double eps,
                             const RunningStatistics& running) {
  const std::int64_t length = rows.size(1), channels = (length - 1) / 2;
  at::Tensor mean = at::zeros({channels}, rows.options()), squares = at::zeros_like(mean);
  auto* means = mean.mutable_data_ptr<double>();
  auto* sums = squares.mutable_data_ptr<double>();
  double count = 0;
  for (std::int64_t rank = 0; rank < rows.size(0); ++rank) {
    const double* row = const_data<double>(rows) + rank * length;
    const double more = row[2 * channels], total = count + more;
    if (more == 0) continue;
    for (std::int64_t c = 0; c < channels; ++c) {
      const double distance = row[c] - means[c];
      means[c] += distance * (more / total);
      sums[c] += row[channels + c] + distance * distance * (count * more / total);
    }
    count = total;
  }
  if (count > 0) blend(running.mean, mean, running.momentum);
  // The unbiased variance of one value would be 0 / 0.
  if (count > 1) blend(running.variance, squares / (count - 1), running.momentum);
  const auto dtype = statistics_dtype(input);
  return {mean.to(dtype), (squares / std::max(count, 1.0)).add_(eps).rsqrt_().to(dtype),
          at::scalar_tensor(count, rows.options())};
}

inline at::Tensor normalize(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                            const JoinedStatistics& joined) {
  const auto dtype = statistics_dtype(input);
  return affine(input, weight.defined() ? joined.invstd * weight.to(dtype) : joined.invstd,
                converted(bias, dtype), joined.mean);
}

inline at::Tensor sums(const at::Tensor& gradient, const at::Tensor& input, const JoinedStatistics& joined) {
  if (input.numel() == 0) return at::zeros({2 * input.size(1)}, joined.count.options());
  // These sums are the gradients of weight and bias of an evaluation-mode batch norm with variance 1.
  const auto [none, products, plain] =
      at::native_batch_norm_backward(gradient, input, {}, joined.mean, at::ones_like(joined.mean), {}, {},
                                     /*train=*/false, /*eps=*/0, {false, true, true});
  return at::cat({plain.to(at::kDouble), products.to(at::kDouble)});
}

/// Returns (gradient - mean(gradient) - (input - mean) * invstd^2 * mean(gradient * (input - mean)))
/// * invstd * weight.
inline at::Tensor input_gradient(const at::Tensor& gradient, const at::Tensor& input,
                                 const at::Tensor& weight, const JoinedStatistics& joined,
                                 const at::Tensor& sums) {
  if (input.numel() == 0) return at::zeros_like(input);
  const std::int64_t channels = input.size(1);
  const at::Tensor invstd = joined.invstd.to(at::kDouble), means = sums / joined.count;
  const at::Tensor scale = weight.defined() ? invstd * weight.to(at::kDouble) : invstd;
  const at::Tensor slope = (means.narrow(0, channels, channels) * invstd * invstd * scale).neg_();
  const at::Tensor shift = (means.narrow(0, 0, channels) * scale).neg_();
  const auto dtype = statistics_dtype(input);
  // Terms that cancel must not be rounded to half precision before they are added.
  at::Tensor result = affine(input.to(dtype), slope.to(dtype), shift.to(dtype), joined.mean);
  std::vector<std::int64_t> shape(static_cast<std::size_t>(input.dim()), 1);
  shape[1] = channels;
  return result.addcmul_(gradient.to(dtype), scale.to(dtype).view(shape)).to(input.scalar_type());
}

inline constexpr BatchNormKernels kernels{&local, &join, &normalize, &sums, &input_gradient};

}  // namespace lockstep::inline v0_1::detail::cpu_batch_norm

/// Synchronized batch norm on ATen's CUDA kernels for it, called as by torch.nn.SyncBatchNorm. They are
/// dispatched operators, so this compiles without CUDA headers. The ranks exchange mean,
/// 1 / sqrt(variance + eps) and count in float32 (float64 for float64 inputs), as the kernels return them.
///
/// Python synchronizes to filter out ranks without data; here they are sorted to the end, where the kernel adds
/// nothing for them.
namespace lockstep::inline v0_1::detail::cuda_batch_norm {

inline at::Tensor local(const at::Tensor& input, double eps) {
  const std::int64_t channels = input.size(1);
  const auto options = input.options().dtype(statistics_dtype(input));
  if (input.numel() == 0) {  // invstd 1, not 0: the kernel multiplies 1 / invstd by the count, which is 0
    at::Tensor row = at::zeros({2 * channels + 1}, options);
    row.narrow(0, channels, channels).fill_(1);
    return row;
  }
  const auto [mean, invstd] = at::batch_norm_stats(input, eps);
  const auto count = static_cast<double>(input.numel() / channels);
  return at::cat({mean, invstd, at::full({1}, count, options)});
}

inline void keep_where(const at::Tensor& condition, const at::Tensor& updated, const at::Tensor& running) {
  at::Tensor target = running;
  target.copy_(at::where(condition, updated, target.to(updated.scalar_type())));
}

inline JoinedStatistics join(const at::Tensor& rows, const at::Tensor&, double eps,
                             const RunningStatistics& running) {
  const std::int64_t channels = (rows.size(1) - 1) / 2;
  // The kernel divides by the running count: a rank without data must not be the first. Ranks with equal
  // counts keep their order, so that the bits are equal on all ranks and to Python's.
  const auto [counts, order] =
      at::sort(rows.select(1, 2 * channels), /*stable=*/true, /*dim=*/0, /*descending=*/true);
  const at::Tensor sorted = rows.index_select(0, order);
  const at::Tensor means = sorted.narrow(1, 0, channels).contiguous(),
                   invstds = sorted.narrow(1, channels, channels).contiguous();
  const bool tracked = running.mean.defined();
  const auto copy_of = [&](const at::Tensor& tensor) {
    return tracked ? tensor.to(rows.scalar_type(), /*non_blocking=*/false, /*copy=*/true) : at::Tensor();
  };
  const at::Tensor new_mean = copy_of(running.mean), new_variance = copy_of(running.variance);
  const auto [mean, invstd] = at::batch_norm_gather_stats_with_counts(
      rows, means, invstds, new_mean, new_variance, running.momentum, eps, counts);
  if (tracked) {
    const at::Tensor total = counts.sum();
    keep_where(total > 0, new_mean, running.mean);
    // The unbiased variance of one value would be 0 / 0.
    keep_where(total > 1, new_variance, running.variance);
  }
  return {mean, invstd, counts.to(at::kInt)};
}

inline at::Tensor normalize(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                            const JoinedStatistics& joined) {
  const auto dtype = joined.mean.scalar_type();
  return at::batch_norm_elemt(input, converted(weight, dtype), converted(bias, dtype), joined.mean,
                              joined.invstd, /*eps=*/0);
}

inline at::Tensor sums(const at::Tensor& gradient, const at::Tensor& input, const JoinedStatistics& joined) {
  if (input.numel() == 0) return at::zeros({2 * input.size(1)}, joined.mean.options());
  const auto [plain, products, of_weight, of_bias] =
      at::batch_norm_backward_reduce(gradient, input, joined.mean, joined.invstd, std::nullopt,
                                     /*input_g=*/true, /*weight_g=*/false, /*bias_g=*/false);
  return at::cat({plain, products});
}

inline at::Tensor input_gradient(const at::Tensor& gradient, const at::Tensor& input,
                                 const at::Tensor& weight, const JoinedStatistics& joined,
                                 const at::Tensor& sums) {
  if (input.numel() == 0) return at::empty_like(input);
  const std::int64_t channels = input.size(1);
  return at::batch_norm_backward_elemt(
      gradient, input, joined.mean, joined.invstd, converted(weight, joined.mean.scalar_type()),
      sums.narrow(0, 0, channels), sums.narrow(0, channels, channels), joined.count);
}

inline constexpr BatchNormKernels kernels{&local, &join, &normalize, &sums, &input_gradient};

}  // namespace lockstep::inline v0_1::detail::cuda_batch_norm
