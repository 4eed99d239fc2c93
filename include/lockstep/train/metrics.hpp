#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/sum.h>
#include <fmt/format.h>

#include <concepts>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "lockstep/comm/describe.hpp"
#include "lockstep/error.hpp"
#include "lockstep/train/mean.hpp"

namespace lockstep {

namespace detail {
template <class T>
concept MeanOrTensor =
    std::same_as<std::remove_cvref_t<T>, Mean> || std::same_as<std::remove_cvref_t<T>, at::Tensor>;
}

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

namespace detail {

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

}  // namespace detail

}  // namespace lockstep
