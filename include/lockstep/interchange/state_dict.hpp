#pragma once

#include <torch/optim/optimizer.h>

#include "lockstep/precision/precision.hpp"
#include "lockstep/train/checkpoint.hpp"

namespace lockstep::inline v0_1 {

/// Tensors by name, in the order of Python's `state_dict()`.
using StateDict = std::vector<NamedTensor>;

/// Returns the parameters and buffers of a model with Python's names, in Python's order, a tied tensor under
/// each of its names. The tensors are detached and share the model's memory. `prefix` comes before every name:
/// Python's DistributedDataParallel has "module.".
/// Counterpart: torch.nn.Module.state_dict.
StateDict state_dict(const torch::nn::Module& model, std::string_view prefix = "");
/// The same of a module holder.
template <detail::ModuleHandle M>
StateDict state_dict(const M& model, std::string_view prefix = "") {
  return state_dict(static_cast<const torch::nn::Module&>(*model), prefix);
}

struct LoadStateDictOptions {
  /// Throw if an entry is missing or unexpected.
  bool strict = true;
};

/// The names in which a model and a state dict differ.
struct IncompatibleKeys {
  std::vector<std::string> missing_keys;     ///< In the model alone.
  std::vector<std::string> unexpected_keys;  ///< In the state dict alone.
};

/// Copies the entries into the model's parameters and buffers, converted to their dtypes and devices. The
/// prefix "module." of Python's DistributedDataParallel is ignored if every entry has it and the model's names
/// do not. Returns the names that strict = false has skipped. Throws CheckpointError, which lists every missing,
/// unexpected and misshapen entry, and leaves the model unchanged.
/// Counterpart: torch.nn.Module.load_state_dict.
IncompatibleKeys load_state_dict(torch::nn::Module& model, const StateDict& entries,
                                 const LoadStateDictOptions& options = {});
/// The same with the dict that torch_load returns.
IncompatibleKeys load_state_dict(torch::nn::Module& model, const c10::IValue& dict,
                                 const LoadStateDictOptions& options = {});
/// The same for a module holder.
template <detail::ModuleHandle M, class Entries>
IncompatibleKeys load_state_dict(M model, const Entries& entries, const LoadStateDictOptions& options = {}) {
  return load_state_dict(static_cast<torch::nn::Module&>(*model), entries, options);
}

namespace detail {
/// Throws the error of load_state_dict(model, dict), and changes nothing.
void check_state_dict(const torch::nn::Module& model, const c10::IValue& dict);

/// Does what load_state_dict(optimizer, dict) does, but returns its warning, an empty string if there is none.
/// `names` are the names of the parameters that have one. Changes nothing without `apply`.
std::string load_optimizer_dict(torch::optim::Optimizer& optimizer, const c10::IValue& dict,
                                const std::vector<NamedTensor>& names, bool apply);
}  // namespace detail

/// Returns the state of an optimizer as Python's dict: {"state": {index: {"exp_avg": tensor, ...}}, "param_groups":
/// [{"lr": ..., "params": [index, ...]}, ...]}. The indices count the parameters of all groups. The tensors share the
/// optimizer's memory. Takes lockstep's SGD, Adam and AdamW and those of torch::optim; a ZeroRedundancyOptimizer over
/// one of them on the rank that has called `consolidate`. Throws UsageError for another type.
/// Counterpart: torch.optim.Optimizer.state_dict.
c10::IValue state_dict(const torch::optim::Optimizer& optimizer);

/// Restores options and state from a dict of `state_dict`, in C++ or in Python. The implementation (Python's
/// `foreach` and `fused`) and `lr_tensor` stay those of the optimizer; entries of learning rate schedulers, such
/// as "initial_lr", are skipped. Throws CheckpointError, which lists every missing, unexpected and misshapen
/// entry, and leaves the optimizer unchanged. A parameter that requires a gradient and has no state, while others
/// of its group have one, gets a new state, as in Python: a warning names it.
/// Counterpart: torch.optim.Optimizer.load_state_dict.
void load_state_dict(torch::optim::Optimizer& optimizer, const c10::IValue& dict);

/// Returns the state of a GradScaler as Python's dict: "scale", "growth_factor", "backoff_factor",
/// "growth_interval" and "_growth_tracker". Synchronizes with the device.
/// Counterpart: torch.amp.GradScaler.state_dict.
c10::IValue state_dict(const GradScaler& scaler);

/// Restores a GradScaler from a dict of `state_dict`, in C++ or in Python. Throws CheckpointError, which
/// names the missing entry, and leaves the scaler unchanged.
/// Counterpart: torch.amp.GradScaler.load_state_dict.
void load_state_dict(GradScaler& scaler, const c10::IValue& dict);

/// Returns the entries as a dict, for torch_save or as a value in another dict.
c10::IValue dict_of(const StateDict& entries);

/// Returns the entries of a dict of tensors. Throws CheckpointError, which names each value that is no tensor.
StateDict entries_of(const c10::IValue& dict);

/// Returns the bytes of torch_save's file. Throws UsageError for a value that it cannot hold.
std::string pickle_state(const c10::IValue& value);

/// Returns the value in the bytes of torch_load's file. `origin` names the bytes in errors.
c10::IValue unpickle_state(std::string_view bytes, std::string_view origin);

/// Writes a value that Python reads by `torch.load(path, weights_only=True)`: tensors, numbers, strings, None, lists,
/// tuples, and dicts of these with keys of type str or int. Tensors with a common storage share it in the file. The
/// file is written atomically. Throws UsageError for another value, CheckpointError if writing fails.
/// Counterpart: torch.save.
void torch_save(const c10::IValue& value, const std::filesystem::path& path);
/// The same for `dict_of(entries)`.
void torch_save(const StateDict& entries, const std::filesystem::path& path);

/// Reads a file of torch_save or of Python's torch.save: what torch_save writes, OrderedDict, Counter and
/// Parameter. Another object that torch.load(weights_only=True) takes becomes None. Executes nothing of the file.
/// All tensors are on the CPU. Throws CheckpointError if the file is damaged or holds any other object; the error
/// names it and its entry.
/// Counterpart: torch.load(path, map_location="cpu", weights_only=True).
c10::IValue torch_load(const std::filesystem::path& path);

/// Writes rank 0's value. Collective: every rank returns once it is written, or throws the same error.
template <Communicator C, class Value>
void torch_save(const Value& value, const std::filesystem::path& path, C& comm) {
  forbid_in_rank_zero_scope("torch_save");
  const detail::CallScope scope("torch_save");
  agree_with_rank_zero<CheckpointError>(comm, [&] { torch_save(value, path); });
}

/// Reads a file on rank 0 and returns its value on every rank. Collective.
template <Communicator C>
c10::IValue torch_load(const std::filesystem::path& path, C& comm) {
  forbid_in_rank_zero_scope("torch_load");
  const detail::CallScope scope("torch_load");
  const std::string bytes = agree_with_rank_zero<CheckpointError>(comm, [&] { return read_file(path); });
  c10::IValue value;
  agree<CheckpointError>(comm, [&] { value = unpickle_state(bytes, path.string()); });
  return value;
}

}  // namespace lockstep::inline v0_1

#ifndef LOCKSTEP_COMPILED
#include "lockstep/interchange/detail/state_dict-inl.hpp"
#endif
