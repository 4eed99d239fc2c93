#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>

#include "lockstep/detail/served_call.hpp"
#include "lockstep/detail/short_passes.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"
#include "lockstep/grad/detail/reducer.hpp"

namespace lockstep::detail {

/// Warns of mistakes in a loop by hand that give wrong results without an error, each once and on one rank.
/// A Trainer, which makes none of them, is not checked.
class LoopChecks {
 public:
  /// Returns the norms of the parameters at the start of a `no_sync` guard: on rank 0 and for the first 4 guards,
  /// since reading them blocks the host on a device. Otherwise empty.
  template <class Comm>
  std::vector<at::Tensor> begin_no_sync(const Comm& comm, std::span<const ParameterEntry> parameters) {
    if (comm.size() == 1 || comm.rank() != 0 || served_call.name || guards_++ >= 4) return {};
    return norms(parameters);
  }
  template <class Comm>
  void end_no_sync(const Comm& comm, std::span<const ParameterEntry> parameters,
                   const std::vector<at::Tensor>& before) noexcept try {
    if (before.empty() || warned_of_step_) return;
    const std::vector<at::Tensor> now = norms(parameters);
    if (std::equal(before.begin(), before.end(), now.begin(), at::equal)) return;
    warned_of_step_ = true;
    comm.world().log.all().warning(
        "parameters changed inside no_sync, where each rank has the gradients of its own samples, so that "
        "the ranks now differ: call optimizer.step() after the first backward outside of no_sync");
  } catch (...) {  // the destructor of a guard must not throw
  }

  template <class Comm>
  void begin_backward(const Comm& comm, const Contribution& contribution) {
    if (contribution.count || contribution.no_data) {
      short_passes_ = short_passes;
    } else if (!served_call.name && short_passes > short_passes_ + 1 && comm.size() > 1 &&
               !std::exchange(warned_of_passes_, true)) {
      comm.world().log.all().warning(
          "this rank has begun another epoch while rank 0 had a batch left, and its backward joins rank 0's "
          "of the earlier epoch: let the sampler pad or drop the tail, or call backward_empty (or "
          "backward_sum) on a rank without data until no rank has any");
    }
  }

 private:
  static std::vector<at::Tensor> norms(std::span<const ParameterEntry> parameters) {
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> tensors;
    for (const ParameterEntry& parameter : parameters) tensors.push_back(parameter.tensor);
    return at::_foreach_norm(tensors);
  }

  int guards_ = 0;
  bool warned_of_step_ = false, warned_of_passes_ = false;
  std::size_t short_passes_ = short_passes;  // at the last backward that counts samples or has none
};

}  // namespace lockstep::detail
