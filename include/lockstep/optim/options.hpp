#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// The kind of ATen operators that an optimizer's step uses.
enum class Implementation {
  /// The bits of Python's default (`foreach=None, fused=None`): a loop over the parameters on a CPU, foreach
  /// on other devices, fused if the learning rate is a tensor on such a device.
  automatic,
  /// Python's `foreach=True`: each operation over all parameters at once. On a CPU bitwise equal to
  /// `automatic`.
  foreach,
  /// Python's `fused=True`: one operator for the whole step. The fastest; its bits differ from those of the
  /// others.
  fused,
};

/// The options of one parameter group in LibTorch's form. `values` holds the optimizer's options, such as
/// SgdOptions. If `lr_tensor` is defined, it is the learning rate and set_lr writes into it.
template <class Options>
class GroupOptions : public torch::optim::OptimizerCloneableOptions<GroupOptions<Options>> {
 public:
  explicit GroupOptions(Options options) : values(std::move(options)) {}
  /// The constructor that LibTorch calls before it reads the other options from an archive.
  explicit GroupOptions(double lr) { values.lr = lr; }

  [[nodiscard]] double get_lr() const override {
    return values.lr_tensor.defined() ? values.lr_tensor.template item<double>() : values.lr;
  }
  void set_lr(const double lr) override {
    values.lr = lr;
    if (values.lr_tensor.defined()) values.lr_tensor.fill_(lr);
  }

  /// Writes the numeric and boolean options. Omits the implementation and the tensor, which belong to the
  /// run.
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

/// Returns a parameter group with its own options, for an optimizer's list of groups:
/// `SGD({parameter_group(weights, SgdOptions{.weight_decay = 1e-4}), parameter_group(biases,
/// SgdOptions{})})`.
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

/// Throws UsageError unless `good`. Callers phrase `good` so that NaN fails it.
inline void require_option(bool good, const char* optimizer, std::size_t group, const char* name,
                           double value, const char* range) {
  if (!good)
    throw UsageError(detail::formatted("{}: {} = {} of group {} is {}: choose another", optimizer, name,
                                       value, group, range));
}

/// Throws UsageError if the learning rate or the weight decay is invalid.
template <class Options>
void check_rate(const Options& options, const char* optimizer, std::size_t group) {
  require_option(options.lr >= 0, optimizer, group, "lr", options.lr, "not 0 or more");
  require_option(options.weight_decay >= 0, optimizer, group, "weight_decay", options.weight_decay,
                 "not 0 or more");
  if (options.lr_tensor.defined() && options.lr_tensor.numel() != 1)
    throw UsageError(detail::formatted("{}: lr_tensor of group {} has {} elements: give it one", optimizer,
                                       group, options.lr_tensor.numel()));
}

/// The optimizer state of one parameter as tensors, which Derived enumerates: `each_tensor(self, f)` calls
/// `f(name, tensor, like_parameter)`; `like_parameter` is true for a tensor with the parameter's shape and
/// device.
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
