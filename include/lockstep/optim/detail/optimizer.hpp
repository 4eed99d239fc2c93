#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/detail/describe.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/optim/options.hpp"
#include "lockstep/precision/precision.hpp"

namespace lockstep::inline v0_1::detail {

/// The parameters of a group that have a gradient, in the group's order, with their gradients and states.
template <class State>
struct Active {
  std::vector<at::Tensor> parameters, gradients;
  std::vector<State*> states;
  // Lists of the states' tensors, kept from step to step to avoid allocations.
  std::array<std::vector<at::Tensor>, 4> columns;

  [[nodiscard]] std::size_t size() const { return parameters.size(); }
  void clear() {
    parameters.clear();
    gradients.clear();
    states.clear();
    for (auto& column : columns) column.clear();
  }
  void add(at::Tensor parameter, at::Tensor gradient, State* state) {
    parameters.push_back(std::move(parameter));
    gradients.push_back(std::move(gradient));
    states.push_back(state);
  }
  /// Fills column `index` with a tensor of each state and returns it.
  std::vector<at::Tensor>& column(std::size_t index, at::Tensor State::*tensor) {
    auto& list = columns[index];
    list.clear();
    for (State* state : states) list.push_back(state->*tensor);
    return list;
  }
};

inline bool same_kind(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

/// Calls `work` once for each dtype and device among the parameters: foreach and fused operators take lists
/// of one dtype and device.
template <class State, class Work>
void each_kind(Active<State>& all, Work&& work) {
  if (std::all_of(all.parameters.begin(), all.parameters.end(),
                  [&](const at::Tensor& parameter) { return same_kind(parameter, all.parameters[0]); }))
    return work(all);
  std::vector<Active<State>> kinds;
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::size_t kind = 0;
    while (kind < kinds.size() && !same_kind(kinds[kind].parameters[0], all.parameters[i])) ++kind;
    if (kind == kinds.size()) kinds.emplace_back();
    kinds[kind].add(all.parameters[i], all.gradients[i], all.states[i]);
  }
  for (auto& kind : kinds) work(kind);
}

/// Returns a scalar as Python passes it to operators: a wrapped-number tensor, which is not rounded. For
/// bfloat16, C++'s `tensor.mul_(number)` would round the number first.
inline at::Tensor python_scalar(double number) {
  return at::native::wrapped_scalar_tensor(number);
}

/// Copies each gradient, and each tensor of a state, which may be of a file, whose strides differ from its parameter's into
/// the parameter's layout: the fused operators ignore strides.
template <class State>
void align(Active<State>& all) {
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto align_one = [&parameter = all.parameters[i]](at::Tensor& tensor) {
      if (tensor.defined() && tensor.strides() != parameter.strides())
        tensor = at::empty_like(parameter, parameter.options().requires_grad(false)).copy_(tensor);
    };
    align_one(all.gradients[i]);
    State::each_tensor(*all.states[i], [&](const char*, at::Tensor& tensor, bool like_parameter) {
      if (like_parameter) align_one(tensor);
    });
  }
}

/// Writes an optimizer in LibTorch's format. LibTorch uses addresses as keys, which differ from run to run;
/// here the keys number the parameters from 1, so that equal optimizers write equal archives.
template <class Options>
void write_optimizer(torch::serialize::OutputArchive& archive, const torch::optim::Optimizer& optimizer) {
  archive.write("pytorch_version", c10::IValue("1.5.0"));
  torch::serialize::OutputArchive states(archive.compilation_unit());
  torch::serialize::OutputArchive groups(archive.compilation_unit());
  const auto count = [](std::size_t number) {
    return c10::IValue(at::scalar_tensor(static_cast<std::int64_t>(number), at::kLong));
  };
  groups.write("param_groups/size", count(optimizer.param_groups().size()));
  std::size_t key = 0;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& group = optimizer.param_groups()[g];
    torch::serialize::OutputArchive written(archive.compilation_unit());
    written.write("params/size", count(group.params().size()));
    for (std::size_t i = 0; i < group.params().size(); ++i) {
      const std::string name = std::to_string(++key);
      written.write("params/" + std::to_string(i), c10::IValue(name));
      const auto state = optimizer.state().find(group.params()[i].unsafeGetTensorImpl());
      if (state == optimizer.state().end()) continue;
      torch::serialize::OutputArchive fields(archive.compilation_unit());
      state->second->serialize(fields);
      states.write(name, fields);
    }
    torch::serialize::OutputArchive options(archive.compilation_unit());
    static_cast<const GroupOptions<Options>&>(group.options()).serialize(options);
    written.write("options", options);
    groups.write("param_groups/" + std::to_string(g), written);
  }
  archive.write("state", states);
  archive.write("param_groups", groups);
}

/// What of a saved state does not fit its parameter.
struct StateFaults {
  bool any = false;  // whether the state has a tensor
  std::vector<std::string> missing = {}, others = {};
};

