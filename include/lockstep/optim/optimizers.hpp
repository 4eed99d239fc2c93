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
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/add.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty_like.h>
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

#include "lockstep/detail/const_data.hpp"
#include "lockstep/optim/detail/optimizer.hpp"
#include "lockstep/optim/options.hpp"

namespace lockstep::inline v0_1 {

struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
  Implementation implementation = Implementation::automatic;
  /// Learning rate as a tensor of one element. If defined, it replaces `lr` and is read at each step.
  at::Tensor lr_tensor = {};

  using Group = SGDOptions;

  /// Throws UsageError for values that Python refuses.
  void check(std::size_t group) const {
    detail::check_rate(*this, "SGD", group);
    detail::require_option(momentum >= 0, "SGD", group, "momentum", momentum, "not 0 or more");
    if (nesterov && (!(momentum > 0) || dampening != 0))
      throw UsageError("SGD: nesterov needs a momentum above 0 and a dampening of 0");
  }
  template <class Self, class Visit>
  static void each_field(Self& self, Visit&& visit) {
    visit("lr", self.lr);
    visit("momentum", self.momentum);
    visit("dampening", self.dampening);
    visit("weight_decay", self.weight_decay);
    visit("nesterov", self.nesterov);
    visit("maximize", self.maximize);
  }
};

/// The state of one parameter.
struct SGDState : detail::TensorState<SGDState> {
  at::Tensor momentum_buffer;  ///< undefined before the first step with momentum

  template <class Self, class Visit>
  static void each_tensor(Self& self, Visit&& visit) {
    visit("momentum_buffer", self.momentum_buffer, true);
  }
};

namespace detail {

inline std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

inline double sgd_rate(const SGDOptions& options) {
  return options.lr_tensor.defined() ? options.lr_tensor.item<double>() : options.lr;
}

/// Python's `_single_tensor_sgd`: completes one parameter after the other, while its memory is in the cache.
inline void sgd_loop(const SGDOptions& options, Active<SGDState>& all) {
  const double rate = sgd_rate(options);
  const at::Tensor momentum = python_scalar(options.momentum);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const at::Tensor& parameter = all.parameters[i];
    at::Tensor gradient = options.maximize ? at::neg(all.gradients[i]) : all.gradients[i];
    if (options.weight_decay != 0) gradient = at::add(gradient, parameter, options.weight_decay);
    if (options.momentum != 0) {
      at::Tensor& buffer = all.states[i]->momentum_buffer;
      if (buffer.defined())
        buffer.mul_(momentum).add_(gradient, 1 - options.dampening);
      else
        buffer = at::clone(gradient);
      gradient = options.nesterov ? at::add(gradient, buffer, options.momentum) : buffer;
    }
    parameter.add_(gradient, -rate);
  }
}

/// Python's `_multi_tensor_sgd`. As in Python, nesterov without weight decay adds to the gradients in place.
inline void sgd_foreach(const SGDOptions& options, Active<SGDState>& all) {
  const double rate = sgd_rate(options);
  std::vector<at::Tensor> made;
  std::vector<at::Tensor>* gradients = &all.gradients;
  if (options.maximize) {
    made = at::_foreach_neg(*gradients);
    gradients = &made;
  }
  if (options.weight_decay != 0) {
    if (options.maximize) {
      at::_foreach_add_(made, all.parameters, options.weight_decay);
    } else {
      made = at::_foreach_add(*gradients, all.parameters, options.weight_decay);
      gradients = &made;
    }
  }
  if (options.momentum != 0) {
    bool all_there = true;
    for (const SGDState* state : all.states) all_there = all_there && state->momentum_buffer.defined();
    if (all_there) {
      auto& buffers = all.column(0, &SGDState::momentum_buffer);
      at::_foreach_mul_(buffers, options.momentum);
      at::_foreach_add_(buffers, *gradients, 1 - options.dampening);
    } else {
      for (std::size_t i = 0; i < all.size(); ++i) {
        at::Tensor& buffer = all.states[i]->momentum_buffer;
        if (buffer.defined())
          buffer.mul_(python_scalar(options.momentum)).add_((*gradients)[i], 1 - options.dampening);
        else
          buffer = at::clone((*gradients)[i]);
      }
    }
    auto& buffers = all.column(0, &SGDState::momentum_buffer);
    if (options.nesterov)
      at::_foreach_add_(*gradients, buffers, options.momentum);
    else
      gradients = &buffers;
  }
  at::_foreach_add_(all.parameters, *gradients, -rate);
}

inline void sgd_fused_call(const SGDOptions& o, Active<SGDState>& all, const StepScale& scale, bool first) {
  const StepScale here = scale.on(all.parameters[0].device());
  auto& buffers = all.column(0, &SGDState::momentum_buffer);
  if (o.momentum == 0) buffers.clear();
  const auto call = [&](const auto& rate) {
    at::_fused_sgd_(all.parameters, all.gradients, buffers, o.weight_decay, o.momentum, rate, o.dampening,
                    o.nesterov, o.maximize, first, optional(here.scale), optional(here.found_inf));
  };
  o.lr_tensor.defined() ? call(o.lr_tensor) : call(o.lr);
}

