#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "lockstep/nn/detail/batch_norm_kernels.hpp"

/// Synchronized batch norm on ATen's CPU kernels for batch norm, which are vectorized and keep the memory
/// format. Exchanged data and per-channel arithmetic are float64.
namespace lockstep::detail::cpu_batch_norm {

/// Returns the dtype of statistics and parameters in ATen's kernels.
inline at::ScalarType statistics_dtype(const at::Tensor& input) {
  return at::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type();
}

inline at::Tensor converted(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() ? tensor.to(dtype) : tensor;
}

/// Returns (input - mean) * scale + shift, per channel.
inline at::Tensor affine(const at::Tensor& input, const at::Tensor& scale, const at::Tensor& shift,
                         const at::Tensor& mean) {
  return std::get<0>(at::native_batch_norm(input, scale, shift, mean, at::ones_like(mean), /*training=*/false,
                                           /*momentum=*/0, /*eps=*/0));
}

/// Returns the row of mean, sum of squared deviations and count.
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
    const double* row = rows.const_data_ptr<double>() + rank * length;
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

}  // namespace lockstep::detail::cpu_batch_norm
