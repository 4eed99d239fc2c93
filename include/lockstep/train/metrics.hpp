#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <c10/core/ScalarType.h>

#include "lockstep/detail/const_data.hpp"
#include "lockstep/detail/describe.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::inline v0_1 {

/// An undivided mean: a sum over samples, as one element, and the number or the total weight of the samples.
/// Means of batches and ranks of unequal size add up to the exact mean.
struct Mean {
  /// `sum` takes part in autograd if the Mean is a loss.
  template <class Number>
  requires std::is_arithmetic_v<Number> Mean(at::Tensor sum, Number count)
      : sum(std::move(sum)), count(static_cast<double>(count)) {}

  at::Tensor sum;
  double count;
};

/// A batch whose samples can be counted: by the length of its `data`, by its own length if it is a tensor, or
/// by its `size()`.
template <class Batch>
concept Countable = requires(const Batch& batch) {
  batch.data.size(0);
}
|| std::convertible_to<const Batch&, const at::Tensor&> || requires(const Batch& batch) {
  batch.size();
};

/// Returns the number of samples in a batch.
template <Countable Batch>
std::int64_t samples_in(const Batch& batch) {
  if constexpr (requires { batch.data.size(0); })
    return batch.data.size(0);
  else if constexpr (std::convertible_to<const Batch&, const at::Tensor&>)
    return static_cast<const at::Tensor&>(batch).size(0);
  else
    return static_cast<std::int64_t>(batch.size());
}

// Returns the value of a one-element tensor. Reads CPU memory directly, which runs no operator.
namespace detail {
inline double host_value(const at::Tensor& tensor) {
  const at::ScalarType type =
      tensor.is_cpu() && tensor.numel() == 1 ? tensor.scalar_type() : at::ScalarType::Undefined;
  if (type == at::kDouble) return *const_data<double>(tensor);
  if (type == at::kFloat) return static_cast<double>(*const_data<float>(tensor));
  if (type == at::kLong) return static_cast<double>(*const_data<std::int64_t>(tensor));
  return tensor.item<double>();
}
}  // namespace detail

/// A sum and a count on the host.
struct Total {
  double sum = 0;
  double count = 0;

  Total& operator+=(const Total& other) {
    sum += other.sum;
    count += other.count;
    return *this;
  }
  /// Returns NaN if nothing was counted.
  [[nodiscard]] double mean() const { return sum / count; }
};

/// Accumulates means without synchronizing with the device at each of them. It reads values of the host at once, and those
/// of a device when `total()` or `first_not_finite()` is called, or when `capacity` values are pending. Not thread-safe.
class MeanMeter {
 public:
  explicit MeanMeter(std::int64_t capacity = 256) { pending_.reserve(static_cast<std::size_t>(capacity)); }

  /// Adds `value`, one element, times `factor`: the number of samples if `value` is their mean. `step` is the
  /// number that `first_not_finite()` returns for this value.
  void add(const at::Tensor& value, double factor, double count, std::int64_t step = 0) {
    if (count == 0) return;
    if (value.is_cpu()) return take(detail::host_value(value), factor, count, step);
    if (pending_.size() == pending_.capacity()) read();
    // Detaches from the graph, which holds every activation of the step. Unlike detach(), it runs no operator. What no
    // graph has computed, such as a parameter or a metric's buffer, may change before it is read.
    const bool computed = value.requires_grad() && !value.is_leaf();
    pending_.push_back({computed ? value.variable_data() : value.detach().clone(), factor, count, step});
  }
  void add(const Mean& mean) { add(mean.sum, 1, mean.count); }  ///< Its sum may be on any device.
  void add(const Total& total) { total_ += total; }             ///< Of the host.

  /// Returns this rank's total. Synchronizes with the device.
  [[nodiscard]] const Total& total() {
    read();
    return total_;
  }

  /// Returns the step of this rank's first NaN or infinite value. Synchronizes with the device.
  [[nodiscard]] std::optional<std::int64_t> first_not_finite() {
    read();
    return first_not_finite_;
  }
  /// Returns the step of the first such value among those read so far. Does not synchronize with the device.
  [[nodiscard]] std::optional<std::int64_t> known_not_finite() const noexcept { return first_not_finite_; }

