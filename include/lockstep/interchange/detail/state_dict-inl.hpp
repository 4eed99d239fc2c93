#pragma once

#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/DefaultDtype.h>

#include "lockstep/interchange/detail/pickle.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/optim/detail/sharded_state.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/train/detail/optimizer_state.hpp"

namespace lockstep::inline v0_1::detail {

inline constexpr std::string_view ddp_prefix = "module.";

/// Visits each option by Python's name, in Python's order, and tells whether every version of Python has it.
template <class Options, class Visit>
void each_python_option(Options& options, const Visit& visit) {
  Options::each_field(options, [&]<class Value>(const std::string_view name, Value& value) {
    if constexpr (requires { options.betas; })
      if (name == "beta1" || name == "beta2")
        return name == "beta1" ? visit("betas", options.betas, true) : void();
    visit(name == "decoupled" ? "decoupled_weight_decay" : std::string(name), value,
          !std::is_same_v<Value, bool>);
  });
}

/// Returns a number of Python: an int, a float, or a tensor with one element.
inline std::optional<double> number_in(const c10::IValue& value) {
  if (value.isDouble()) return value.toDouble();
  if (value.isInt()) return static_cast<double>(value.toInt());
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().numel() == 1 &&
      !value.toTensor().is_complex())
    return value.toTensor().item<double>();
  return std::nullopt;
}
inline bool read_option(const c10::IValue& value, double& to) {
  const auto number = number_in(value);
  if (number) to = *number;
  return number.has_value();
}
inline bool read_option(const c10::IValue& value, bool& to) {
  if (!value.isBool() && !value.isInt()) return false;
  to = value.isBool() ? value.toBool() : value.toInt() != 0;
  return true;
}
inline bool read_option(const c10::IValue& value, std::array<double, 2>& to) {
  std::vector<c10::IValue> parts;
  if (value.isTuple()) parts = value.toTupleRef().elements().vec();
  if (value.isList()) parts = value.toListRef().vec();
  return parts.size() == 2 && read_option(parts[0], to[0]) && read_option(parts[1], to[1]);
}

template <class Options>
c10::impl::GenericDict group_dict(Options options) {
  c10::impl::GenericDict group = new_dict();
  each_python_option(options, [&](const std::string& name, const auto& value, bool) {
    if constexpr (requires { value[1]; })
      group.insert(name, c10::ivalue::Tuple::create(value[0], value[1]));
    else
      group.insert(name, value);
  });
  if (options.lr_tensor.defined()) group.insert_or_assign("lr", options.lr_tensor.detach());
  const auto chosen = [&](Implementation implementation) {
    return options.implementation == implementation ? c10::IValue(true) : c10::IValue();
  };
  group.insert("foreach", chosen(Implementation::foreach));
  if constexpr (std::is_same_v<Options, AdamOptions>) group.insert("capturable", false);
  group.insert("differentiable", false);
  group.insert("fused", chosen(Implementation::fused));
  return group;
}

template <class Adapter>
c10::IValue optimizer_dict(const torch::optim::Optimizer& optimizer) {
  c10::impl::GenericDict states = new_dict();
  c10::impl::GenericList groups = new_list();
  std::int64_t index = 0;
  for (const auto& group : optimizer.param_groups()) {
    c10::impl::GenericList indices = new_list();
    for (const at::Tensor& parameter : group.params()) {
      indices.push_back(index);
      if (const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
          found != optimizer.state().end() && found->second) {
        c10::impl::GenericDict entry = new_dict();
        const typename Adapter::State state = Adapter::state(*found->second);
        Adapter::State::each_tensor(state, [&](const char* name, const at::Tensor& tensor, bool) {
          if (tensor.defined()) entry.insert(name, tensor.detach());
        });
        // Python's SGD keeps nothing without momentum.
        if (!entry.empty()) states.insert(index, entry);
      }
      ++index;
    }
    c10::impl::GenericDict options = group_dict(Adapter::options(group));
    options.insert("params", indices);
    groups.push_back(options);
  }
  c10::impl::GenericDict dict = new_dict();
  dict.insert("state", states);
  dict.insert("param_groups", groups);
  return dict;
}

/// Reads a dict of an optimizer into `options` and `states`, and each mismatch into `faults`.
template <class Adapter>
class OptimizerReader {
 public:
  using Options = typename Adapter::Options;
  using State = typename Adapter::State;

