#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/optim/detail/active.hpp"
#include "lockstep/optim/detail/state_archive.hpp"
#include "lockstep/optim/options.hpp"

namespace lockstep::detail {

using ParameterGroups = std::vector<torch::optim::OptimizerParamGroup>;

inline std::string parameter_text(const at::Tensor& parameter, std::size_t index, std::size_t group) {
  return detail::formatted("parameter {} of group {} ({} {})", index, group,
                           dtype_name(parameter.scalar_type()), shape_text(parameter.sizes()));
}

/// Throws UsageError for parameters that no optimizer can step: undefined, not a leaf, or listed twice. Also
/// throws if there are none.
inline void check_parameters(const char* optimizer, const ParameterGroups& groups) {
  std::unordered_map<const c10::TensorImpl*, std::size_t> seen;
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
      const at::Tensor& parameter = groups[g].params()[i];
      const auto refuse = [&](const std::string& why) {
        throw UsageError(detail::formatted("{}: {} {}", optimizer, parameter_text(parameter, i, g), why));
      };
      if (!parameter.defined())
        throw UsageError(
            detail::formatted("{}: parameter {} of group {} is undefined: leave it out", optimizer, i, g));
      if (!parameter.is_leaf())
        refuse("is no leaf: pass what the module registered, not what was made of it");
      const auto [place, is_new] = seen.emplace(parameter.unsafeGetTensorImpl(), g);
      if (!is_new && place->second == g)
        refuse("is in that group twice and would be stepped twice: use unique_parameters(module)");
      if (!is_new) refuse(detail::formatted("is in group {}, too: leave it in one", place->second));
    }
  if (seen.empty())
    throw UsageError(detail::formatted(
        "{} got no parameters: pass those of a model, such as model->parameters()", optimizer));
}