 private:
  struct Pending {
    at::Tensor value;
    double factor, count;
    std::int64_t step;
  };

  void read() {
    for (const auto& [value, factor, count, step] : pending_)
      take(detail::host_value(value), factor, count, step);
    pending_.clear();
  }
  void take(double number, double factor, double count, std::int64_t step) {
    if (!std::isfinite(number) && !first_not_finite_) first_not_finite_ = step;
    total_ += {number * factor, count};
  }

  Total total_;
  std::optional<std::int64_t> first_not_finite_;
  std::vector<Pending> pending_;
};

/// Sums over the samples of a batch, such as the correct predictions of each class. The shape is the same for
/// every batch on every rank. The sums of all batches are added in fp64: integers up to 2^53 add up exactly.
struct Sums {
  at::Tensor values;  ///< Of any shape.
};

/// Values of each sample of a batch, [samples, ...], such as the model's output. The dtype and the shape of a
/// sample's values are the same in every batch on every rank.
/// Counterpart: `Accelerator.gather_for_metrics` of Accelerate.
struct PerSample {
  at::Tensor values;  ///< [samples, ...]
};

namespace detail {
/// A string literal as a template argument.
template <std::size_t size>
struct PartName {
  char text[size];  // NOLINT(modernize-avoid-c-arrays): a structural type
  consteval PartName(const char (&literal)[size]) { std::copy_n(literal, size, text); }
  [[nodiscard]] constexpr std::string_view view() const { return {text, size - 1}; }
};

template <PartName part_name, class Value>
struct Named {
  static constexpr std::string_view name = part_name.view();
  Value value;
};
template <class T>
inline constexpr bool is_named = false;
template <PartName name, class Value>
inline constexpr bool is_named<Named<name, Value>> = true;
template <class T>
concept NamedPart = is_named<T>;

template <class... Parts>
consteval bool names_differ() {
  std::array<std::string_view, sizeof...(Parts)> names{Parts::name...};
  std::sort(names.begin(), names.end());
  return std::adjacent_find(names.begin(), names.end()) == names.end();
}

template <class T>
concept MeanOrTensor =
    std::same_as<std::remove_cvref_t<T>, Mean> || std::same_as<std::remove_cvref_t<T>, at::Tensor>;

template <class M>
concept ComputingMetric = requires(M& metric, const at::Tensor& total) {
  metric.compute(total);
};

// What a loss returns: a mean, or a tuple of the mean and of named parts that are reported with it.
template <class T>
inline constexpr bool is_loss = MeanOrTensor<T>;
template <MeanOrTensor Loss, NamedPart... Parts>
inline constexpr bool is_loss<std::tuple<Loss, Parts...>> =
    (MeanOrTensor<decltype(Parts::value)> && ...) && names_differ<Parts...>();
template <class T>
concept LossResult = is_loss<std::remove_cvref_t<T>>;

// What a metric may return for a batch. A metric that returns Sums computes its value from their total.
template <class T, class M>
concept MeasuredBy = LossResult<T> || std::same_as<std::remove_cvref_t<T>, PerSample> ||
    (std::same_as<std::remove_cvref_t<T>, Sums>&& ComputingMetric<M>);
}  // namespace detail

namespace detail {

/// A metric of the model's output: `metric(output, batch)` is called without autograd on each of this rank's
/// batches and returns one of four forms.
///
/// 1. A Mean over the batch. The sums and counts of all batches and ranks are added and divided once.
/// 2. A tensor of one element, the mean over the batch's samples: the same, weighted by the samples.
/// 3. Sums. The tensors of all batches and ranks are added, and `metric.compute(total)` makes the result of
///    their total, an fp64 tensor on the CPU, equal on every rank. docs/metrics.md has an example.
/// 4. PerSample. The result is the values of all samples, [samples, ...] on the communicator's device, in the
///    dataset's order and equal on every rank, or what `metric.compute(values)` returns if it has that.
template <class M, class Batch>
concept OutputMetric = requires(M& metric, const at::Tensor& output, Batch& batch) {
  { metric(output, batch) } -> detail::MeasuredBy<M>;
};

/// A metric that runs the model itself, like a loss: `metric(model, batch)`.
template <class M, class Model, class Batch>
concept ModelMetric = !OutputMetric<M, Batch> && requires(M & metric, Model& model, Batch& batch) {
  { metric(model, batch) } -> detail::MeasuredBy<M>;
};

}  // namespace detail

