#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <cmath>
#include <exception>
#include <string>
#include <vector>

#include "lockstep/comm/detail/own_error.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/capture_scope.hpp"
#include "lockstep/train/detail/collective_forward_check.hpp"
#include "lockstep/train/detail/micro_batch_source.hpp"
#include "lockstep/train/detail/model_handle.hpp"
#include "lockstep/train/loss.hpp"

namespace lockstep::detail {

/// Returns an empty sum times 0: its backward adds zeros, but runs the collectives that match those of the
/// forward (SyncBatchNorm). Undefined if the sum has no graph or is not finite, since 0 times NaN is NaN.
inline at::Tensor nothing_of(const at::Tensor& sum) {
  return sum.defined() && sum.requires_grad() && std::isfinite(host_value(sum)) ? sum * 0 : at::Tensor();
}

/// Throws DataError if an empty sum is not finite and the model is collective in its backward, so that the
/// other ranks would wait for it.
template <class M>
void require_finite_nothing(M& model, const at::Tensor& sum) {
  if (!sum.defined() || !sum.requires_grad() || std::isfinite(host_value(sum))) return;
  if (const std::string module = meeting_module(module_of(model)); !module.empty())
    throw DataError(detail::formatted(
        "the loss is {} over a count of 0, and {} meets the other ranks in its backward: let the loss over "
        "nothing be a sum of zeros, as cross_entropy with reduction sum is",
        host_value(sum), module));
}

/// Runs forward and backward of this rank's micro-batches in the step that `source` has begun, and reduces
/// the gradients with the last one. The gradients are then those of the mean over all samples of all ranks in
/// the step. A rank without data contributes zeros. Returns the total count of all ranks; if it is 0, the
/// optimizer must not step. `losses` gets one entry per micro-batch. Collective.
///
/// If all counts are known beforehand, each mean is weighted before its backward; for equal batches this is
/// Python's arithmetic. Otherwise sums are reduced and divided by the total count, which is reduced with
/// them.
///
/// An error of the data or the loss on this rank is reported to the other ranks, whose step throws too
/// instead of waiting. The communicator stays usable after a loss that threw, unless the model itself is
/// collective or the other ranks take more than two seconds to reach their backward. It is aborted after
/// other failures.
template <class M, class Ddp, class C, class P, class Source, class Loss>
double step_gradients(M& model, Ddp& ddp, C& comm, P& precision, Source& source, Loss& loss,
                      std::vector<LocalLoss>& losses) {
  constexpr bool weighed = Source::counts_beforehand && !CountedLoss<Loss, M, typename Source::Batch>;
  losses.clear();
  ddp.forget();  // the previous step may have been abandoned
  double all = 0;
  // After an error in this rank's forward, the other ranks wait in their backward, so it is reported there. A
  // collective forward waits earlier, and a capture cannot report: abort then.
  const auto tell_in_backward = [&] {
    if (CaptureScope::active() || !meeting_module(module_of(model)).empty())
      abort_for_others(comm);
    else
      ddp.fail_backward(std::current_exception(), !weighed);
  };
  // Under no_sync, gradients and counts are only accumulated.
  const auto backward = [&](const LocalLoss& local) {
    if (local.count == 0) aborting(comm, [&] { require_finite_nothing(model, local.value); });
    if constexpr (weighed)
      ddp.backward(precision.scale(local.value));
    else if (local.count == 0)
      all = ddp.backward_sum(nothing_of(local.value), 0);
    else
      all = ddp.backward_sum(precision.scale(local.value), local.count);
  };
  while (auto* batch = aborting(comm, [&] { return source.next(); })) {
    const auto accumulating = ddp.no_sync(!source.last());
    ddp.before_forward();
    LocalLoss& local = losses.emplace_back(telling_own_error(
        [&] { return precision.forward([&] { return source.weigh(loss(model, *batch), *batch); }); },
        tell_in_backward));
    backward(local);
    local.value.reset();  // frees the graph
  }
  if (losses.empty()) {
    ddp.before_forward();  // joins the other ranks' buffer synchronization
    if constexpr (weighed)
      ddp.backward_empty();
    else
      backward({{}, {}, 1, 0});
  }
  return weighed ? source.samples(1) : all;
}

}  // namespace lockstep::detail
