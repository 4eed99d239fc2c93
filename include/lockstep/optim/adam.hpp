#pragma once

#include <array>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/add.h>
#include <ATen/ops/div.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DefaultDtype.h>
#include <torch/optim/optimizer.h>

#include "lockstep/optim/detail/optimizer.hpp"
#include "lockstep/optim/options.hpp"

namespace lockstep {

/// Options of Adam, with Python's names and defaults.
struct AdamOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
  /// Decouple weight decay from the gradients, as AdamW does.
  bool decoupled = false;
  Implementation implementation = Implementation::automatic;
  /// Learning rate as a tensor of one element. If defined, it replaces `lr` and is read at each step.
  at::Tensor lr_tensor = {};

  using Group = AdamOptions;

  /// Throws UsageError for values that Python refuses.
  void check(std::size_t group) const {
    const char* name = decoupled ? "AdamW" : "Adam";
    detail::check_rate(*this, name, group);
    detail::require_option(eps >= 0, name, group, "eps", eps, "not 0 or more");
    for (const double beta : betas)
      detail::require_option(beta >= 0 && beta < 1, name, group, "a beta", beta, "not from 0 to below 1");
    if (implementation == Implementation::foreach && lr_tensor.defined())
      throw UsageError(
          "Adam: a foreach step takes no lr_tensor: set lr, or choose Implementation::fused or automatic");
  }
  template <class Self, class Visit>
  static void each_field(Self& self, Visit&& visit) {
    visit("lr", self.lr);
    visit("beta1", self.betas[0]);
    visit("beta2", self.betas[1]);
    visit("eps", self.eps);
    visit("weight_decay", self.weight_decay);
    visit("amsgrad", self.amsgrad);
    visit("maximize", self.maximize);
    visit("decoupled", self.decoupled);
  }
};

/// Options of AdamW, with Python's names and defaults. `lr_tensor` is as in AdamOptions.
struct AdamWOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
  bool maximize = false;
  Implementation implementation = Implementation::automatic;
  at::Tensor lr_tensor = {};

  using Group = AdamOptions;

  // NOLINTNEXTLINE(google-explicit-constructor): it is the same, spelled out
  operator AdamOptions() const {
    return {lr, betas, eps, weight_decay, amsgrad, maximize, true, implementation, lr_tensor};
  }
};

/// Adam's state of one parameter. `step` is a tensor, so that replays of a captured graph advance it: on the
/// host unless fused; float32, or float64 if that is the default dtype and the step is not fused.
struct AdamState : detail::TensorState<AdamState> {
  at::Tensor step, exp_avg, exp_avg_sq, max_exp_avg_sq;

  template <class Self, class Visit>
  static void each_tensor(Self& self, Visit&& visit) {
    visit("step", self.step, false);
    visit("exp_avg", self.exp_avg, true);
    visit("exp_avg_sq", self.exp_avg_sq, true);
    visit("max_exp_avg_sq", self.max_exp_avg_sq, true);
  }
};

}  // namespace lockstep

namespace lockstep::detail {

/// Adds 1 to each step count. On the host it calls no operator, which would cost as much as an operator on a
/// small parameter.
inline void advance_steps(Active<AdamState>& all) {
  auto& steps = all.column(3, &AdamState::step);
  if (!steps[0].is_cpu()) return at::_foreach_add_(steps, 1);
  for (const at::Tensor& step : steps) {
    if (step.scalar_type() == at::kDouble)
      *step.data_ptr<double>() += 1;
    else
      *step.data_ptr<float>() += 1;
  }
}

/// The scalars of a step, in float64 as Python computes them.
struct AdamStep {
  double correction, size, root;

