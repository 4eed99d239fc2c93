#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE ParameterTable::ParameterTable(std::vector<NamedTensor> parameters,
                                               const std::unordered_set<const c10::TensorImpl*>& sparse)
    : all(std::move(parameters)) {
  for (const auto& [name, tensor] : all)
    if (tensor.requires_grad())
      trained.push_back({.name = name,
                         .tensor = tensor,
                         .bytes = static_cast<std::size_t>(tensor.numel()) * tensor.element_size(),
                         .dtype = tensor.scalar_type(),
                         .device = tensor.device(),
                         .sparse = sparse.contains(tensor.unsafeGetTensorImpl())});
}

LOCKSTEP_INLINE void note_reduced(std::span<ParameterEntry> parameters) {
  for (ParameterEntry& parameter : parameters) parameter.reduced = parameter.version();
}

/// Returns whether a gradient that was written to counts as cleared: if it is all zeros, or lies on a device,
/// where reading the values would synchronize. Compares bytes, since an operator would allocate its result.
LOCKSTEP_INLINE bool counts_as_cleared(const at::Tensor& gradient) {
  if (!gradient.is_cpu() || gradient.layout() != at::kStrided || !gradient.is_non_overlapping_and_dense())
    return true;
  const auto* bytes = static_cast<const char*>(gradient.const_data_ptr());
  return gradient.numel() == 0 ||
         (bytes[0] == 0 && std::memcmp(bytes, bytes + 1, gradient.nbytes() - 1) == 0);
}

LOCKSTEP_INLINE void forget_cleared(std::span<ParameterEntry> parameters) {
  for (ParameterEntry& parameter : parameters) {
    const GradientVersion now = parameter.version();
    if (parameter.reduced == now) continue;
    const bool written = now.first && now.first == parameter.reduced.first;
    parameter.reduced = written && !counts_as_cleared(parameter.gradient()) ? now : GradientVersion{};
  }
}

LOCKSTEP_INLINE WatchedParameters::WatchedParameters(const ParameterTable& table,
                                                     std::vector<std::string> ignored)
    : table_(table), ignored_(std::move(ignored)) {
  for (const NamedTensor& parameter : table.all) known_.insert(parameter.tensor.unsafeGetTensorImpl());
}

LOCKSTEP_INLINE void WatchedParameters::require_equal_flags() const {
  auto entry = table_.trained.begin();
  for (const NamedTensor& parameter : table_.all) {
    const bool trained = entry != table_.trained.end() && entry->tensor.is_same(parameter.tensor);
    if (trained) ++entry;
    if (parameter.tensor.requires_grad() != trained)
      throw UsageError(detail::formatted(
          "parameter '{}' was {} after DistributedDataParallel was made, which averages the gradients of "
          "those that required grad then: construct it again, or with a Trainer do so between epochs",
          parameter.name, trained ? "frozen" : "unfrozen"));
  }
}

LOCKSTEP_INLINE bool WatchedParameters::finds_unknown_leaf(at::ArrayRef<at::Tensor> losses) {
  search_.run(losses);
  bool found = false;
  for (const torch::autograd::Node* end : search_.ends()) {
    const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(end);
    if (!leaf || known_.contains(leaf->variable.unsafeGetTensorImpl())) continue;
    if (unknown_leaves_.size() >= 1024) unknown_leaves_.clear();
    found = unknown_leaves_.emplace(leaf->variable.getIntrusivePtr()).second || found;
  }
  return found;
}

LOCKSTEP_INLINE void WatchedParameters::require_known(const std::vector<NamedTensor>& parameters) {
  for (const NamedTensor& parameter : parameters) {
    if (known_.contains(parameter.tensor.unsafeGetTensorImpl()) ||
        std::find(ignored_.begin(), ignored_.end(), parameter.name) != ignored_.end())
      continue;
    unknown_leaves_.clear();  // so that the next backward throws again
    listed_ = false;
    throw UsageError(detail::formatted(
        "parameter '{}' was added or replaced after DistributedDataParallel was made, so that its gradient "
        "would not be averaged: make DistributedDataParallel after the model is whole",
        parameter.name));
  }
}

}  // namespace lockstep::detail
