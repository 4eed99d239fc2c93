// What goes into CUDA's kernels of batch norm and what comes out, with their formulas on the CPU in place of
// them.

#include <torch/torch.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "lockstep/nn/detail/batch_norm_kernels.hpp"
#include "lockstep/nn/detail/sync_batch_norm_function.hpp"
#include "support/catch.hpp"
#include "support/text_of.hpp"

namespace cuda_batch_norm_test {

using lockstep::detail::JoinedStatistics;
using lockstep::detail::RunningStatistics;
namespace cpu = lockstep::detail::cpu_batch_norm;
namespace cuda = lockstep::detail::cuda_batch_norm;

namespace {

at::Tensor per_channel(const at::Tensor& tensor, const at::Tensor& like) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(like.dim()), 1);
  shape[1] = tensor.numel();
  return tensor.view(shape);
}

std::vector<std::int64_t> all_but_channels(const at::Tensor& tensor) {
  std::vector<std::int64_t> dims(static_cast<std::size_t>(tensor.dim()) - 1);
  std::iota(dims.begin(), dims.end(), 1);
  dims[0] = 0;
  return dims;
}

// Dtypes and shapes are refused as the kernels refuse them.
struct Formulas {
  static std::tuple<at::Tensor, at::Tensor> stats(const at::Tensor& input, double eps) {
    const auto values =
        input.to(at::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type());
    const auto [variance, mean] = at::var_mean(values, all_but_channels(input), /*correction=*/0);
    return {mean, (variance + eps).rsqrt()};
  }

  static std::tuple<at::Tensor, at::Tensor> gather_stats(const at::Tensor& like, const at::Tensor& means,
                                                         const at::Tensor& invstds, at::Tensor running_mean,
                                                         at::Tensor running_variance, double momentum,
                                                         double eps, const at::Tensor& counts) {
    TORCH_CHECK(counts.scalar_type() == like.scalar_type() && means.is_contiguous(), "dtype or layout");
    if (running_mean.defined()) TORCH_CHECK(running_mean.scalar_type() == counts.scalar_type(), "dtype");
    const std::int64_t ranks = means.size(0), channels = means.size(1);
    at::Tensor mean = at::empty({channels}, means.options()), invstd = at::empty_like(mean);
    for (std::int64_t c = 0; c < channels; ++c) {
      double average = 0, squares = 0, n = 0;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const double count = counts[rank].item<double>(), m = means[rank][c].item<double>();
        double v = 1 / invstds[rank][c].item<double>();
        v = (v * v - eps) * count;
        const double factor = 1 / (n + count);
        squares += v + (average - m) * (average - m) * n * count * factor;
        average = n * factor * average + count * factor * m;
        n += count;
      }
      mean[c] = average;
      invstd[c] = 1 / std::sqrt(squares / n + eps);
      if (!running_mean.defined()) continue;
      running_mean[c] = (1 - momentum) * running_mean[c] + momentum * average;
      running_variance[c] = (1 - momentum) * running_variance[c] + momentum * squares / (n - 1);
    }
    return {mean, invstd};
  }

  static at::Tensor elementwise(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                                const at::Tensor& mean, const at::Tensor& invstd, double) {
    at::Tensor result = (input - per_channel(mean, input)) * per_channel(invstd, input);
    if (weight.defined()) {
      TORCH_CHECK(weight.scalar_type() == mean.scalar_type(), "dtype");
      result = result * per_channel(weight, input) + per_channel(bias, input);
    }
    return result.to(input.scalar_type());
  }

  static std::tuple<at::Tensor, at::Tensor> reduce(const at::Tensor& gradient, const at::Tensor& input,
                                                   const at::Tensor& mean, const at::Tensor&) {
    const auto dims = all_but_channels(input);
    const at::Tensor wide = gradient.to(mean.scalar_type());
    return {wide.sum(dims), (wide * (input - per_channel(mean, input))).sum(dims)};
  }

  static at::Tensor backward(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& mean,
                             const at::Tensor& invstd, const at::Tensor& weight, const at::Tensor& plain,
                             const at::Tensor& products, const at::Tensor& counts) {
    TORCH_CHECK(counts.scalar_type() == at::kInt, "counts");
    const double norm = 1 / counts.sum().item<double>();
    const at::Tensor scale = weight.defined() ? invstd * weight : invstd;
    const at::Tensor slope = per_channel(products * norm * invstd * invstd, input);
    const at::Tensor centred = input - per_channel(mean, input);
    return ((gradient - per_channel(plain * norm, input) - centred * slope) * per_channel(scale, input))
        .to(input.scalar_type());
  }
};

constexpr const auto& formulas = cuda::Kernels<Formulas>::kernels;

struct Ranks {
  std::vector<at::Tensor> inputs, gradients;
  at::Tensor weight, bias;

  explicit Ranks(const std::vector<std::int64_t>& batches, at::ScalarType type = at::kFloat) {
    const auto options = at::TensorOptions(type);
    for (const std::int64_t batch : batches) {
      inputs.push_back(torch::randn({batch, 3, 4, 2}).add_(1).to(options));
      gradients.push_back(torch::randn({batch, 3, 4, 2}).to(options));
    }
    weight = torch::rand({3}).add_(0.5).to(options);
    bias = torch::rand({3}).to(options);
  }
};