  /// Throws CheckpointError that lists everything that does not fit `optimizer`.
  OptimizerReader(const torch::optim::Optimizer& optimizer, const c10::IValue& dict) : optimizer_(optimizer) {
    for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g)
      for (const at::Tensor& parameter : optimizer.param_groups()[g].params()) {
        parameters_.push_back(parameter);
        group_of_.push_back(g);
      }
    states_.resize(parameters_.size());
    const auto [saved_groups, saved_states] = parts(dict);
    if (saved_groups.size() != optimizer.param_groups().size())
      mispaired(detail::formatted("it has {} parameter groups, the optimizer {}", saved_groups.size(),
                                  optimizer.param_groups().size()));
    for (std::size_t g = 0; g < saved_groups.size() && g < optimizer.param_groups().size(); ++g)
      read_group(g, saved_groups.get(g));
    if (paired_) read_states(saved_states);
    if (faults_.empty()) return;
    throw CheckpointError(
        "the state dict does not fit the optimizer: " + joined(faults_, "; ") +
        "; load it into an optimizer of the same type, over the same parameters and groups");
  }

  /// Returns a warning about the parameters that require a gradient and have no state, while others of their
  /// group have one. An empty string if there are none.
  [[nodiscard]] std::string warning(const std::vector<NamedTensor>& names) const {
    std::vector<std::string> without;
    std::unordered_set<std::size_t> groups;  // with a state
    for (std::size_t i = 0; i < states_.size(); ++i)
      if (states_[i]) groups.insert(group_of_[i]);
    for (std::size_t i = 0; i < states_.size(); ++i)
      if (!states_[i] && groups.contains(group_of_[i]) && parameters_[i].requires_grad())
        without.push_back(name_of(i, names));
    if (without.empty()) return {};
    std::string text;
    list_names(text, "no state of", without);
    return detail::formatted(
        "the optimizer's state dict has {}, but one of other parameters of the group: these begin with a new "
        "state, which is right for parameters that had no gradient yet",
        text);
  }

  void apply(torch::optim::Optimizer& optimizer) {
    for (std::size_t g = 0; g < options_.size(); ++g)
      Adapter::set_options(optimizer.param_groups()[g], options_[g]);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      void* const key = parameters_[i].unsafeGetTensorImpl();
      optimizer.state().erase(key);
      if (states_[i]) optimizer.state()[key] = Adapter::new_state(std::move(*states_[i]));
    }
  }

 private:
  void fault(std::string text) { faults_.push_back(std::move(text)); }
  /// A fault with which the saved states are not those of the optimizer's parameters.
  void mispaired(std::string text) {
    fault(std::move(text));
    paired_ = false;
  }

  std::string name_of(std::size_t i, const std::vector<NamedTensor>& names) const {
    for (const NamedTensor& named : names)
      if (named.tensor.is_same(parameters_[i])) return named.name;
    return detail::formatted("parameter {}, {}", i, describe(parameters_[i]));
  }

  static std::pair<c10::impl::GenericList, c10::impl::GenericDict> parts(const c10::IValue& value) {
    if (value.isGenericDict()) {
      const auto dict = value.toGenericDict();
      const auto groups = dict.find("param_groups"), states = dict.find("state");
      if (groups != dict.end() && groups->value().isList() && states != dict.end() &&
          states->value().isGenericDict())
        return {groups->value().toList(), states->value().toGenericDict()};
    }
    throw CheckpointError(
        "the value is no state dict of an optimizer, which has a list 'param_groups' and a dict 'state': "
        "save what optimizer.state_dict() returns");
  }

  /// Options that belong to the run or to a schedule.
  static bool is_skipped(const std::string& name) {
    static constexpr std::array<std::string_view, 12> skipped{
        "params",     "param_names", "foreach", "fused",  "capturable",    "differentiable",
        "initial_lr", "swa_lr",      "max_lr",  "min_lr", "base_momentum", "max_momentum"};
    return std::find(skipped.begin(), skipped.end(), name) != skipped.end();
  }

  void read_group(std::size_t g, const c10::IValue& value) {
    if (!value.isGenericDict()) return mispaired(detail::formatted("group {} is no dict", g));
    const auto group = value.toGenericDict();
    const Options own = Adapter::options(optimizer_.param_groups()[g]);
    Options options = own;
    std::vector<std::string> known, missing, extra;
    each_python_option(options, [&](const std::string& name, auto& option, bool required) {
      known.emplace_back(name);
      const auto found = group.find(name);
      if (found == group.end()) {
        if (required) missing.emplace_back(name);
      } else if (!read_option(found->value(), option)) {
        fault(detail::formatted("option '{}' of group {} has another type", name, g));
      }
    });
    for (const auto& item : group) {
      const std::string name = key_text(item.key());
      if (!is_skipped(name) && std::find(known.begin(), known.end(), name) == known.end())
        extra.push_back(name);
    }
    std::string text;
    list_names(text, "missing", missing);
    list_names(text, "unexpected", extra);
    if (!text.empty()) mispaired(detail::formatted("the options of group {}: {}", g, text));
    if constexpr (std::is_same_v<Options, AdamOptions>)
      if (options.decoupled != own.decoupled)
        fault(detail::formatted("group {} is of {}", g, own.decoupled ? "Adam" : "AdamW"));
    if (!Adapter::maximizes && options.maximize)
      fault(detail::formatted("group {} maximizes, which the optimizers of torch::optim do not", g));
    try {
      options.check(g);
    } catch (const UsageError& error) {
      fault(error.what());
    }
    options_.push_back(options);
    read_indices(g, group);
  }

  /// Pairs the saved indices with the optimizer's parameters, in order.
  void read_indices(std::size_t g, const c10::impl::GenericDict& group) {
    const auto found = group.find("params");
    if (found == group.end() || !found->value().isList())
      return mispaired(detail::formatted("group {} has no list 'params'", g));
    const auto indices = found->value().toListRef();
    const std::size_t own = optimizer_.param_groups()[g].params().size();
    if (indices.size() != own)
      return mispaired(
          detail::formatted("group {} has {} parameters, the optimizer's {}", g, indices.size(), own));
    for (const c10::IValue& index : indices)
      if (!index.isInt() || !place_of_.emplace(index.toInt(), place_of_.size()).second)
        mispaired(detail::formatted("'params' of group {} is no list of different indices", g));
  }

  void read_states(const c10::impl::GenericDict& saved) {
    for (const auto& item : saved) {
      const auto place = item.key().isInt() ? place_of_.find(item.key().toInt()) : place_of_.end();
      const std::string key =
          item.key().isInt() ? std::to_string(item.key().toInt()) : "'" + item.key().toStringRef() + "'";
      if (place == place_of_.end())
        fault(detail::formatted("state {} is of no parameter in 'params'", key));
      else if (!item.value().isGenericDict())
        fault(detail::formatted("state {} is no dict", key));
      else
        read_state(place->second, key, item.value().toGenericDict());
    }
  }

  void read_state(std::size_t i, const std::string& key, const c10::impl::GenericDict& saved) {
    const at::Tensor& parameter = parameters_[i];
    const std::string where = "state " + key;
    State state;
    std::vector<std::string> known, extra;
    State::each_tensor(state, [&](const char* name, at::Tensor& tensor, bool like_parameter) {
      known.emplace_back(name);
      const auto found = saved.find(name);
      if (found == saved.end() || found->value().isNone()) return;
      const auto number = like_parameter ? std::nullopt : number_in(found->value());
      if (number)
        tensor = step_tensor(found->value(), *number);
      else
        tensor = found->value().isTensor() ? found->value().toTensor() : at::empty({0}, at::kBool);
    });
    for (const auto& item : saved) {
      const std::string name = key_text(item.key());
      if (std::find(known.begin(), known.end(), name) == known.end()) extra.push_back(name);
    }
    StateFaults faults = state_faults(state, options_[group_of_[i]], parameter, where, /*converted=*/true);
    std::string text;
    list_names(text, "missing", faults.missing);
    list_names(text, "unexpected", extra);
    if (!text.empty()) faults.others.push_back(where + ": " + text);
    for (std::string& fault : faults.others) faults_.push_back(std::move(fault));
    if (!faults.any || !faults.others.empty()) return;
    State::each_tensor(state, [&](const char*, at::Tensor& tensor, bool like_parameter) {
      if (tensor.defined() && like_parameter)
        tensor = at::empty_like(parameter, parameter.options().requires_grad(false)).copy_(tensor);
    });
    states_[i] = std::move(state);
  }

  /// A step count on the host. Adam keeps it in float32 or float64, as Python does.
  static at::Tensor step_tensor(const c10::IValue& value, double number) {
    const bool wide = value.isTensor() ? value.toTensor().scalar_type() == at::kDouble
                                       : c10::get_default_dtype_as_scalartype() == at::kDouble;
    return at::scalar_tensor(number, wide ? at::kDouble : at::kFloat);
  }

  const torch::optim::Optimizer& optimizer_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::size_t> group_of_;  // of each parameter
  std::vector<Options> options_;
  std::vector<std::optional<State>> states_;
  std::unordered_map<std::int64_t, std::size_t> place_of_;
  std::vector<std::string> faults_;
  bool paired_ = true;
};

