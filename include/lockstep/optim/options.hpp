#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include "lockstep/error.hpp"

namespace lockstep {

/// Which of ATen's operators make up an optimizer's step.
enum class Implementation {
  /// The bits of Python's default (`foreach=None, fused=None`): on a CPU those of its loop over the
  /// parameters,
  /// on other devices foreach; fused where the rate is a tensor on such a device.
  automatic,
  /// Python's `foreach=True`: each operation for all parameters, then the next. On a CPU the same bits as
  /// `automatic`.
  foreach,
  /// Python's `fused=True`: one operator for all. The fastest; its bits are those of `fused=True` alone.
  fused,
};

/// The options of one parameter group, as LibTorch keeps them: `values` are what the optimizer takes, such as
/// SgdOptions. `lr_tensor`, where it is defined, is the rate, and set_lr writes into it.
template <class Options>
class GroupOptions : public torch::optim::OptimizerCloneableOptions<GroupOptions<Options>> {
 public:
  explicit GroupOptions(Options options) : values(std::move(options)) {}
  /// What LibTorch makes before it reads the rest from an archive.
  explicit GroupOptions(double lr) { values.lr = lr; }

  [[nodiscard]] double get_lr() const override {
    return values.lr_tensor.defined() ? values.lr_tensor.template item<double>() : values.lr;
  }
  void set_lr(const double lr) override {
    values.lr = lr;
    if (values.lr_tensor.defined()) values.lr_tensor.fill_(lr);
  }

  /// Numbers and switches; neither the implementation nor the tensor, which are of the run and not its state.
  void serialize(torch::serialize::OutputArchive& archive) const override {
    Options saved = values;
    saved.lr = get_lr();
    Options::each_field(
        saved, [&](const char* name, const auto& value) { archive.write(name, c10::IValue(value)); });
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    Options::each_field(values, [&]<class Value>(const char* name, Value& value) {
      c10::IValue found;
      if (archive.try_read(name, found)) value = found.to<Value>();
    });
  }

  Options values;
};

/// Parameters with options of their own, for an optimizer's list of groups: `SGD({parameter_group(weights,
/// SgdOptions{.weight_decay = 1e-4}), parameter_group(biases, SgdOptions{})})`.
template <class Options>
torch::optim::OptimizerParamGroup parameter_group(std::vector<at::Tensor> parameters,
                                                  const Options& options) {
  constexpr bool ours = requires {
    typename Options::Group;
  };
  static_assert(ours,
                "lockstep: parameter_group takes the options of one of lockstep's optimizers, such as "
                "SgdOptions; LibTorch's options go with torch::optim::OptimizerParamGroup");
  if constexpr (ours) {
    using Kept = typename Options::Group;
    return {std::move(parameters), std::make_unique<GroupOptions<Kept>>(Kept(options))};
  } else {
    return torch::optim::OptimizerParamGroup(std::move(parameters));
  }
}

}  // namespace lockstep

namespace lockstep::detail {

/// Throws UsageError unless `good`; NaN is good for nothing.
inline void require_option(bool good, const char* optimizer, std::size_t group, const char* name,
                           double value, const char* range) {
  if (!good)
    throw UsageError(
        fmt::format("{}: {} = {} of group {} is {}: choose another", optimizer, name, value, group, range));
}

/// What is wrong with the rate of either kind of optimizer.
template <class Options>
void check_rate(const Options& options, const char* optimizer, std::size_t group) {
  require_option(options.lr >= 0, optimizer, group, "lr", options.lr, "not 0 or more");
  require_option(options.weight_decay >= 0, optimizer, group, "weight_decay", options.weight_decay,
                 "not 0 or more");
  if (options.lr_tensor.defined() && options.lr_tensor.numel() != 1)
    throw UsageError(fmt::format("{}: lr_tensor of group {} has {} elements: give it one", optimizer, group,
                                 options.lr_tensor.numel()));
}

/// The state of one parameter as tensors, which Derived lists: `each_tensor(self, f)` calls `f(name, tensor,
/// like_parameter)`, where like_parameter says whether it has the parameter's shape and device.
template <class Derived>
struct TensorState : torch::optim::OptimizerCloneableParamState<Derived> {
  void serialize(torch::serialize::OutputArchive& archive) const override {
    Derived::each_tensor(static_cast<const Derived&>(*this),
                         [&](const char* name, const at::Tensor& tensor, bool) {
                           if (tensor.defined()) archive.write(name, c10::IValue(tensor));
                         });
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    Derived::each_tensor(static_cast<Derived&>(*this), [&](const char* name, at::Tensor& tensor, bool) {
      c10::IValue found;
      if (archive.try_read(name, found)) tensor = found.toTensor();
    });
  }
};

}  // namespace lockstep::detail

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

/// What SGD does; the defaults and the names are Python's.
struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
  Implementation implementation = Implementation::automatic;
  /// Of one element; where defined it is the rate, read at each step.
  at::Tensor lr_tensor = {};

  using Group = SgdOptions;

  /// Throws UsageError for what Python refuses as well.
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

/// SGD's state of a parameter: the momentum buffer from the first step with momentum on.
struct SgdState : detail::TensorState<SgdState> {
  at::Tensor momentum_buffer;

  template <class Self, class Visit>
  static void each_tensor(Self& self, Visit&& visit) {
    visit("momentum_buffer", self.momentum_buffer, true);
  }
};

}  // namespace lockstep