/// Python's `_fused_sgd`. Python fails if a parameter gets its first gradient later than others; here such
/// parameters are stepped in a separate call.
inline void sgd_fused(const SGDOptions& options, Active<SGDState>& all, const StepScale& scale) {
  align(all);
  std::size_t fresh = 0;
  if (options.momentum != 0)
    for (const SGDState* state : all.states) fresh += state->momentum_buffer.defined() ? 0 : 1;
  if (fresh != 0 && fresh != all.size()) {
    Active<SGDState> parts[2];
    for (std::size_t i = 0; i < all.size(); ++i)
      parts[all.states[i]->momentum_buffer.defined() ? 1 : 0].add(all.parameters[i], all.gradients[i],
                                                                  all.states[i]);
    for (auto& part : parts) sgd_fused(options, part, scale);
    return;
  }
  // A first step applies no dampening, so the host must know whether it is skipped.
  if (fresh != 0 && options.dampening != 0 && scale.found_inf.defined() && scale.found_inf.item<float>() != 0)
    return;
  // If the first step is skipped for an infinite gradient, the operator leaves the buffers unchanged: use
  // zeros, where Python has uninitialized memory.
  if (fresh != 0)
    for (std::size_t i = 0; i < all.size(); ++i)
      all.states[i]->momentum_buffer =
          scale.found_inf.defined() ? at::zeros_like(all.gradients[i]) : at::empty_like(all.gradients[i]);
  sgd_fused_call(options, all, scale, fresh != 0);
}

}  // namespace detail

/// Implements stochastic gradient descent, bitwise equal to `torch.optim.SGD` in parameters and state for the
/// same implementation, dtype and number of threads.
///
/// Sparse gradients are supported as in Python: not with `fused` and not with weight decay.
///
/// Counterpart: torch.optim.SGD.
class SGD : public detail::GroupedOptimizer<SGD, SGDState, SGDOptions> {
 public:
  static constexpr const char* name = "SGD";
  /// CapturedStep can capture a fused step whose learning rate is a tensor.
  static constexpr bool capturable = true;

  explicit SGD(std::vector<at::Tensor> parameters, const SGDOptions& options = {})
      : GroupedOptimizer(std::move(parameters), options) {}
  /// `options` are the defaults of groups without options.
  explicit SGD(std::vector<torch::optim::OptimizerParamGroup> groups, const SGDOptions& options = {})
      : GroupedOptimizer(std::move(groups), options) {}

 private:
  friend GroupedOptimizer;

  static const char* refusal(const SGDOptions& options, const at::Tensor& gradient) {
    if (!gradient.is_sparse()) return nullptr;
    if (options.implementation == Implementation::fused)
      return "is sparse, which a fused step does not take: choose another implementation";
    if (options.weight_decay != 0)
      return "is sparse, to which weight decay cannot be added: set weight_decay to 0 for its group";
    return nullptr;
  }

  static void prepare(const SGDOptions&, const at::Tensor&, SGDState&) {}

  // Whether the fused operator rounds as the loop does. Without momentum it does. With momentum it rounds the
  // elements after the last whole vector differently, so there must be none: its threads and widest vectors
  // process up to 16 elements at once.
  static bool fused_is_equal(const SGDOptions& options, const at::Tensor& parameter,
                             const at::Tensor& gradient) {
    const at::ScalarType type = parameter.scalar_type();
    return (type == at::kFloat || type == at::kDouble) && !gradient.is_sparse() &&
           parameter.is_non_overlapping_and_dense() && (options.momentum == 0 || parameter.numel() % 16 == 0);
  }

  void step_group(const SGDOptions& options, detail::Active<SGDState>& group, const StepScale& scale) {
    detail::each_kind(group, [&](detail::Active<SGDState>& all) {
      const bool on_cpu = all.parameters[0].is_cpu();
      if (options.implementation == Implementation::automatic && on_cpu) return fastest_on_cpu(options, all);
      bool sparse = false;
      for (const at::Tensor& gradient : all.gradients) sparse = sparse || gradient.is_sparse();
      const bool rate_on_device = options.lr_tensor.defined() && !options.lr_tensor.is_cpu();
      if (options.implementation == Implementation::fused)
        detail::sgd_fused(options, all, scale);
      else if (sparse)
        detail::sgd_loop(options, all);
      else if (options.implementation == Implementation::automatic && rate_on_device)
        detail::sgd_fused(options, all, scale);
      else
        detail::sgd_foreach(options, all);
    });
  }