/// Compares a state that was read with its parameter. `where` names it. The dtypes may differ if they are
/// `converted`, as those of Python's dicts are.
template <class State, class Options>
StateFaults state_faults(const State& state, [[maybe_unused]] const Options& options,
                         const at::Tensor& parameter, const std::string& where, bool converted) {
  StateFaults faults;
  State::each_tensor(state, [&](std::string_view field, const at::Tensor& tensor, bool like_parameter) {
    faults.any = faults.any || tensor.defined();
    if constexpr (requires { options.amsgrad; })
      if (!tensor.defined() && field == "max_exp_avg_sq" && !options.amsgrad) return;
    if (!tensor.defined()) return faults.missing.emplace_back(field), void();
    if (like_parameter) {
      const at::ScalarType type = tensor.scalar_type(), wanted = parameter.scalar_type();
      if (tensor.sizes() != parameter.sizes() || (converted ? !c10::canCast(type, wanted) : type != wanted))
        faults.others.push_back(formatted("{} of {} is {}, the parameter {}", field, where, describe(tensor),
                                          describe(parameter)));
    } else if (const bool real = tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble;
               !real || tensor.numel() != 1 || !(tensor.item<double>() >= 0) ||
               tensor.item<double>() != std::floor(tensor.item<double>()) || tensor.item<double>() > 1e15) {
      faults.others.push_back(formatted("{} of {} is no count", field, where));
    }
  });
  if (!faults.any) faults.missing.clear();  // before the first step
  return faults;
}

/// Throws CheckpointError if there are faults. `name` names the optimizer.
inline void refuse_faults(StateFaults faults, const std::string& where, std::string_view name) {
  for (const std::string& field : faults.missing)
    faults.others.push_back(formatted("{} of {} is missing", field, where));
  if (!faults.others.empty())
    throw CheckpointError(
        formatted("{}: {}: load it into an optimizer of the same model", name, joined(faults.others, "; ")));
}

/// The contents of an archive, by group. A state is null for a parameter that was never stepped.
template <class State, class Options>
struct ReadOptimizer {
  std::vector<Options> options;
  std::vector<std::vector<std::unique_ptr<State>>> states;
};

/// Throws CheckpointError for an option that `Options` lacks: another type of optimizer wrote the archive.
template <class Options>
void refuse_foreign_options(torch::serialize::InputArchive& groups, std::size_t count, const char* name) {
  std::vector<std::string> known{"training"};  // every archive of LibTorch's has it
  const Options defaults;
  Options::each_field(defaults, [&](const char* field, const auto&) { known.emplace_back(field); });
  for (std::size_t g = 0; g < count; ++g) {
    torch::serialize::InputArchive group, options;
    groups.read("param_groups/" + std::to_string(g), group);
    group.read("options", options);
    for (const std::string& key : options.keys())
      if (std::find(known.begin(), known.end(), key) == known.end())
        throw CheckpointError(
            detail::formatted("{}: the archive has an option '{}', which this optimizer does not have: load "
                              "an archive of the same optimizer",
                              name, key));
  }
}

template <class State, class Options>
ReadOptimizer<State, Options> read_optimizer(torch::serialize::InputArchive& archive,
                                             const torch::optim::Optimizer& optimizer, const char* name) try {
  torch::serialize::InputArchive states_archive, groups_archive;
  archive.read("state", states_archive);
  archive.read("param_groups", groups_archive);
  ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>> states;
  torch::optim::detail::serialize<State>(states_archive, states);
  std::vector<std::pair<std::vector<std::string>, std::unique_ptr<torch::optim::OptimizerOptions>>> groups;
  torch::optim::detail::serialize<GroupOptions<Options>>(groups_archive, groups);

  if (groups.size() != optimizer.param_groups().size())
    throw CheckpointError(
        detail::formatted("{}: the archive has {} parameter groups, the optimizer {}: construct the "
                          "optimizer with the groups that it had when it was saved",
                          name, groups.size(), optimizer.param_groups().size()));
  refuse_foreign_options<Options>(groups_archive, groups.size(), name);
  ReadOptimizer<State, Options> read;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& keys = groups[g].first;
    const auto& parameters = optimizer.param_groups()[g].params();
    if (keys.size() != parameters.size())
      throw CheckpointError(
          detail::formatted("{}: group {} has {} parameters in the archive and {} in the optimizer: "
                            "construct the optimizer with the groups that it had when it was saved",
                            name, g, keys.size(), parameters.size()));
    read.options.push_back(static_cast<GroupOptions<Options>&>(*groups[g].second).values);
    try {
      read.options.back().check(g);
    } catch (const UsageError& error) {
      throw CheckpointError(formatted("{}: in the archive, {}", name, error.what()));
    }
    auto& row = read.states.emplace_back();
    for (std::size_t i = 0; i < keys.size(); ++i) {
      // LibTorch turns the keys into pointers, which are never dereferenced.
      const auto found = states.find(reinterpret_cast<void*>(std::stoull(keys[i])));
      row.emplace_back(found == states.end() ? nullptr : static_cast<State*>(found->second.release()));
      if (!row.back()) continue;
      const std::string where = formatted("parameter {} of group {}", i, g);
      refuse_faults(state_faults(*row.back(), read.options.back(), parameters[i], where, false), where, name);
    }
  }
  return read;
} catch (const Error&) {
  throw;
} catch (const std::exception& error) {  // from LibTorch, or from a key that is not a number
  throw CheckpointError(
      detail::formatted("{}: the archive is not one of this optimizer ({})", name, first_line(error)));
}

