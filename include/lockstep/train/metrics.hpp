#pragma once

#include <cmath>
#include <concepts>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/sum.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// A mean that is not divided yet: the sum over some samples (one element) and how many they were, or what
/// they weigh. Ranks and batches of unequal size add up to the exact mean, which two means would not.
struct Mean {
  /// `sum` takes part in autograd where it is a loss.
  template <class Number>
  requires std::is_arithmetic_v<Number> Mean(at::Tensor sum, Number count)
      : sum(std::move(sum)), count(static_cast<double>(count)) {}

  at::Tensor sum;
  double count;
};

/// The samples of a batch: the length of its `data`, of itself where it is a tensor, or its `size()`.
template <class Batch>
concept Countable = requires(const Batch& batch) {
  batch.data.size(0);
}
|| std::convertible_to<const Batch&, const at::Tensor&> || requires(const Batch& batch) {
  batch.size();
};

template <Countable Batch>
std::int64_t samples_in(const Batch& batch) {
  if constexpr (requires { batch.data.size(0); })
    return batch.data.size(0);
  else if constexpr (std::convertible_to<const Batch&, const at::Tensor&>)
    return static_cast<const at::Tensor&>(batch).size(0);
  else
    return static_cast<std::int64_t>(batch.size());
}

}  // namespace lockstep

namespace lockstep::detail {

// The value of a one-element tensor. On a CPU it is read where it lies: no operator runs.
inline double host_value(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.numel() == 1) {
    switch (tensor.scalar_type()) {
      case at::kDouble:
        return *tensor.const_data_ptr<double>();
      case at::kFloat:
        return static_cast<double>(*tensor.const_data_ptr<float>());
      case at::kLong:
        return static_cast<double>(*tensor.const_data_ptr<std::int64_t>());
      default:
        break;
    }
  }
  return tensor.item<double>();
}

}  // namespace lockstep::detail

namespace lockstep {

/// What a sum and a count come to, on the host.
struct Total {
  double sum = 0;
  double count = 0;

  Total& operator+=(const Total& other) {
    sum += other.sum;
    count += other.count;
    return *this;
  }
  /// NaN where nothing was counted.
  [[nodiscard]] double mean() const { return sum / count; }
};

/// Adds means up without waiting for a device at each of them: their values are read when `total()` asks, or
/// when `capacity` of them are pending.
class MeanMeter {
 public:
  explicit MeanMeter(std::size_t capacity = 256) { pending_.reserve(capacity); }

  /// `value` is one element, multiplied by `factor` where it is a mean over `factor` samples already. `step`
  /// is what `first_not_finite()` calls it.
  void add(const at::Tensor& value, double factor, double count, std::int64_t step = 0) {
    if (pending_.size() == pending_.capacity()) read();
    // Without the graph, which holds every activation of the step; unlike detach() this is no operator.
    pending_.push_back({value.requires_grad() ? value.variable_data() : value, factor, count, step});
  }
  void add(const Mean& mean) { add(mean.sum, 1, mean.count); }
  void add(const Total& total) { total_ += total; }

  /// Of this rank.
  [[nodiscard]] const Total& total() {
    read();
    return total_;
  }

  /// The step of the first value that was NaN or infinite, of this rank.
  [[nodiscard]] std::optional<std::int64_t> first_not_finite() {
    read();
    return first_not_finite_;
  }

 private:
  struct Pending {
    at::Tensor value;
    double factor, count;
    std::int64_t step;
  };

  void read() {
    for (const auto& [value, factor, count, step] : pending_) {
      if (count == 0) continue;
      const double number = detail::host_value(value);
      if (!std::isfinite(number) && !first_not_finite_) first_not_finite_ = step;
      total_ += {number * factor, count};
    }
    pending_.clear();
  }

  Total total_;
  std::optional<std::int64_t> first_not_finite_;
  std::vector<Pending> pending_;
};

}  // namespace lockstep

namespace lockstep::detail {
template <class T>
concept MeanOrTensor =
    std::same_as<std::remove_cvref_t<T>, Mean> || std::same_as<std::remove_cvref_t<T>, at::Tensor>;

}  // namespace lockstep::detail