  // Uses the fused operator where it has the loop's bits.
  void fastest_on_cpu(const SGDOptions& options, detail::Active<SGDState>& all) {
    fused_.clear();
    looped_.clear();
    for (std::size_t i = 0; i < all.size(); ++i)
      (fused_is_equal(options, all.parameters[i], all.gradients[i]) ? fused_ : looped_)
          .add(all.parameters[i], all.gradients[i], all.states[i]);
    if (fused_.size() != 0) detail::sgd_fused(options, fused_, {});
    if (looped_.size() != 0) detail::sgd_loop(options, looped_);
    fused_.clear();
    looped_.clear();
  }

  detail::Active<SGDState> fused_, looped_;
};

struct AdamOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
  bool decoupled = false;  ///< decouple weight decay from the gradients, as AdamW does
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
      throw UsageError(detail::formatted(
          "{}: a foreach step takes no lr_tensor: set lr, or choose Implementation::fused or automatic",
          name));
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

  // NOLINTNEXTLINE(google-explicit-constructor): AdamW is Adam with decoupled weight decay
  operator AdamOptions() const {
    return {lr, betas, eps, weight_decay, amsgrad, maximize, true, implementation, lr_tensor};
  }
};

/// Adam's state of one parameter: `exp_avg`, `exp_avg_sq` and `max_exp_avg_sq` have its shape. `step` is a
/// tensor, so that replays of a captured graph advance it: on the host unless fused; float32, or float64 if
/// that is the default dtype and the step is not fused.
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

namespace detail {

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

/// The scalars of a step, by the names of Python's implementation and in float64, as there.
struct AdamStep {
  double bias_correction1, step_size, bias_correction2_sqrt;

  AdamStep(const AdamOptions& options, double step)
      : bias_correction1(1 - std::pow(options.betas[0], step)),
        step_size(options.lr / bias_correction1),
        bias_correction2_sqrt(std::pow(1 - std::pow(options.betas[1], step), 0.5)) {}
};

inline double step_value(const AdamState& state) {
  return state.step.scalar_type() == at::kDouble
             ? *detail::const_data<double>(state.step)
             : static_cast<double>(*detail::const_data<float>(state.step));
}

/// Python's `_single_tensor_adam`: completes one parameter after the other, while its memory is in the cache.
inline void adam_loop(const AdamOptions& options, Active<AdamState>& all) {
  const double beta1 = options.betas[0], beta2 = options.betas[1];
  const at::Tensor rate =
      options.lr_tensor.defined() ? options.lr_tensor.view(at::IntArrayRef{}) : at::Tensor();
  const at::Tensor keep = python_scalar(beta2);
  // The factor of decoupled weight decay.
  const at::Tensor shrink = rate.defined() ? at::rsub(at::mul(rate, options.weight_decay), 1)
                                           : python_scalar(1 - options.lr * options.weight_decay);
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
    const at::Tensor root =
        at::sqrt(options.amsgrad ? largest : square).div_(numbers.bias_correction2_sqrt).add_(options.eps);
    if (rate.defined())
      parameter.addcdiv_(mean, root, at::neg(at::div(rate, numbers.bias_correction1)).item());
    else
      parameter.addcdiv_(mean, root, -numbers.step_size);
  }
}

/// Python's `_multi_tensor_adam` with capturable=False: the rate is a number.
inline void adam_foreach(const AdamOptions& options, Active<AdamState>& all) {
  const double beta1 = options.betas[0], beta2 = options.betas[1];
  advance_steps(all);
  std::vector<at::Scalar> sizes, roots;
  for (const AdamState* state : all.states) {
    const AdamStep numbers(options, step_value(*state));
    sizes.emplace_back(numbers.step_size * -1);
    roots.emplace_back(numbers.bias_correction2_sqrt);
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
  const StepScale here = scale.on(all.parameters[0].device());
  align(all);
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
  o.lr_tensor.defined() ? call(o.lr_tensor) : call(o.lr);
  // Undo the step count of a skipped step.
  if (here.found_inf.defined())
    at::_foreach_sub_(steps, std::vector<at::Tensor>(steps.size(), here.found_inf.view(at::IntArrayRef{})));
}

}  // namespace detail

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

  explicit Adam(std::vector<at::Tensor> parameters, const AdamOptions& options = {})
      : GroupedOptimizer(std::move(parameters), options) {}
  /// `options` are the defaults of groups without options.
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

/// Implements Adam with decoupled weight decay. Arithmetic and errors are those of Adam. Counterpart:
/// torch.optim.AdamW.
class AdamW : public Adam {
 public:
  explicit AdamW(std::vector<at::Tensor> parameters, const AdamWOptions& options = {})
      : Adam(std::move(parameters), options) {}
  explicit AdamW(std::vector<torch::optim::OptimizerParamGroup> groups, const AdamWOptions& options = {})
      : Adam(std::move(groups), options) {}
};

}  // namespace lockstep::inline v0_1