template <class M, class Model, class Batch>
concept Metric = detail::OutputMetric<M, Batch> || detail::ModelMetric<M, Model, Batch>;

/// The fraction of samples whose largest output over the last dimension is at the target class. output: [...,
/// C]; batch.target: [...] of class indices. Throws DataError for other shapes.
struct Accuracy {
  template <class Batch>
  Mean operator()(const at::Tensor& output, const Batch& batch) const {
    const at::Tensor& target = batch.target;
    if (output.dim() == 0 || target.sizes() != output.sizes().slice(0, output.dim() - 1))
      throw DataError(detail::formatted(
          "Accuracy: the output is {} and the target {}: an output [..., C] needs a target [...] of class "
          "numbers, without the dimension of the classes; squeeze or argmax it in the dataset",
          detail::describe(output), detail::describe(target)));
    return {output.argmax(-1).eq(target).sum(), target.numel()};
  }
};

/// Returns the summed cross-entropy and the number of targets that are not `ignore_index`. output: [N, C, ...];
/// target: [N, ...] of class indices, or [N, C, ...] of probabilities, of which none is ignored. Synchronizes
/// with the device for the count.
/// Counterpart: torch.nn.functional.cross_entropy with reduction='sum'.
inline Mean counted_cross_entropy(const at::Tensor& output, const at::Tensor& target,
                                  std::int64_t ignore_index = -100) {
  const at::Tensor sum =
      at::cross_entropy_loss(output, target, /*weight=*/{}, at::Reduction::Sum, ignore_index);
  if (at::isFloatingType(target.scalar_type()))  // probabilities of C classes for each
    return {sum, output.dim() < 2 ? 1 : output.numel() / output.size(1)};
  return {sum, target.ne(ignore_index).sum().template item<std::int64_t>()};
}

/// A metric: the mean cross-entropy over the targets that are not ignored; see counted_cross_entropy.
struct CrossEntropy {
  std::int64_t ignore_index = -100;

  template <class Batch>
  Mean operator()(const at::Tensor& output, const Batch& batch) const {
    return counted_cross_entropy(output, batch.target, ignore_index);
  }
};

/// A metric: the mean of `loss(output, target)` over samples, or over the items that the loss counts. It returns
/// a tensor of one element, the mean over the batch's samples, or a Mean{sum, count}, which a loss that averages
/// over anything but samples (targets that are not ignored, weights, tokens) must return. The loss of `fit` is a
/// metric itself, if it names the type of the model.
template <class Loss>
struct MeanLoss {
  Loss loss;

  template <class Batch>
  auto operator()(const at::Tensor& output, const Batch& batch) {
    return loss(output, batch.target);
  }
};
template <class Loss>
MeanLoss(Loss) -> MeanLoss<Loss>;

namespace detail {
// Adds the loss or metric of one batch to `meter`.
template <class Batch>
void add_to(MeanMeter& meter, const Mean& value, const Batch&) {
  meter.add(value);
}
template <class Batch>
void add_to(MeanMeter& meter, const at::Tensor& mean, const Batch& batch) {
  const auto samples = static_cast<double>(samples_in(batch));
  meter.add(mean, samples, samples);
}

using NamedMeters = std::vector<std::pair<std::string_view, MeanMeter>>;

/// The named parts of what a loss returns.
template <class Result>
struct LossParts {
  static NamedMeters meters() { return {}; }
  static Result take(Result result, const auto& /*batch*/, NamedMeters&) { return result; }
};
template <class Loss, class... Parts>
struct LossParts<std::tuple<Loss, Parts...>> {
  /// Returns an empty meter for each part.
  static NamedMeters meters() {
    NamedMeters meters(sizeof...(Parts));
    std::size_t i = 0;
    ((meters[i++].first = Parts::name), ...);
    return meters;
  }
  /// Adds the parts of one batch to their meters, and returns the loss itself.
  static Loss take(std::tuple<Loss, Parts...> result, const auto& batch, NamedMeters& meters) {
    std::size_t i = 0;
    (add_to(meters[i++].second, std::get<Parts>(result).value, batch), ...);
    return std::get<0>(std::move(result));
  }
};
}  // namespace detail