namespace lockstep {

/// A metric of what the model answers: `metric(output, batch)` gives a Mean over the batch, or a tensor of
/// one element that is the mean over the batch's samples. Called without autograd, on each batch of this
/// rank's; the sums and counts of all batches and ranks are added and divided once. A lambda is one.
template <class M, class Batch>
concept OutputMetric = requires(M& metric, const at::Tensor& output, Batch& batch) {
  { metric(output, batch) } -> detail::MeanOrTensor;
};

/// A metric that runs the model itself, as a loss does: `metric(model, batch)`.
template <class M, class Model, class Batch>
concept ModelMetric = !OutputMetric<M, Batch> && requires(M & metric, Model& model, Batch& batch) {
  { metric(model, batch) } -> detail::MeanOrTensor;
};

template <class M, class Model, class Batch>
concept Metric = OutputMetric<M, Batch> || ModelMetric<M, Model, Batch>;

/// The fraction of samples whose largest output, over the last dimension, is at the target.
/// output: [..., C], batch.target: [...] of class numbers, such as [N, C] and [N]. Throws DataError for other
/// shapes, of which a target [N, 1] would be compared with every sample's output.
struct Accuracy {
  template <class Batch>
  Mean operator()(const at::Tensor& output, const Batch& batch) const {
    const at::Tensor& target = batch.target;
    if (output.dim() == 0 || target.sizes() != output.sizes().slice(0, output.dim() - 1))
      throw DataError(fmt::format(
          "Accuracy: the output is {} and the target {}: an output [..., C] needs a target [...] of class "
          "numbers, without the dimension of the classes; squeeze or argmax it in the dataset",
          detail::describe(output), detail::describe(target)));
    return {output.argmax(-1).eq(target).sum(), target.numel()};
  }
};

/// Cross-entropy as a sum and the count of targets that are not `ignore_index`, for losses and metrics of
/// which some targets are ignored. A tensor, cross_entropy's mean, would be weighed by all samples of its
/// batch. output: [N, C, ...], target: [N, ...] of class numbers, or [N, C, ...] of probabilities, of which
/// none is ignored. Waits for the device, for the count.
/// Counterpart: torch.nn.functional.cross_entropy.
inline Mean counted_cross_entropy(const at::Tensor& output, const at::Tensor& target,
                                  std::int64_t ignore_index = -100) {
  const at::Tensor sum =
      at::cross_entropy_loss(output, target, /*weight=*/{}, at::Reduction::Sum, ignore_index);
  if (at::isFloatingType(target.scalar_type()))  // probabilities of C classes for each
    return {sum, output.dim() < 2 ? 1 : output.numel() / output.size(1)};
  return {sum, target.ne(ignore_index).sum().template item<std::int64_t>()};
}

/// The mean of a loss over the samples, or over whatever the loss counts. `loss(output, target)` gives the
/// mean over a batch's samples, a tensor of one element, or a Mean{sum, count}; counted_cross_entropy by
/// default. A loss that averages over anything but samples (targets that are not ignored, weights, tokens)
/// must return a Mean.
template <class Loss = Mean (*)(const at::Tensor&, const at::Tensor&)>
struct MeanLoss {
  Loss loss = [](const at::Tensor& output, const at::Tensor& target) {
    return counted_cross_entropy(output, target);
  };

  template <class Batch>
  auto operator()(const at::Tensor& output, const Batch& batch) {
    return loss(output, batch.target);
  }
};
MeanLoss()->MeanLoss<>;
template <class Loss>
MeanLoss(Loss) -> MeanLoss<Loss>;

}  // namespace lockstep

namespace lockstep::detail {

// Adds a loss or metric of one batch, in either of its forms, to `meter`.
template <class Batch>
void add_to(MeanMeter& meter, const Mean& value, const Batch&) {
  meter.add(value);
}
template <class Batch>
void add_to(MeanMeter& meter, const at::Tensor& mean, const Batch& batch) {
  const auto samples = static_cast<double>(samples_in(batch));
  meter.add(mean, samples, samples);
}

}  // namespace lockstep::detail