  AdamStep(const AdamOptions& options, double step)
      : correction(1 - std::pow(options.betas[0], step)),
        size(options.lr / correction),
        root(std::pow(1 - std::pow(options.betas[1], step), 0.5)) {}
};

inline double step_value(const AdamState& state) {
  return state.step.scalar_type() == at::kDouble ? *state.step.const_data_ptr<double>()
                                                 : static_cast<double>(*state.step.const_data_ptr<float>());
}

/// Returns lr_tensor as a zero-dimensional tensor; undefined if there is none.
inline at::Tensor rate_scalar(const AdamOptions& options) {
  return options.lr_tensor.defined() ? options.lr_tensor.view(at::IntArrayRef{}) : at::Tensor();
}

/// Python's `_single_tensor_adam`: completes one parameter after the other, while its memory is in the cache.
inline void adam_loop(const AdamOptions& options, Active<AdamState>& all) {
  const double beta1 = options.betas[0], beta2 = options.betas[1];
  const at::Tensor rate = rate_scalar(options);
  const at::Tensor keep = as_python_does(beta2);
  // The factor of decoupled weight decay.
  const at::Tensor shrink = rate.defined() ? at::rsub(at::mul(rate, options.weight_decay), 1)
                                           : as_python_does(1 - options.lr * options.weight_decay);
  advance_steps(all);
  // Usually all parameters are at the same step.
  AdamStep numbers(options, 1);
  double last = 1;
  for (std::size_t i = 0; i < all.size(); ++i) {
    AdamState& state = *all.states[i];
    at::Tensor parameter = all.parameters[i];
    at::Tensor gradient = options.maximize ? at::neg(all.gradients[i]) : all.gradients[i];
    if (options.weight_decay != 0) {
      if (options.decoupled)
        parameter.mul_(shrink);
      else
        gradient = at::add(gradient, parameter, options.weight_decay);
    }
    at::Tensor mean = state.exp_avg, square = state.exp_avg_sq, largest = state.max_exp_avg_sq;
    if (parameter.is_complex()) {
      for (at::Tensor* tensor : {&parameter, &gradient, &mean, &square, &largest})
        if (tensor->defined()) *tensor = at::view_as_real(*tensor);
    }
    mean.lerp_(gradient, 1 - beta1);
    square.mul_(keep).addcmul_(gradient, gradient, 1 - beta2);
    if (const double step = step_value(state); step != last) {
      numbers = AdamStep(options, step);
      last = step;
    }
    if (options.amsgrad) at::maximum_out(largest, largest, square);
    const at::Tensor root = at::sqrt(options.amsgrad ? largest : square).div_(numbers.root).add_(options.eps);
    if (rate.defined())
      parameter.addcdiv_(mean, root, at::neg(at::div(rate, numbers.correction)).item());
    else
      parameter.addcdiv_(mean, root, -numbers.size);
  }
}

/// Python's `_multi_tensor_adam` with capturable=False: the rate is a number.
inline void adam_foreach(const AdamOptions& options, Active<AdamState>& all) {
  const double beta1 = options.betas[0], beta2 = options.betas[1];
  advance_steps(all);
  std::vector<at::Scalar> sizes, roots;
  for (const AdamState* state : all.states) {
    const AdamStep numbers(options, step_value(*state));
    sizes.emplace_back(numbers.size * -1);
    roots.emplace_back(numbers.root);
  }
  auto& means = all.column(0, &AdamState::exp_avg);
  auto& squares = all.column(1, &AdamState::exp_avg_sq);
  auto& largest = all.column(2, &AdamState::max_exp_avg_sq);
  std::vector<at::Tensor> parameters = all.parameters;
  if (parameters[0].is_complex())
    for (auto* list : {&parameters, &all.gradients, &means, &squares, &largest})
      for (at::Tensor& tensor : *list)
        if (tensor.defined()) tensor = at::view_as_real(tensor);
  std::vector<at::Tensor> made;
  if (options.maximize) made = at::_foreach_neg(all.gradients);
  if (options.weight_decay != 0) {
    if (options.decoupled)
      at::_foreach_mul_(parameters, 1 - options.lr * options.weight_decay);
    else if (options.maximize)
      at::_foreach_add_(made, parameters, options.weight_decay);
    else
      made = at::_foreach_add(all.gradients, parameters, options.weight_decay);
  }
  const auto& gradients = made.empty() ? all.gradients : made;
  at::_foreach_lerp_(means, gradients, 1 - beta1);
  at::_foreach_mul_(squares, beta2);
  at::_foreach_addcmul_(squares, gradients, gradients, 1 - beta2);
  if (options.amsgrad) at::_foreach_maximum_(largest, squares);
  auto root = at::_foreach_sqrt(options.amsgrad ? largest : squares);
  at::_foreach_div_(root, roots);
  at::_foreach_add_(root, options.eps);
  at::_foreach_addcdiv_(parameters, means, root, sizes);
}

/// Python's `_fused_adam`. Never synchronizes with the device.
inline void adam_fused(const AdamOptions& o, Active<AdamState>& all, const StepScale& scale) {
  const auto optional = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
  };
  const StepScale here = scale.on(all.parameters[0].device());
  align_gradients(all);
  advance_steps(all);
  auto& means = all.column(0, &AdamState::exp_avg);
  auto& squares = all.column(1, &AdamState::exp_avg_sq);
  auto& largest = all.column(2, &AdamState::max_exp_avg_sq);
  auto& steps = all.columns[3];
  if (!o.amsgrad) largest.clear();
  const auto call = [&](const auto& rate) {
    if (o.decoupled)
      at::_fused_adamw_(all.parameters, all.gradients, means, squares, largest, steps, rate, o.betas[0],
                        o.betas[1], o.weight_decay, o.eps, o.amsgrad, o.maximize, optional(here.scale),
                        optional(here.found_inf));
    else
      at::_fused_adam_(all.parameters, all.gradients, means, squares, largest, steps, rate, o.betas[0],
                       o.betas[1], o.weight_decay, o.eps, o.amsgrad, o.maximize, optional(here.scale),
                       optional(here.found_inf));
  };
  if (o.lr_tensor.defined())
    call(o.lr_tensor);
  else
    call(o.lr);
  // Undo the step count of a skipped step.
  if (here.found_inf.defined())
    at::_foreach_sub_(steps, std::vector<at::Tensor>(steps.size(), here.found_inf.view(at::IntArrayRef{})));
}

}  // namespace lockstep::detail

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
