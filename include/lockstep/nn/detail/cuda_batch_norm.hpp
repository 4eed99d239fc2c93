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

/// Synchronised batch norm on ATen's CUDA kernels that were made for it, as torch.nn.SyncBatchNorm calls
/// them. They are dispatched operators, so that nothing of CUDA is needed to compile this. What travels is
/// mean, 1 / sqrt(variance + eps) and count in float32 (float64 for float64), which is what they give.
///
/// Nothing here waits for the device, unlike Python's, which looks for ranks without data: those are sorted
/// to the end here, where the kernel adds nothing for them.
namespace lockstep::detail::cuda_batch_norm {

/// The operators, which LibTorch has for CUDA tensors alone; tests put others in their place.
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
  /// The dtype of statistics and parameters in the kernels.
  static at::ScalarType statistics_dtype(const at::Tensor& input) {
    return at::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type();
  }
  static at::Tensor converted(const at::Tensor& tensor, const at::Tensor& like) {
    return tensor.defined() ? tensor.to(like.scalar_type()) : tensor;
  }

  static at::Tensor local(const at::Tensor& input, double eps) {
    const std::int64_t channels = input.size(1);
    const auto options = input.options().dtype(statistics_dtype(input));
    if (input.numel() == 0) {  // not 1 / sqrt(0): the kernel would multiply its inverse by the count of 0
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
    // The kernel divides by the count so far: a rank without data must not be the first. Ranks with equal
    // counts keep their order, so that all ranks get the same bits, which are Python's.
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
      // One value says nothing of the variance: its unbiased estimate would be 0 / 0.
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