using ParameterGroups = std::vector<torch::optim::OptimizerParamGroup>;

inline std::string parameter_text(const at::Tensor& parameter, std::size_t index, std::size_t group) {
  return detail::formatted("parameter {} of group {} ({} {})", index, group,
                           dtype_name(parameter.scalar_type()), shape_text(parameter.sizes()));
}

/// Throws UsageError for parameters that no optimizer can step, and if there are none.
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
        refuse("is no leaf: pass the tensors that the module registered, not tensors computed from them");
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
/// Derived implements `step_group(const Options&, Active<State>&, const StepScale&)`, which is called once for each
/// group that has a gradient, with autograd off; `prepare(const Options&, const at::Tensor& parameter, State&)`, which
/// creates missing parts of a state; and `refusal(const Options&, const at::Tensor& gradient)`, which returns why a
/// gradient cannot be used, or null.
template <class Derived, class State, class Options>
class GroupedOptimizer : public torch::optim::Optimizer, public ScaledStep {
 public:
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

  [[nodiscard]] bool takes_scale() override {
    for (std::size_t g = 0; g < param_groups_.size(); ++g)
      if (options_of(g).implementation != Implementation::fused) return false;
    return true;
  }
  /// Steps with a GradScaler's scale. Does not synchronize with the device, except in SGD's first step with
  /// dampening. Throws UsageError if a scale is given and a group is not Implementation::fused.
  void step_scaled(const StepScale& scale) override {
    for (std::size_t g = 0; g < param_groups_.size(); ++g)
      if (scale.any() && options_of(g).implementation != Implementation::fused)
        throw UsageError(
            detail::formatted("{}: only a fused step takes a scale, and group {} is not fused: set "
                              ".implementation = Implementation::fused, or unscale the gradients first",
                              Derived::name, g));
    step_groups(scale);
  }

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
            "{}: group {} cannot be captured, since a graph would repeat its rate: set .implementation = "
            "Implementation::fused, and lr_tensor to a tensor of one element on {}",
            Derived::name, g, device.str()));
    }
  }

  [[nodiscard]] Options& options(std::size_t group = 0) { return options_of(group); }

  void save(torch::serialize::OutputArchive& archive) const override {
    write_optimizer<Options>(archive, *this);
  }
  /// Throws CheckpointError, and changes nothing, for other groups. Keeps each group's implementation and lr_tensor.
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
      : GroupedOptimizer(ParameterGroups{torch::optim::OptimizerParamGroup(std::move(parameters))},
                         defaults) {}

 private:
  // LibTorch 2.15, unlike 2.6, replaces options of an unknown type by the defaults.
  void keep_options(const torch::optim::OptimizerParamGroup& given, std::size_t group) {
    if (given.has_options()) param_groups_[group].set_options(given.options().clone());
  }

  // Gives each group a learning rate tensor of its own if several groups share one, such as the one in the
  // default options.
  void own_rate(std::size_t group) {
    at::Tensor& rate = options_of(group).lr_tensor;
    for (std::size_t g = 0; g < group && rate.defined(); ++g)
      if (rate.is_same(options_of(g).lr_tensor)) rate = rate.clone();
  }

  static const Options& values_in(const torch::optim::OptimizerOptions& options, std::size_t group) {
    if (const auto* own = dynamic_cast<const GroupOptions<Options>*>(&options)) return own->values;
    throw UsageError(detail::formatted(
        "{}: group {} has another optimizer's options: make it with parameter_group", Derived::name, group));
  }

  static const ParameterGroups& checked(const ParameterGroups& groups, const Options& defaults) {
    check_parameters(Derived::name, groups);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const Options& options = groups[g].has_options() ? values_in(groups[g].options(), g) : defaults;
      options.check(g);
      if (options.implementation != Implementation::fused) continue;
      for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
        const at::Tensor& parameter = groups[g].params()[i];
        if (!at::isFloatingType(parameter.scalar_type()) || !parameter.is_non_overlapping_and_dense())
          throw UsageError(
              detail::formatted("{}: a fused step takes parameters of floating dtypes without gaps, and not "
                                "{}: choose another implementation",
                                Derived::name, parameter_text(parameter, i, g)));
      }
    }
    return groups;
  }

  Options& options_of(std::size_t group) {
    return const_cast<Options&>(values_in(param_groups_.at(group).options(), group));
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

}  // namespace lockstep::inline v0_1::detail
