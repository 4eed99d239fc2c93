#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// Replaces the parameters by their average over the ranks of `comm`, divided by the number of ranks and then
/// summed, as in Python. One all-reduce per dtype and device. Parameters must be the same on every rank
/// except for their values. Collective; waits as Work::wait does.
///
/// Counterpart: torch.distributed.algorithms.model_averaging.utils.average_parameters.
template <Reducing Comm>
void average_parameters(const std::vector<at::Tensor>& parameters, Comm& comm) {
  if (comm.size() == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<char> done(parameters.size(), 0);
  for (std::size_t first = 0; first < parameters.size(); ++first) {
    if (done[first]) continue;
    std::vector<at::Tensor> alike;
    std::int64_t length = 0;
    for (std::size_t i = first; i < parameters.size(); ++i) {
      const at::Tensor& other = parameters[i];
      if (done[i] || other.scalar_type() != parameters[first].scalar_type() ||
          other.device() != parameters[first].device())
        continue;
      done[i] = 1;
      alike.push_back(other.detach());
      length += other.numel();
    }
    const at::Tensor flat = at::empty({length}, alike[0].options());
    const auto each_part = [&](auto&& copy) {
      std::int64_t offset = 0;
      for (at::Tensor& tensor : alike) {
        copy(tensor, flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
        offset += tensor.numel();
      }
    };
    each_part([](const at::Tensor& tensor, at::Tensor part) { part.copy_(tensor); });
    flat.div_(comm.size());
    comm.all_reduce(flat, ReduceOp::sum).wait();
    each_part([](at::Tensor& tensor, const at::Tensor& part) { tensor.copy_(part); });
  }
}

struct PeriodicModelAveragerOptions {
  /// Steps between two averages.
  std::int64_t period = 4;
  /// Steps before the first average.
  std::int64_t warmup_steps = 0;
};

/// Averages a model over the ranks every `period` steps, in the same steps as Python. Use it with
/// PostLocalSgdHook, under which the ranks' parameters diverge.
///
/// Counterpart: torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager.
class PeriodicModelAverager {
 public:
  /// Throws UsageError if `period` is below 1 or `warmup_steps` is negative.
  explicit PeriodicModelAverager(const PeriodicModelAveragerOptions& options = {}) : options_(options) {
    if (options.period < 1)
      throw UsageError(
          detail::formatted("PeriodicModelAverager: a period of {}: give 1 or more", options.period));
    if (options.warmup_steps < 0)
      throw UsageError(
          detail::formatted("PeriodicModelAverager: {} warm-up steps: give 0 or more", options.warmup_steps));
  }

  /// Counts a step and averages the parameters if it is due. Returns whether it averaged. Call it on every
  /// rank after each optimizer step. Collective when it averages.
  template <Reducing Comm>
  bool step(const std::vector<at::Tensor>& parameters, Comm& comm) {
    const std::int64_t since = steps_++ - options_.warmup_steps;
    if (since < 0 || since % options_.period != 0) return false;
    average_parameters(parameters, comm);
    return true;
  }

  /// Returns the number of steps so far, which a resumed run sets.
  [[nodiscard]] std::int64_t steps() const { return steps_; }
  void set_steps(std::int64_t steps) { steps_ = steps; }

 private:
  PeriodicModelAveragerOptions options_;
  std::int64_t steps_ = 0;
};

}  // namespace lockstep