/// Returns whether `entries` are of a model inside Python's DistributedDataParallel, which names each
/// "module.NAME". A model whose only child is called "module" has such names itself: then `entries` are
/// wrapped if they are its names only without the prefix.
inline bool is_wrapped(const StateDict& entries, const StateDict& own) {
  std::unordered_set<std::string> names;
  for (const NamedTensor& tensor : own) names.insert(tensor.name);
  const auto known = [&](std::size_t prefix) {
    return std::all_of(entries.begin(), entries.end(),
                       [&](const NamedTensor& entry) { return names.contains(entry.name.substr(prefix)); });
  };
  const auto prefixed = [](const NamedTensor& entry) { return entry.name.starts_with(ddp_prefix); };
  return std::all_of(entries.begin(), entries.end(), prefixed) && !known(0) &&
         (known(ddp_prefix.size()) || !std::all_of(own.begin(), own.end(), prefixed));
}

/// Pairs `entries` with the model's tensors. Throws the CheckpointError of load_state_dict.
inline MatchedTensors match_state(const torch::nn::Module& model, const StateDict& entries,
                                  const LoadStateDictOptions& options) {
  StateDict own;
  append_state(own, model, "");
  return match_tensors(own, entries, StateSource::state_dict,
                       is_wrapped(entries, own) ? ddp_prefix.size() : 0, options.strict);
}

