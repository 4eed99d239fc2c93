#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <cmath>
#include <exception>
#include <string>
#include <vector>

#include "lockstep/comm/detail/own_error.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/capture_scope.hpp"
#include "lockstep/train/detail/collective_forward_check.hpp"
#include "lockstep/train/detail/micro_batch_source.hpp"
#include "lockstep/train/detail/model_handle.hpp"
#include "lockstep/train/loss.hpp"

namespace lockstep::detail {

/// A sum over nothing, times 0: its backward adds nothing, but communicates where the forward did (batch norm
/// over all ranks). Undefined where the sum has no graph, or is not a number, which 0 would not stop.
inline at::Tensor nothing_of(const at::Tensor& sum) {
  return sum.defined() && sum.requires_grad() && std::isfinite(host_value(sum)) ? sum * 0 : at::Tensor();
}

/// Throws DataError where a sum over nothing is not a number, and the other ranks wait for its backward.
template <class M>
void require_finite_nothing(M& model, const at::Tensor& sum) {
  if (!sum.defined() || !sum.requires_grad() || std::isfinite(host_value(sum))) return;
  if (const std::string module = meeting_module(module_of(model)); !module.empty())
    throw DataError(fmt::format(
        "the loss is {} over a count of 0, and {} meets the other ranks in its backward: let the loss over "
        "nothing be a sum of zeros, as cross_entropy with reduction sum is",
        host_value(sum), module));
}

/// Forward and backward of this rank's micro-batches in the step that `source` has begun, reduced over the
/// ranks with its last one: the gradients are then those of the mean over all that all ranks have in the
/// step. A rank without data takes part in the reduction with zeros. Returns what was counted on all ranks
/// together; where that is 0 there is nothing to step along. `losses` gets one entry a micro-batch.
///
/// Where all counts are known beforehand each mean is weighed before its backward, which for equal batches is
/// Python's arithmetic; where only the data tells them, sums are reduced and divided by the counts that ride
/// along.
///
/// What the data or the loss throws on this rank is told to the others, whose step ends with an error too:
/// none waits for this rank. The communicator works on after a loss that threw, unless the model itself meets
/// the other ranks or they take more than two seconds to come to their backward, and is aborted after other
/// failures.
template <class M, class Ddp, class C, class P, class Source, class Loss>
double step_gradients(M& model, Ddp& ddp, C& comm, P& precision, Source& source, Loss& loss,
                      std::vector<LocalLoss>& losses) {
  constexpr bool weighed = Source::counts_beforehand && !CountedLoss<Loss, M, typename Source::Batch>;
  losses.clear();
  ddp.forget();  // a step before this one may have been given up
  double all = 0;
  // In the forward the others wait for this rank in their backward, unless the model itself meets them before
  // that, or the step is being captured.
  const auto tell_in_backward = [&] {
    if (CaptureScope::active() || !meeting_module(module_of(model)).empty())
      abort_for_others(comm);
    else
      ddp.fail_backward(std::current_exception(), !weighed);
  };
  // Inside no_sync gradients and counts only add up.
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
    local.value.reset();  // and the graph with it
  }
  if (losses.empty()) {
    ddp.before_forward();  // rank 0's buffers come once a step
    if constexpr (weighed)
      ddp.backward_empty();
    else
      backward({{}, {}, 1, 0});
  }
  return weighed ? source.samples(1) : all;
}

}  // namespace lockstep::detail