/// The base of SGD and Adam: groups with options of type GroupOptions<Options>, a State for each parameter,
/// and archives in LibTorch's format whose keys are parameter indices instead of addresses.
///
/// Derived implements `step_group(const Options&, Active<State>&, const StepScale&)`, which is called once
/// for each group that has a gradient, with autograd off;
/// `prepare(const Options&, const at::Tensor& parameter, State&)`, which creates missing parts of a state;
/// and `refusal(const Options&, const at::Tensor& gradient)`, which returns why a gradient cannot be used, or
/// null.
template <class Derived, class State, class Options>
class GroupedOptimizer : public torch::optim::Optimizer, public ScaledStep {
 public:
  /// Steps every parameter that has a gradient. If `closure` is given, calls it first and returns its loss.
  /// Throws GradientError, naming the parameter, for a gradient that cannot be used.
  at::Tensor step(LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode with_gradients(true);
      loss = closure();
    }
    step_groups({});
    return loss;
  }

  /// Returns whether every group is fused.
  [[nodiscard]] bool takes_scale() override {
    for (std::size_t g = 0; g < param_groups_.size(); ++g)
      if (options_of(g).implementation != Implementation::fused) return false;
    return true;
  }
  /// Steps with a GradScaler's scale. Does not synchronize with the device, except in SGD's first step with
  /// dampening. Throws UsageError if a scale is given and a group is not Implementation::fused.
  void step_scaled(const StepScale& scale) override {
    for (std::size_t g = 0; g < param_groups_.size(); ++g)
      if (scale.given() && options_of(g).implementation != Implementation::fused)
        throw UsageError(
            detail::formatted("{}: only a fused step takes a scale, and group {} is not fused: set "
                              ".implementation = Implementation::fused, or unscale the gradients first",
                              Derived::name, g));
    step_groups(scale);
  }

  /// Adds a group of parameters that are in no other group, with its own options or the defaults.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    ParameterGroups all(param_groups_);
    all.push_back(group);
    checked(all, static_cast<const GroupOptions<Options>&>(*defaults_).values);
    Optimizer::add_param_group(group);
    keep_options(group, param_groups_.size() - 1);
    own_rate(param_groups_.size() - 1);
  }

  /// Throws UsageError unless each group is fused and has its rate in a tensor on the parameters' device: a
  /// CUDA graph would replay host scalars.
  void check_capturable() {
    for (std::size_t g = 0; g < param_groups_.size(); ++g) {
      const Options& options = options_of(g);
      const at::Device device = param_groups_[g].params().at(0).device();
      if (options.implementation != Implementation::fused || !options.lr_tensor.defined() ||
          options.lr_tensor.device() != device)
        throw UsageError(detail::formatted(
            "{}: group {} cannot be captured, since a graph would repeat its rate: set "
            ".implementation = Implementation::fused, and lr_tensor to a tensor of one element "
            "on {}",
            Derived::name, g, device.str()));
    }
  }

  /// Returns the current options of a group.
  [[nodiscard]] Options& options(std::size_t group = 0) { return options_of(group); }

  /// Writes groups, options and states in LibTorch's format, keyed by parameter index.
  void save(torch::serialize::OutputArchive& archive) const override {
    write_optimizer<Options>(archive, *this);
  }
  /// Reads an archive of `save` for equal groups of parameters. Throws CheckpointError, and changes nothing,
  /// if they differ. Keeps the current implementation and lr_tensor of each group.
  void load(torch::serialize::InputArchive& archive) override {
    auto loaded = read_optimizer<State, Options>(archive, *this, Derived::name);
    const at::NoGradGuard no_grad;
    for (std::size_t g = 0; g < param_groups_.size(); ++g) {
      auto& kept = dynamic_cast<GroupOptions<Options>&>(param_groups_[g].options());
      loaded.options[g].implementation = kept.values.implementation;
      loaded.options[g].lr_tensor = kept.values.lr_tensor;
      kept.values = loaded.options[g];
      kept.set_lr(kept.values.lr);
      for (std::size_t i = 0; i < param_groups_[g].params().size(); ++i) {
        const at::Tensor& parameter = param_groups_[g].params()[i];
        state_.erase(parameter.unsafeGetTensorImpl());
        if (!loaded.states[g][i]) continue;
        State::each_tensor(*loaded.states[g][i], [&](const char*, at::Tensor& tensor, bool like_parameter) {
          if (tensor.defined() && like_parameter) tensor = tensor.to(parameter.device());
        });
        state_[parameter.unsafeGetTensorImpl()] = std::move(loaded.states[g][i]);
      }
    }
  }

 protected:
  GroupedOptimizer(ParameterGroups groups, const Options& defaults)
      : Optimizer(checked(groups, defaults), std::make_unique<GroupOptions<Options>>(defaults)) {
    for (std::size_t g = 0; g < groups.size(); ++g) keep_options(groups[g], g);
    for (std::size_t g = 1; g < param_groups_.size(); ++g) own_rate(g);
  }
  GroupedOptimizer(std::vector<at::Tensor> parameters, const Options& defaults)
      : GroupedOptimizer(one_group(std::move(parameters)), defaults) {}

 private:
  // LibTorch 2.15, unlike 2.6, replaces options of an unknown type by the defaults.
  void keep_options(const torch::optim::OptimizerParamGroup& given, std::size_t group) {
    if (given.has_options()) param_groups_[group].set_options(given.options().clone());
  }

  // Gives each group its own rate tensor, if several groups share one, such as that of the defaults.
  void own_rate(std::size_t group) {
    at::Tensor& rate = options_of(group).lr_tensor;
    for (std::size_t g = 0; g < group && rate.defined(); ++g)
      if (rate.is_same(options_of(g).lr_tensor)) rate = rate.clone();
  }

  static ParameterGroups one_group(std::vector<at::Tensor> parameters) {
    ParameterGroups groups;
    groups.emplace_back(std::move(parameters));
    return groups;
  }

  static const ParameterGroups& checked(const ParameterGroups& groups, const Options& defaults) {
    check_parameters(Derived::name, groups);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      if (groups[g].has_options() && !dynamic_cast<const GroupOptions<Options>*>(&groups[g].options()))
        throw UsageError(detail::formatted(
            "{}: group {} has another optimizer's options: make it with parameter_group", Derived::name, g));
      const Options& options = groups[g].has_options()
                                   ? dynamic_cast<const GroupOptions<Options>&>(groups[g].options()).values
                                   : defaults;
      options.check(g);
      if (options.implementation != Implementation::fused) continue;
      for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
        const at::Tensor& parameter = groups[g].params()[i];
        if (!at::isFloatingType(parameter.scalar_type()) || !parameter.is_non_overlapping_and_dense())
          throw UsageError(detail::formatted(
              "{}: a fused step takes parameters of floating dtypes without gaps, and not {}: choose "
              "another implementation",
              Derived::name, parameter_text(parameter, i, g)));
      }
    }
    return groups;
  }

  Options& options_of(std::size_t group) {
    auto* options = dynamic_cast<GroupOptions<Options>*>(&param_groups_.at(group).options());
    if (options == nullptr)
      throw UsageError(
          detail::formatted("{}: group {} has another optimizer's options: make it with parameter_group",
                            Derived::name, group));
    return options->values;
  }

  void step_groups(const StepScale& scale) {
    const at::NoGradGuard no_grad;
    for (std::size_t g = 0; g < param_groups_.size(); ++g) {
      const Options& options = options_of(g);
      // States and parameters change in place, outside autograd. Skipping its dispatch keys saves a third of
      // the cost of an operator on a small tensor.
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      active_.clear();
      for (std::size_t i = 0; i < param_groups_[g].params().size(); ++i) {
        const at::Tensor& parameter = param_groups_[g].params()[i];
        const at::Tensor& gradient = parameter.grad();
        if (!gradient.defined()) continue;
        if (const char* why = Derived::refusal(options, gradient))
          throw GradientError(detail::formatted("{}: the gradient of {} {}", Derived::name,
                                                parameter_text(parameter, i, g), why));
        auto& slot = state_[parameter.unsafeGetTensorImpl()];
        if (!slot) slot = std::make_unique<State>();
        auto* state = static_cast<State*>(slot.get());
        Derived::prepare(options, parameter, *state);
        active_.add(parameter, gradient, state);
      }
      if (active_.size() == 0) continue;
      static_cast<Derived&>(*this).step_group(options, active_, scale);
      // As autograd would do, so that a backward through a graph from before the step throws.
      for (const at::Tensor& parameter : active_.parameters)
        if (!parameter.is_inference()) parameter.unsafeGetTensorImpl()->bump_version();
    }
    active_.clear();
  }

  Active<State> active_;
};

}  // namespace lockstep::detail
