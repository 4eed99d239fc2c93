#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/add.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/optimizer.h>

#include "lockstep/optim/detail/optimizer.hpp"
#include "lockstep/optim/options.hpp"

namespace lockstep {

/// Options of SGD, with Python's names and its defaults.
struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
  Implementation implementation = Implementation::automatic;
  /// Learning rate as a tensor of one element. If defined, it replaces `lr` and is read at each step.
  at::Tensor lr_tensor = {};

  using Group = SgdOptions;

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

/// SGD's state of one parameter. The momentum buffer is defined from the first step with momentum on.
struct SgdState : detail::TensorState<SgdState> {
  at::Tensor momentum_buffer;

  template <class Self, class Visit>
  static void each_tensor(Self& self, Visit&& visit) {
    visit("momentum_buffer", self.momentum_buffer, true);
  }
};

}  // namespace lockstep

namespace lockstep::detail {

inline double sgd_rate(const SgdOptions& options) {
  return options.lr_tensor.defined() ? options.lr_tensor.item<double>() : options.lr;
}

/// Python's `_single_tensor_sgd`: completes one parameter after the other, while its memory is in the cache.
inline void sgd_loop(const SgdOptions& options, Active<SgdState>& all) {
  const double rate = sgd_rate(options);
  const at::Tensor momentum = as_python_does(options.momentum);
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
inline void sgd_foreach(const SgdOptions& options, Active<SgdState>& all) {
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
    for (const SgdState* state : all.states) all_there = all_there && state->momentum_buffer.defined();
    if (all_there) {
      auto& buffers = all.column(0, &SgdState::momentum_buffer);
      at::_foreach_mul_(buffers, options.momentum);
      at::_foreach_add_(buffers, *gradients, 1 - options.dampening);
    } else {
      for (std::size_t i = 0; i < all.size(); ++i) {
        at::Tensor& buffer = all.states[i]->momentum_buffer;
        if (buffer.defined())
          buffer.mul_(as_python_does(options.momentum)).add_((*gradients)[i], 1 - options.dampening);
        else
          buffer = at::clone((*gradients)[i]);
      }
    }
    auto& buffers = all.column(0, &SgdState::momentum_buffer);
    if (options.nesterov)
      at::_foreach_add_(*gradients, buffers, options.momentum);
    else
      gradients = &buffers;
  }
  at::_foreach_add_(all.parameters, *gradients, -rate);
}

inline void sgd_fused_call(const SgdOptions& o, Active<SgdState>& all, const StepScale& scale, bool first) {
  const auto optional = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
  };
  const StepScale here = scale.on(all.parameters[0].device());
  auto& buffers = all.column(0, &SgdState::momentum_buffer);
  if (o.momentum == 0) buffers.clear();
  const auto call = [&](const auto& rate) {
    at::_fused_sgd_(all.parameters, all.gradients, buffers, o.weight_decay, o.momentum, rate, o.dampening,
                    o.nesterov, o.maximize, first, optional(here.scale), optional(here.found_inf));
  };
  if (o.lr_tensor.defined())
    call(o.lr_tensor);
  else
    call(o.lr);
}

/// Python's `_fused_sgd`. Python fails if a parameter gets its first gradient later than others; here such
/// parameters are stepped in a separate call.
inline void sgd_fused(const SgdOptions& options, Active<SgdState>& all, const StepScale& scale) {
  align_gradients(all);
  std::size_t fresh = 0;
  if (options.momentum != 0)
    for (const SgdState* state : all.states) fresh += state->momentum_buffer.defined() ? 0 : 1;
  if (fresh != 0 && fresh != all.size()) {
    Active<SgdState> parts[2];
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

}  // namespace lockstep::detail

namespace lockstep {

/// Implements stochastic gradient descent, bitwise equal to `torch.optim.SGD` in parameters and state for the
/// same implementation, dtype and number of threads.
///
/// Sparse gradients are supported as in Python: not with `fused` and not with weight decay.
///
/// Counterpart: torch.optim.SGD.
class SGD : public detail::GroupedOptimizer<SGD, SgdState, SgdOptions> {
 public:
  static constexpr const char* name = "SGD";
  /// CapturedStep can capture a fused step whose learning rate is a tensor.
  static constexpr bool capturable = true;

  /// Throws UsageError if there are no parameters, one is repeated, or an option is out of range.
  explicit SGD(std::vector<at::Tensor> parameters, const SgdOptions& options = {})
      : GroupedOptimizer(std::move(parameters), options) {}
  /// Constructs an optimizer of parameter groups. `options` are the defaults of groups without options.
  explicit SGD(std::vector<torch::optim::OptimizerParamGroup> groups, const SgdOptions& options = {})
      : GroupedOptimizer(std::move(groups), options) {}

 private:
  friend GroupedOptimizer;

  static const char* refusal(const SgdOptions& options, const at::Tensor& gradient) {
    if (!gradient.is_sparse()) return nullptr;
    if (options.implementation == Implementation::fused)
      return "is sparse, which a fused step does not take: choose another implementation";
    if (options.weight_decay != 0)
      return "is sparse, to which weight decay cannot be added: set weight_decay to 0 for its group";
    return nullptr;
  }

  static void prepare(const SgdOptions&, const at::Tensor&, SgdState&) {}

  // Whether the fused operator rounds as the loop does. Without momentum it does. With momentum it rounds the
  // elements after the last whole vector differently, so there must be none: its threads and widest vectors
  // process up to 16 elements at once.
  static bool fused_is_equal(const SgdOptions& options, const at::Tensor& parameter,
                             const at::Tensor& gradient) {
    const at::ScalarType type = parameter.scalar_type();
    return (type == at::kFloat || type == at::kDouble) && !gradient.is_sparse() &&
           parameter.is_non_overlapping_and_dense() && (options.momentum == 0 || parameter.numel() % 16 == 0);
  }

  void step_group(const SgdOptions& options, detail::Active<SgdState>& group, const StepScale& scale) {
    detail::each_kind(group, [&](detail::Active<SgdState>& all) {
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
  void fastest_on_cpu(const SgdOptions& options, detail::Active<SgdState>& all) {
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

  detail::Active<SgdState> fused_, looped_;
};

}  // namespace lockstep