struct Found {
  JoinedStatistics joined;
  at::Tensor running_mean, running_variance;
  std::vector<at::Tensor> outputs, of_inputs, sums;
};

Found run(const lockstep::detail::BatchNormKernels& kernels, const Ranks& ranks,
          at::ScalarType running_type = at::kFloat) {
  constexpr double eps = 1e-3;
  std::vector<at::Tensor> rows;
  for (const auto& input : ranks.inputs) rows.push_back(kernels.local(input, eps));
  Found found;
  found.running_mean = torch::full({3}, 0.5, running_type);
  found.running_variance = torch::full({3}, 2.0, running_type);
  found.joined = kernels.join(at::stack(rows), ranks.inputs[0], eps,
                              RunningStatistics{found.running_mean, found.running_variance, 0.25});
  at::Tensor total;
  for (std::size_t i = 0; i < ranks.inputs.size(); ++i) {
    found.outputs.push_back(kernels.normalize(ranks.inputs[i], ranks.weight, ranks.bias, found.joined));
    const auto sums = kernels.sums(ranks.gradients[i], ranks.inputs[i], found.joined);
    total = total.defined() ? total + sums : sums;
  }
  found.sums.push_back(total);
  for (std::size_t i = 0; i < ranks.inputs.size(); ++i)
    found.of_inputs.push_back(
        kernels.input_gradient(ranks.gradients[i], ranks.inputs[i], ranks.weight, found.joined, total));
  return found;
}

void check_equal(const Found& a, const Found& b, double tolerance) {
  const auto close = [&](const at::Tensor& one, const at::Tensor& two) {
    return one.sizes() == two.sizes() &&
           at::allclose(one.to(at::kDouble), two.to(at::kDouble), tolerance, tolerance, /*equal_nan=*/false);
  };
  CHECK(close(a.joined.mean, b.joined.mean));
  CHECK(close(a.joined.invstd, b.joined.invstd));
  CHECK(close(a.running_mean, b.running_mean));
  CHECK(close(a.running_variance, b.running_variance));
  CHECK(close(a.sums[0], b.sums[0]));
  for (std::size_t i = 0; i < a.outputs.size(); ++i) {
    CHECK(a.outputs[i].scalar_type() == b.outputs[i].scalar_type());
    CHECK(close(a.outputs[i], b.outputs[i]));
    CHECK(close(a.of_inputs[i], b.of_inputs[i]));
  }
}

}  // namespace

TEST_CASE("CUDA's kernels are given what the CPU's are, and their results mean the same") {
  torch::manual_seed(5);
  SECTION("of several ranks with unequal batches") {
    const Ranks ranks({3, 5, 2});
    check_equal(run(formulas, ranks), run(cpu::kernels, ranks), 1e-4);
  }
  SECTION("where the first rank and another have no data") {
    const Ranks ranks({0, 5, 0, 2});
    check_equal(run(formulas, ranks), run(cpu::kernels, ranks), 1e-4);
  }
  SECTION("in float64, with running statistics in float32") {
    const Ranks ranks({3, 2}, at::kDouble);
    const auto found = run(formulas, ranks);
    CHECK(found.running_mean.scalar_type() == at::kFloat);
    check_equal(found, run(cpu::kernels, ranks), 1e-6);
  }
  SECTION("in bfloat16, with parameters in bfloat16") {
    const Ranks ranks({3, 2}, at::kBFloat16);
    check_equal(run(formulas, ranks), run(cpu::kernels, ranks), 4e-2);
  }
}

TEST_CASE("running statistics stay as they are where there is nothing to learn") {
  Ranks nothing({0, 0});
  auto found = run(formulas, nothing);
  CHECK(at::equal(found.running_mean, torch::full({3}, 0.5)));
  CHECK(at::equal(found.running_variance, torch::full({3}, 2.0)));
  // One value in all: a mean, and no variance.
  Ranks one({1});
  one.inputs[0] = torch::full({1, 3, 1, 1}, 2.5);
  one.gradients[0] = torch::ones({1, 3, 1, 1});
  found = run(formulas, one);
  CHECK(at::allclose(found.running_mean, torch::full({3}, 1.0)));
  CHECK(at::equal(found.running_variance, torch::full({3}, 2.0)));
}

TEST_CASE("kernels go by the input's device, and a device without any is named") {
  using lockstep::detail::batch_norm_kernels;
  CHECK(batch_norm_kernels(torch::ones({1}), "bn").local == cpu::kernels.local);
  CHECK_THAT(text_of<lockstep::UsageError>(
                 [&] { batch_norm_kernels(torch::ones({1}, torch::Device("meta")), "bn"); }),
             ContainsSubstring("bn: the input is on meta"));
  CHECK(cuda::kernels.local == cuda::Kernels<cuda::AtenOperators>::kernels.local);
}

}  // namespace cuda_batch_norm_test