/// Names a part of a loss, a tensor or a Mean; see LossFunction.
template <detail::PartName name, class Value>
detail::Named<name, std::decay_t<Value>> named(Value&& value) {
  return {std::forward<Value>(value)};
}

/// A loss: `loss(model, batch)` runs the model and returns one of three forms.
///
/// 1. A tensor of one element: the mean over the batch's samples. It is weighted by the number of samples.
/// 2. A Mean whose sum takes part in autograd: for losses averaged over tokens, pixels, weights or targets
///    that are not ignored, as counted_cross_entropy is. A tensor would get a wrong weight.
/// 3. A std::tuple of one of these and of named parts, each a tensor or a Mean, such as
///    `std::tuple{box + label, named<"box">(box), named<"label">(label)}`. EpochReport::losses has the parts.
///
/// The optimizer descends the mean over all ranks' samples, or over all ranks' counts.
template <class L, class Model, class Batch>
concept LossFunction = requires(L& loss, Model& model, Batch& batch) {
  { loss(model, batch) } -> detail::LossResult;
};

namespace detail {

/// A loss that returns a Mean. Only the data determines its count.
template <class L, class Model, class Batch>
concept CountedLoss = LossFunction<L, Model, Batch> &&
    std::same_as<std::remove_cvref_t<std::invoke_result_t<L&, Model&, Batch&>>, Mean>;

}  // namespace detail

/// The loss of one micro-batch on one rank. Backward starts from `value`. The sum of the losses is
/// `reported * factor`, over `count` samples or counted items.
struct LocalLoss {
  at::Tensor value, reported;
  double factor, count;

  /// Returns the sum and the count. Synchronizes with the device.
  [[nodiscard]] Total total() const { return {detail::host_value(reported) * factor, count}; }
};

/// Returns the number of samples by which a batch's mean loss is weighted.
namespace detail {
template <class Batch>
std::int64_t weight_of(const Batch& batch) {
  static_assert(
      Countable<Batch>,
      "lockstep: the batch has neither data.size(0) nor size(), so that its samples cannot be counted: "
      "return a Mean{sum, count} from the loss");
  if constexpr (Countable<Batch>)
    return samples_in(batch);
  else
    return 0;
}
}  // namespace detail

/// Weights a mean over `samples` samples. Backward starts from the mean divided by `divisor`; a divisor of 1
/// leaves it bitwise unchanged. Throws DataError if the batch holds another number of samples.
template <class Batch>
LocalLoss weigh(const at::Tensor& mean, const Batch& batch, std::int64_t samples, double divisor) {
  if (const std::int64_t made = detail::weight_of(batch); made != samples)
    throw DataError(detail::formatted(
        "a batch of {} samples was asked for and the dataset made one of {}, so that its mean "
        "loss would get a wrong weight: return a Mean{{sum, count}} from the loss",
        samples, made));
  const auto count = static_cast<double>(samples);
  return {divisor == 1 ? mean : mean / divisor, mean, count, count};
}

/// Weights a sum. The reduction divides it by the counts of all ranks.
inline LocalLoss weigh(const Mean& mean) {
  return {mean.sum, mean.sum, 1, mean.count};
}

/// Weights a mean over the batch's samples when the other ranks' sample counts are not known in advance:
/// backward starts from the sum. The batch must not be empty.
template <class Batch>
LocalLoss weigh(const at::Tensor& mean, const Batch& batch) {
  const auto samples = static_cast<double>(detail::weight_of(batch));
  return {mean * samples, mean, samples, samples};
}

}  // namespace lockstep::inline v0_1
