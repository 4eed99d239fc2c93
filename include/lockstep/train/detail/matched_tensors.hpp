#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

/// Appends each parameter and buffer to `state`, in the order of Python's `state_dict()`.
inline void append_state(std::vector<NamedTensor>& state, const torch::nn::Module& module,
                         const std::string& prefix) {
  for (const auto& item : module.named_parameters(/*recurse=*/false))
    if (item.value().defined()) state.push_back({prefix + item.key(), item.value()});
  for (const auto& item : module.named_buffers(/*recurse=*/false))
    if (item.value().defined()) state.push_back({prefix + item.key(), item.value()});
  for (const auto& child : module.named_children())
    if (child.value()) append_state(state, *child.value(), prefix + child.key() + ".");
}

/// Appends the tensors of an archive of LibTorch, by the same names.
inline void append_state(std::vector<NamedTensor>& state, torch::serialize::InputArchive& archive,
                         const std::string& prefix) {
  for (const std::string& key : archive.keys()) {
    at::Tensor tensor;
    torch::serialize::InputArchive inner;
    if (archive.try_read(key, tensor))
      state.push_back({prefix + key, std::move(tensor)});
    else if (archive.try_read(key, inner))
      append_state(state, inner, prefix + key + ".");
  }
}

/// Appends to `text`: "; KIND "a", "b"".
inline void list_names(std::string& text, std::string_view kind, const std::vector<std::string>& names) {
  if (names.empty()) return;
  text += formatted("{}{} \"{}\"", text.empty() ? "" : "; ", kind, joined(names, "\", \""));
}

/// A model's tensors with the values to copy into them, and the names without a counterpart.
struct MatchedTensors {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  std::vector<std::string> missing, unexpected;

  void copy() const {
    const at::NoGradGuard no_grad;
    for (const auto& [own, value] : pairs) own.copy_(value);
  }
};

/// Where the values come from.
enum class StateSource { archive, state_dict };

/// Pairs a model's tensors with `entries`, whose names begin with `prefix` more characters. Throws
/// CheckpointError, which lists all entries of another shape, or of another dtype (of a state dict: one that
/// cannot be converted), and with `strict` those that are missing or unexpected.
inline MatchedTensors match_tensors(const std::vector<NamedTensor>& own,
                                    const std::vector<NamedTensor>& entries, StateSource source,
                                    std::size_t prefix = 0, bool strict = true) {
  const bool archive = source == StateSource::archive;
  std::unordered_map<std::string_view, std::pair<const NamedTensor*, bool>> given;  // and whether it is used
  std::vector<std::string> repeated, misshapen;
  for (const NamedTensor& entry : entries)
    if (!given.emplace(std::string_view(entry.name).substr(prefix), std::pair(&entry, false)).second)
      repeated.push_back(entry.name);

  MatchedTensors matched;
  for (const auto& [name, tensor] : own) {
    const auto found = given.find(name);
    if (found == given.end()) {
      matched.missing.push_back(name);
      continue;
    }
    found->second.second = true;
    const at::Tensor& value = found->second.first->tensor;
    if (value.defined() && value.sizes() == tensor.sizes() &&
        (archive ? value.scalar_type() == tensor.scalar_type()
                 : c10::canCast(value.scalar_type(), tensor.scalar_type())))
      matched.pairs.emplace_back(tensor, value);
    else
      misshapen.push_back(formatted("\"{}\" is {} in the {} and {} in the model", name,
                                    value.defined() ? describe(value) : "no tensor",
                                    archive ? "file" : "state dict", describe(tensor)));
  }
  for (const NamedTensor& entry : entries)
    if (!given.at(std::string_view(entry.name).substr(prefix)).second)
      matched.unexpected.push_back(entry.name);

  std::string text;
  if (strict) list_names(text, "missing", matched.missing);
  if (strict) list_names(text, "unexpected", matched.unexpected);
  list_names(text, "given twice", repeated);
  if (!misshapen.empty()) text += (text.empty() ? "" : "; ") + joined(misshapen, "; ");
  if (text.empty()) return matched;
  if (archive) throw CheckpointError("it does not fit the model: " + text);
  throw CheckpointError(
      formatted("the state dict does not fit the model: {}; build the model that it was saved from{}", text,
                strict ? ", or set strict to false to skip names" : ""));
}

/// Pairs the model's tensors with those of an archive.
inline MatchedTensors match_tensors(const torch::nn::Module& model, torch::serialize::InputArchive& archive) {
  std::vector<NamedTensor> own, entries;
  append_state(own, model, "");
  append_state(entries, archive, "");
  return match_tensors(own, entries, StateSource::archive);
}

}  // namespace lockstep::detail
