#pragma once

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DefaultDtype.h>
#include <torch/optim/optimizer.h>

#include <utility>
#include <vector>

#include "lockstep/optim/detail/adam_steps.hpp"
#include "lockstep/optim/detail/optimizer.hpp"
#include "lockstep/optim/options.hpp"

namespace lockstep {

/// Implements Adam, bitwise equal to `torch.optim.Adam` in parameters and state for the same implementation,
/// dtype and number of threads. (`torch::optim::Adam` rounds differently.)
///
/// Complex parameters are stepped as pairs of real numbers, as in Python. Sparse gradients are not supported.
///
/// Counterpart: torch.optim.Adam.
class Adam : public detail::GroupedOptimizer<Adam, AdamState, AdamOptions> {
 public:
  static constexpr const char* name = "Adam";
  /// CapturedStep can capture a fused step whose learning rate is a tensor.
  static constexpr bool capturable = true;

  /// Throws UsageError if there are no parameters, one is repeated, or an option is out of range.
  explicit Adam(std::vector<at::Tensor> parameters, const AdamOptions& options = {})
      : GroupedOptimizer(std::move(parameters), options) {}
  /// Constructs an optimizer of parameter groups. `options` are the defaults of groups without options.
  explicit Adam(std::vector<torch::optim::OptimizerParamGroup> groups, const AdamOptions& options = {})
      : GroupedOptimizer(std::move(groups), options) {}

 private:
  friend GroupedOptimizer;

  static const char* refusal(const AdamOptions&, const at::Tensor& gradient) {
    return gradient.is_sparse() ? "is sparse, which Adam does not take: step this parameter with SGD"
                                : nullptr;
  }

  static void prepare(const AdamOptions& options, const at::Tensor& parameter, AdamState& state) {
    const bool fused = steps_fused(options, parameter);
    const at::Device place = fused ? parameter.device() : at::Device(at::kCPU);
    if (!state.step.defined()) {
      const bool wide = !fused && c10::get_default_dtype_as_scalartype() == at::kDouble;
      state.step = at::zeros({}, parameter.options().dtype(wide ? at::kDouble : at::kFloat).device(place));
      state.exp_avg = at::zeros_like(parameter);
      state.exp_avg_sq = at::zeros_like(parameter);
    } else if (state.step.device() != place) {
      state.step = state.step.to(place);
    }
    if (options.amsgrad && !state.max_exp_avg_sq.defined()) state.max_exp_avg_sq = at::zeros_like(parameter);
  }

  static bool steps_fused(const AdamOptions& options, const at::Tensor& parameter) {
    return options.implementation == Implementation::fused ||
           (options.implementation == Implementation::automatic && options.lr_tensor.defined() &&
            !parameter.is_cpu());
  }

  static void step_group(const AdamOptions& options, detail::Active<AdamState>& group,
                         const StepScale& scale) {
    detail::each_kind(group, [&](detail::Active<AdamState>& all) {
      if (steps_fused(options, all.parameters[0]))
        detail::adam_fused(options, all, scale);
      else if (options.implementation == Implementation::automatic && all.parameters[0].is_cpu())
        detail::adam_loop(options, all);
      else
        detail::adam_foreach(options, all);
    });
  }
};

/// Implements Adam with decoupled weight decay. Counterpart: torch.optim.AdamW.
class AdamW : public Adam {
 public:
  explicit AdamW(std::vector<at::Tensor> parameters, const AdamWOptions& options = {})
      : Adam(std::move(parameters), options) {}
  explicit AdamW(std::vector<torch::optim::OptimizerParamGroup> groups, const AdamWOptions& options = {})
      : Adam(std::move(groups), options) {}
};

}  // namespace lockstep
