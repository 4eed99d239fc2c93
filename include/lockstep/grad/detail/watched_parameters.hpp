#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/autograd.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

/// Detects parameters that were added, replaced, frozen or unfrozen after DistributedDataParallel was
/// constructed.
class WatchedParameters {
 public:
  /// `table` must outlive this object.
  WatchedParameters(const ParameterTable& table, std::vector<std::string> ignored)
      : table_(table), ignored_(std::move(ignored)) {
    for (const NamedTensor& parameter : table.all) known_.insert(parameter.tensor.unsafeGetTensorImpl());
  }

  /// Checks the parameters before the backward of `losses`. Throws UsageError that names the parameter.
  /// `list` returns the current parameters of the model; it allocates, so it is called only at the first
  /// backward and when the losses depend on a leaf not seen before. Leaves that only a re-entrant backward
  /// reaches are not detected.
  template <class List>
  void check(at::ArrayRef<at::Tensor> losses, List&& list) {
    auto entry = table_.trained.begin();
    for (const NamedTensor& parameter : table_.all) {
      const bool trained = entry != table_.trained.end() && entry->tensor.is_same(parameter.tensor);
      if (trained) ++entry;
      if (parameter.tensor.requires_grad() != trained)
        throw UsageError(detail::formatted(
            "parameter '{}' was {} after DistributedDataParallel was made, which averages the gradients of "
            "those that required grad then: make it anew",
            parameter.name, trained ? "frozen" : "unfrozen"));
    }
    const bool stranger = finds_stranger(losses);
    if (std::exchange(asked_, true) && !stranger) return;
    for (const NamedTensor& parameter : list())
      if (!known_.contains(parameter.tensor.unsafeGetTensorImpl()) &&
          std::find(ignored_.begin(), ignored_.end(), parameter.name) == ignored_.end()) {
        strangers_.clear();  // so that the next backward throws again
        asked_ = false;
        throw UsageError(detail::formatted(
            "parameter '{}' was added or replaced after DistributedDataParallel was made, so "
            "that its gradient "
            "would not be averaged: make DistributedDataParallel after the model is whole",
            parameter.name));
      }
  }

 private:
  // Returns whether the losses depend on an unseen leaf that is not a parameter of the model, such as an
  // input that requires grad. Each such leaf is reported once.
  bool finds_stranger(at::ArrayRef<at::Tensor> losses) {
    search_.run(losses);
    bool found = false;
    for (const torch::autograd::Node* end : search_.ends()) {
      const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(end);
      if (!leaf || known_.contains(leaf->variable.unsafeGetTensorImpl())) continue;
      if (strangers_.size() >= 1024) strangers_.clear();
      found = strangers_.emplace(leaf->variable.getIntrusivePtr()).second || found;
    }
    return found;
  }

  const ParameterTable& table_;
  std::vector<std::string> ignored_;
  std::unordered_set<const c10::TensorImpl*> known_;
  // Weak references, so that the address of a destroyed leaf is not reused by another tensor.
  std::unordered_set<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> strangers_;
  GraphSearch search_;
  bool asked_ = false;
};

}  // namespace lockstep::detail
