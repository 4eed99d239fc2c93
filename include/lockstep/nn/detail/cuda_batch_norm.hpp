#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/batch_norm_backward_elemt.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/batch_norm_gather_stats_with_counts.h>
#include <ATen/ops/batch_norm_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "lockstep/nn/detail/batch_norm_kernels.hpp"

/// Synchronized batch norm on ATen's CUDA kernels for it, called as by torch.nn.SyncBatchNorm. They are
/// dispatched operators, so this compiles without CUDA headers. The ranks exchange mean,
/// 1 / sqrt(variance + eps) and count in float32 (float64 for float64 inputs), as the kernels return them.
///
/// Never synchronizes with the device. Python does, to filter out ranks without data; here these ranks are
/// sorted to the end, where the kernel adds nothing for them.
namespace lockstep::detail::cuda_batch_norm {

/// The operators, which LibTorch implements for CUDA tensors only. Tests substitute them.
struct AtenOperators {
  static std::tuple<at::Tensor, at::Tensor> stats(const at::Tensor& input, double eps) {
    return at::batch_norm_stats(input, eps);
  }
  static std::tuple<at::Tensor, at::Tensor> gather_stats(const at::Tensor& like, const at::Tensor& means,
                                                         const at::Tensor& invstds,
                                                         const at::Tensor& running_mean,
                                                         const at::Tensor& running_variance, double momentum,
                                                         double eps, const at::Tensor& counts) {
    return at::batch_norm_gather_stats_with_counts(like, means, invstds, running_mean, running_variance,
                                                   momentum, eps, counts);
  }
  static at::Tensor elementwise(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                                const at::Tensor& mean, const at::Tensor& invstd, double eps) {
    return at::batch_norm_elemt(input, weight, bias, mean, invstd, eps);
  }
  static std::tuple<at::Tensor, at::Tensor> reduce(const at::Tensor& gradient, const at::Tensor& input,
                                                   const at::Tensor& mean, const at::Tensor& invstd) {
    auto [plain, products, of_weight, of_bias] =
        at::batch_norm_backward_reduce(gradient, input, mean, invstd, std::nullopt, /*input_g=*/true,
                                       /*weight_g=*/false, /*bias_g=*/false);
    return {plain, products};
  }
  static at::Tensor backward(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& mean,
                             const at::Tensor& invstd, const at::Tensor& weight, const at::Tensor& plain,
                             const at::Tensor& products, const at::Tensor& counts) {
    return at::batch_norm_backward_elemt(gradient, input, mean, invstd, weight, plain, products, counts);
  }
};

template <class Operators>
struct Kernels {
  /// Returns the dtype of statistics and parameters in the kernels.
  static at::ScalarType statistics_dtype(const at::Tensor& input) {
    return at::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type();
  }
  static at::Tensor converted(const at::Tensor& tensor, const at::Tensor& like) {
    return tensor.defined() ? tensor.to(like.scalar_type()) : tensor;
  }

  static at::Tensor local(const at::Tensor& input, double eps) {
    const std::int64_t channels = input.size(1);
    const auto options = input.options().dtype(statistics_dtype(input));
    if (input.numel() == 0) {  // invstd 1, not 0: the kernel multiplies 1 / invstd by the count, which is 0
      at::Tensor row = at::zeros({2 * channels + 1}, options);
      row.narrow(0, channels, channels).fill_(1);
      return row;
    }
    const auto [mean, invstd] = Operators::stats(input, eps);
    const auto count = static_cast<double>(input.numel() / channels);
    return at::cat({mean, invstd, at::full({1}, count, options)});
  }

  static JoinedStatistics join(const at::Tensor& rows, const at::Tensor&, double eps,
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
    const auto [mean, invstd] =
        Operators::gather_stats(rows, means, invstds, new_mean, new_variance, running.momentum, eps, counts);
    if (tracked) {
      const at::Tensor total = counts.sum();
      keep_where(total > 0, new_mean, running.mean);
      // The unbiased variance of one value would be 0 / 0.
      keep_where(total > 1, new_variance, running.variance);
    }
    return {mean, invstd, counts.to(at::kInt)};
  }

  static at::Tensor normalize(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                              const JoinedStatistics& joined) {
    return Operators::elementwise(input, converted(weight, joined.mean), converted(bias, joined.mean),
                                  joined.mean, joined.invstd, /*eps=*/0);
  }

  static at::Tensor sums(const at::Tensor& gradient, const at::Tensor& input,
                         const JoinedStatistics& joined) {
    if (input.numel() == 0) return at::zeros({2 * input.size(1)}, joined.mean.options());
    const auto [plain, products] = Operators::reduce(gradient, input, joined.mean, joined.invstd);
    return at::cat({plain, products});
  }

  static at::Tensor input_gradient(const at::Tensor& gradient, const at::Tensor& input,
                                   const at::Tensor& weight, const JoinedStatistics& joined,
                                   const at::Tensor& sums) {
    if (input.numel() == 0) return at::empty_like(input);
    const std::int64_t channels = input.size(1);
    return Operators::backward(gradient, input, joined.mean, joined.invstd, converted(weight, joined.mean),
                               sums.narrow(0, 0, channels), sums.narrow(0, channels, channels), joined.count);
  }

  static constexpr BatchNormKernels kernels{&local, &join, &normalize, &sums, &input_gradient};

 private:
  static void keep_where(const at::Tensor& condition, const at::Tensor& updated, const at::Tensor& running) {
    at::Tensor target = running;
    target.copy_(at::where(condition, updated, target.to(updated.scalar_type())));
  }
};

inline constexpr const BatchNormKernels& kernels = Kernels<AtenOperators>::kernels;

}  // namespace lockstep::detail::cuda_batch_norm