/// A key of a GradScaler's state dict and that of its archive.
struct ScalerKey {
  const char* dict;
  const char* archive;
  bool integer;
};
inline constexpr ScalerKey scaler_keys[] = {{"scale", "scale", false},
                                            {"growth_factor", "growth_factor", false},
                                            {"backoff_factor", "backoff_factor", false},
                                            {"growth_interval", "growth_interval", true},
                                            {"_growth_tracker", "growth_tracker", true}};

}  // namespace lockstep::inline v0_1::detail

namespace lockstep::inline v0_1 {

LOCKSTEP_INLINE StateDict state_dict(const torch::nn::Module& model, std::string_view prefix) {
  StateDict entries;
  detail::append_state(entries, model, std::string(prefix));
  for (NamedTensor& entry : entries) entry.tensor = entry.tensor.detach();
  return entries;
}

LOCKSTEP_INLINE IncompatibleKeys load_state_dict(torch::nn::Module& model, const StateDict& entries,
                                                 const LoadStateDictOptions& options) {
  detail::MatchedTensors matched = detail::match_state(model, entries, options);
  matched.copy();
  return {std::move(matched.missing), std::move(matched.unexpected)};
}

LOCKSTEP_INLINE void detail::check_state_dict(const torch::nn::Module& model, const c10::IValue& dict) {
  detail::match_state(model, lockstep::entries_of(dict), {});
}

LOCKSTEP_INLINE IncompatibleKeys load_state_dict(torch::nn::Module& model, const c10::IValue& dict,
                                                 const LoadStateDictOptions& options) {
  return load_state_dict(model, entries_of(dict), options);
}

LOCKSTEP_INLINE c10::IValue state_dict(const torch::optim::Optimizer& optimizer) {
  c10::IValue dict;
  const auto read = [&](const torch::optim::Optimizer& whole) {
    detail::visit_optimizer(whole,
                            [&]<class Adapter>(Adapter) { dict = detail::optimizer_dict<Adapter>(whole); });
  };
  if (const auto* sharded = dynamic_cast<const detail::ShardedState*>(&optimizer))
    sharded->read_full_state(read);
  else
    read(optimizer);
  return dict;
}

LOCKSTEP_INLINE std::string detail::load_optimizer_dict(torch::optim::Optimizer& optimizer,
                                                        const c10::IValue& dict,
                                                        const std::vector<NamedTensor>& names, bool apply) {
  const at::NoGradGuard no_grad;
  std::string warning;
  write_whole(optimizer, [&](torch::optim::Optimizer& whole) {
    detail::visit_optimizer(whole, [&]<class Adapter>(Adapter) {
      detail::OptimizerReader<Adapter> reader(whole, dict);
      warning = reader.warning(names);
      if (apply) reader.apply(whole);
    });
  });
  return warning;
}

LOCKSTEP_INLINE void load_state_dict(torch::optim::Optimizer& optimizer, const c10::IValue& dict) {
  if (const std::string warning = detail::load_optimizer_dict(optimizer, dict, {}, /*apply=*/true);
      !warning.empty())
    TORCH_WARN(warning);
}

LOCKSTEP_INLINE c10::IValue state_dict(const GradScaler& scaler) {
  torch::serialize::InputArchive archive = detail::archive_of(detail::part_bytes(scaler));
  c10::impl::GenericDict dict = detail::new_dict();
  for (const detail::ScalerKey& key : detail::scaler_keys) {
    c10::IValue value;
    archive.read(key.archive, value);
    dict.insert(key.dict, value);
  }
  return dict;
}

LOCKSTEP_INLINE void load_state_dict(GradScaler& scaler, const c10::IValue& dict) {
  if (!dict.isGenericDict())
    throw CheckpointError("the value is no state dict of a GradScaler: save what its state_dict() returns");
  const c10::impl::GenericDict entries = dict.toGenericDict();
  torch::serialize::OutputArchive written;
  for (const detail::ScalerKey& key : detail::scaler_keys) {
    const auto found = entries.find(key.dict);
    // A dict of Python's has a whole number where its user has given one, as by growth_factor=2.
    const bool fits =
        found != entries.end() && (found->value().isInt() || (!key.integer && found->value().isDouble()));
    if (!fits)
      throw CheckpointError(
          detail::formatted("the state dict of a GradScaler has no {} \"{}\": save what state_dict() of an "
                            "enabled scaler returns",
                            key.integer ? "integer" : "float", key.dict));
    written.write(key.archive,
                  key.integer ? found->value() : c10::IValue(found->value().toScalar().toDouble()));
  }
  written.write("skipped", c10::IValue(scaler.skipped()));
  torch::serialize::InputArchive archive = detail::archive_of(detail::bytes_of(written));
  scaler.load(archive);
}

LOCKSTEP_INLINE c10::IValue dict_of(const StateDict& entries) {
  c10::impl::GenericDict dict = detail::new_dict();
  for (const NamedTensor& entry : entries)
    if (!dict.insert(entry.name, entry.tensor).second)
      throw UsageError(
          detail::formatted("the entry \"{}\" is in a state dict twice: give each name once", entry.name));
  return dict;
}

LOCKSTEP_INLINE StateDict entries_of(const c10::IValue& dict) {
  if (!dict.isGenericDict())
    throw CheckpointError("the value is no state dict: save what model.state_dict() returns");
  StateDict entries;
  std::vector<std::string> others;
  for (const auto& item : dict.toGenericDict()) {
    if (item.key().isString() && item.value().isTensor())
      entries.push_back({item.key().toStringRef(), item.value().toTensor()});
    else
      others.push_back(detail::key_text(item.key()));
  }
  if (others.empty()) return entries;
  std::string names;
  detail::list_names(names, "no tensors:", others);
  throw CheckpointError(
      detail::formatted("the dict is no state dict of a model: {}; take the entry that holds the model's, "
                        "such as [\"state_dict\"]",
                        names));
}

LOCKSTEP_INLINE std::string pickle_state(const c10::IValue& value) {
  return detail::pickled(value);
}

LOCKSTEP_INLINE c10::IValue unpickle_state(std::string_view bytes, std::string_view origin) {
  return detail::reading_file(origin, bytes, [&] { return detail::unpickled(bytes); });
}

LOCKSTEP_INLINE void torch_save(const c10::IValue& value, const std::filesystem::path& path) {
  write_file_atomically(path, pickle_state(value));
}
LOCKSTEP_INLINE void torch_save(const StateDict& entries, const std::filesystem::path& path) {
  torch_save(dict_of(entries), path);
}

LOCKSTEP_INLINE c10::IValue torch_load(const std::filesystem::path& path) {
  return unpickle_state(read_file(path), path.string());
}

}  // namespace lockstep::inline v0_1
