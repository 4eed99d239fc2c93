#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>

#include <concepts>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/train/mean.hpp"
#include "lockstep/train/metrics.hpp"

namespace lockstep {

/// A loss: `loss(model, batch)` runs the model and returns either the mean over the batch's samples, a tensor
/// of one element, or a Mean whose sum takes part in autograd, for what is averaged over anything but samples
/// (tokens, pixels, weights). The optimizer steps down the mean over all ranks' samples, or over all ranks'
/// counts.
template <class L, class Model, class Batch>
concept LossFunction = requires(L& loss, Model& model, Batch& batch) {
  { loss(model, batch) } -> detail::MeanOrTensor;
};

/// The loss of one batch of one rank. Averaging the gradients of `value` over the ranks gives those of the
/// mean over all ranks; this rank's own share of it is the sum `reported * factor` over `count`.
struct LocalLoss {
  at::Tensor value;
  at::Tensor reported;
  double factor, count;

  /// Waits for the device.
  [[nodiscard]] double mean() const { return detail::host_value(reported) * factor / count; }
};

/// A mean over the batch: the batches of the ranks are of equal size, so that the mean of the means is the
/// mean.
template <Reducing C, class Batch>
LocalLoss weigh(const at::Tensor& mean, const Batch& batch, C&) {
  static_assert(
      Countable<Batch>,
      "lockstep: the batch has neither data.size(0) nor size(), so that its samples cannot be counted: "
      "return a Mean{sum, count} from the loss");
  const auto samples = static_cast<double>(samples_in(batch));
  return {mean, mean, samples, samples};
}

/// A sum and a count, which differ between ranks: the counts are added over the ranks first. Where they turn
/// out equal the value is the plain local mean, bit for bit.
template <Reducing C, class Batch>
LocalLoss weigh(const Mean& mean, const Batch&, C& comm) {
  double ranks_mean = mean.count;
  if (comm.size() > 1) {
    at::Tensor total = at::scalar_tensor(mean.count, at::kDouble);
    comm.all_reduce(total, ReduceOp::sum).wait_host();
    ranks_mean = detail::host_value(total) / comm.size();
  }
  // Where nothing was counted anywhere the gradients are those of 0, not NaN.
  return {ranks_mean == 0 ? mean.sum * 0 : mean.sum / ranks_mean, mean.sum, 1, mean.count};
}

}  // namespace lockstep
