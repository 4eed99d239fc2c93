#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <concepts>
#include <type_traits>
#include <utility>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/train/metrics.hpp"

namespace lockstep {

/// A loss: `loss(model, batch)` runs the model and returns one of two forms.
///
/// 1. A tensor of one element: the mean over the batch's samples. It is weighted by the number of samples.
/// 2. A Mean whose sum takes part in autograd: for losses averaged over tokens, pixels, weights or targets
///    that are not ignored. A cross_entropy with ignored targets or class weights divides by something other
///    than the number of samples, so its tensor would get a wrong weight; counted_cross_entropy returns a
///    Mean.
///
/// The optimizer descends the mean over all ranks' samples, or over all ranks' counts.
template <class L, class Model, class Batch>
concept LossFunction = requires(L& loss, Model& model, Batch& batch) {
  { loss(model, batch) } -> detail::MeanOrTensor;
};

/// A loss that returns a Mean. Only the data determines its count.
template <class L, class Model, class Batch>
concept CountedLoss = LossFunction<L, Model, Batch> &&
    std::same_as<std::remove_cvref_t<std::invoke_result_t<L&, Model&, Batch&>>, Mean>;

/// The loss of one micro-batch on one rank. Backward starts from `value`. The sum of the losses is
/// `reported * factor`, over `count` samples or counted items.
struct LocalLoss {
  at::Tensor value;
  at::Tensor reported;
  double factor, count;

  /// Returns the sum and the count. Synchronizes with the device.
  [[nodiscard]] Total total() const { return {detail::host_value(reported) * factor, count}; }
};

/// Weights a mean over `samples` samples, which enters its step divided by `divisor`. A divisor of 1 leaves
/// it unchanged, bit for bit. Throws DataError if the batch holds another number of samples, since its weight
/// would be wrong.
template <class Batch>
LocalLoss weigh(const at::Tensor& mean, const Batch& batch, std::int64_t samples, double divisor) {
  static_assert(
      Countable<Batch>,
      "lockstep: the batch has neither data.size(0) nor size(), so that its samples cannot be counted: "
      "return a Mean{sum, count} from the loss");
  if constexpr (Countable<Batch>) {
    if (samples_in(batch) != samples)
      throw DataError(detail::formatted(
          "a batch of {} samples was asked for and the dataset made one of {}, so that its mean "
          "loss would get a wrong weight: return a Mean{{sum, count}} from the loss",
          samples, samples_in(batch)));
  }
  const auto count = static_cast<double>(samples);
  return {divisor == 1 ? mean : mean / divisor, mean, count, count};
}

/// Weights a sum. The reduction divides it by the counts of all ranks.
inline LocalLoss weigh(const Mean& mean) {
  return {mean.sum, mean.sum, 1, mean.count};
}

/// Weights a mean over the batch's samples when the other ranks' sample counts are not known in advance: it
/// enters as the sum. The batch must not be empty.
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
