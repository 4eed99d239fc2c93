#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "lockstep/optim/group_options.hpp"
#include "lockstep/optim/state_archive.hpp"

namespace lockstep {

/// What Adam does; the defaults and the names are Python's.
struct AdamOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
  /// Weight decay shrinks the parameters and leaves the gradients alone, as AdamW does.
  bool decoupled = false;
  Implementation implementation = Implementation::automatic;
  /// Of one element; where defined it is the rate, read at each step.
  at::Tensor lr_tensor = {};

  using Group = AdamOptions;

  /// Throws UsageError for what Python refuses as well.
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

/// What AdamW does: Adam with decoupled weight decay, on by default.
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

/// Adam's state of a parameter. `step` is a tensor, so that a captured graph counts on: on the host unless
/// fused, float32 (float64 where that is the default dtype and the step is not fused).
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
