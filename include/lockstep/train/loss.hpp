#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <concepts>
#include <type_traits>
#include <utility>

#include "lockstep/error.hpp"
#include "lockstep/train/metrics.hpp"

namespace lockstep {

/// A loss: `loss(model, batch)` runs the model and returns either the mean over the batch's samples, a tensor
/// of one element, or a Mean whose sum takes part in autograd, for what is averaged over anything but samples
/// (tokens, pixels, weights, targets that are not ignored). A tensor is weighed by the samples of its batch:
/// cross_entropy with targets that it ignores, or with class weights, divides by something else, and its
/// tensor would get a wrong weight; counted_cross_entropy returns a Mean. The optimizer steps down the mean
/// over all ranks' samples, or over all ranks' counts.
template <class L, class Model, class Batch>
concept LossFunction = requires(L& loss, Model& model, Batch& batch) {
  { loss(model, batch) } -> detail::MeanOrTensor;
};

/// A loss that is a Mean: only the data tells its count.
template <class L, class Model, class Batch>
concept CountedLoss = LossFunction<L, Model, Batch> &&
    std::same_as<std::remove_cvref_t<std::invoke_result_t<L&, Model&, Batch&>>, Mean>;

/// The loss of one micro-batch of one rank: backward starts from `value`; the sum of the losses is
/// `reported * factor`, of `count` samples or whatever is counted.
struct LocalLoss {
  at::Tensor value;
  at::Tensor reported;
  double factor, count;

  /// Waits for the device.
  [[nodiscard]] Total total() const { return {detail::host_value(reported) * factor, count}; }
};

/// A mean over `samples` samples, which takes part in its step divided by `divisor`; where that is 1, as it
/// is, bit for bit. Throws DataError where the batch holds another number of samples: its weight would be
/// wrong.
template <class Batch>
LocalLoss weigh(const at::Tensor& mean, const Batch& batch, std::int64_t samples, double divisor) {
  static_assert(
      Countable<Batch>,
      "lockstep: the batch has neither data.size(0) nor size(), so that its samples cannot be counted: "
      "return a Mean{sum, count} from the loss");
  if constexpr (Countable<Batch>) {
    if (samples_in(batch) != samples)
      throw DataError(
          fmt::format("a batch of {} samples was asked for and the dataset made one of {}, so that its mean "
                      "loss would get a wrong weight: return a Mean{{sum, count}} from the loss",
                      samples, samples_in(batch)));
  }
  const auto count = static_cast<double>(samples);
  return {divisor == 1 ? mean : mean / divisor, mean, count, count};
}

/// A sum, of which only the counts of all ranks make a mean: that division comes with the reduction.
inline LocalLoss weigh(const Mean& mean) {
  return {mean.sum, mean.sum, 1, mean.count};
}

/// A mean over the batch's samples, of which nobody knows beforehand how many the other ranks have: weighed
/// as the sum that it is the mean of. The batch is not empty.
template <class Batch>
LocalLoss weigh(const at::Tensor& mean, const Batch& batch) {
  static_assert(
      Countable<Batch>,
      "lockstep: the batch has neither data.size(0) nor size(), so that its samples cannot be counted: "
      "return a Mean{sum, count} from the loss");
  double samples = 0;
  if constexpr (Countable<Batch>) samples = static_cast<double>(samples_in(batch));
  return {mean * samples, mean, samples, samples};
}

}  // namespace lockstep
