#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/sum.h>

#include <concepts>
#include <type_traits>
#include <utility>

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
/// output: [batch, classes], batch.target: [batch] of class numbers.
struct Accuracy {
  template <class Batch>
  Mean operator()(const at::Tensor& output, const Batch& batch) const {
    const at::Tensor& target = batch.target;
    return {output.argmax(-1).eq(target).sum(), target.numel()};
  }
};

/// The mean of a loss over the samples. `loss(output, target)` gives the mean over a batch; cross-entropy by
/// default.
template <class Loss = at::Tensor (*)(const at::Tensor&, const at::Tensor&)>
struct MeanLoss {
  Loss loss = [](const at::Tensor& output, const at::Tensor& target) {
    return at::cross_entropy_loss(output, target);
  };

  template <class Batch>
  at::Tensor operator()(const at::Tensor& output, const Batch& batch) {
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
