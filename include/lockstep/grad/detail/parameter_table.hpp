#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/autograd.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::inline v0_1::detail {

/// The identity and the version counter of a gradient; null if it is undefined.
using GradientVersion = std::pair<const c10::TensorImpl*, std::int64_t>;

/// A parameter that requires grad, and the state that DistributedDataParallel keeps for it.
struct ParameterEntry {
  // The parameter at construction: a later conversion of the model must not change the buckets.
  std::string_view name;
  at::Tensor tensor;
  std::size_t bytes = 0;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  bool sparse = false;  ///< its gradients are sparse

  // Its place in the buckets, until they are rebuilt.
  std::size_t bucket = 0;
  at::Tensor view = {};       ///< the bucket view of its gradient; undefined if that is sparse
  at::Tensor adoptable = {};  ///< the gradient that the next rebuild may move into the new bucket view

  // The state of the reduction.
  bool seen = false;     ///< a backward has reached it since the last reduction, also under no_sync
  bool copied = false;   ///< its gradient has been copied into its bucket
  bool divided = false;  ///< Python divides its gradient, and multiplies others by the reciprocal
  bool used = true;      ///< a rank has used it, as of the last usage exchange
  bool skipped = false;  ///< no rank has used it in the first reduction, and none may (DdpOptions)
  int fired = 0;         ///< calls of its accumulate hook so far
  int expected = 0;      ///< calls of its accumulate hook in each reduction, once the Reducer knows
  at::Tensor rows = {};  ///< this rank's contribution to a sparse sum
  at::Tensor sum = {};   ///< the sum of a sparse gradient over the ranks

  GradientVersion reduced = {};  ///< the gradient that holds the previous reduction's average

  [[nodiscard]] at::Tensor& gradient() const { return tensor.mutable_grad(); }
  [[nodiscard]] GradientVersion version() const {
    const at::Tensor& now = gradient();
    if (!now.defined()) return {};
    return {now.unsafeGetTensorImpl(), now._version()};
  }
};

/// The parameters of a wrapped model. The entries' names point into `all`: a table is moved, never copied.
struct ParameterTable {
  ParameterTable() = default;
  ParameterTable(std::vector<NamedTensor> parameters,
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
  ParameterTable(const ParameterTable&) = delete;
  ParameterTable(ParameterTable&&) = default;
  ParameterTable& operator=(const ParameterTable&) = delete;
  ParameterTable& operator=(ParameterTable&&) = default;

  /// Calls `function(parameter, entry)` for each parameter, with a null entry for one that did not require grad.
  template <class Function>
  void each(Function&& function) const {
    auto entry = trained.begin();
    for (const NamedTensor& parameter : all) {
      const bool has_entry = entry != trained.end() && entry->tensor.is_same(parameter.tensor);
      function(parameter, has_entry ? &*entry++ : nullptr);
    }
  }

  std::vector<NamedTensor> all;         ///< in registration order
  std::vector<ParameterEntry> trained;  ///< those that require grad; the indices of buckets and reports
};

/// Records which gradients hold an average, to which backward_sum must not add.
inline void note_reduced(std::span<ParameterEntry> parameters) {
  for (ParameterEntry& parameter : parameters) parameter.reduced = parameter.version();
}

/// Returns whether a gradient that was written to counts as cleared: if it is all zeros, or lies on a device,
/// where reading the values would synchronize. Compares bytes, since an operator would allocate its result.
inline bool counts_as_cleared(const at::Tensor& gradient) {
  if (!gradient.is_cpu() || gradient.layout() != at::kStrided || !gradient.is_non_overlapping_and_dense())
    return true;
  const auto* bytes = static_cast<const char*>(gradient.const_data_ptr());
  return gradient.numel() == 0 ||
         (bytes[0] == 0 && std::memcmp(bytes, bytes + 1, gradient.nbytes() - 1) == 0);
}

/// Forgets the averages that were cleared or replaced. Called before a backward. A gradient that was written
/// to, such as by clipping, still holds an average unless it is all zeros or lies on a device, where reading
/// it would synchronize.
inline void forget_cleared(std::span<ParameterEntry> parameters) {
  for (ParameterEntry& parameter : parameters) {
    const GradientVersion now = parameter.version();
    if (parameter.reduced == now) continue;
    const bool written = now.first && now.first == parameter.reduced.first;
    parameter.reduced = written && !counts_as_cleared(parameter.gradient()) ? now : GradientVersion{};
  }
}

/// Throws GradientError with the name of a parameter if a backward has added to a gradient that held an
/// average. Called after the backward. `added(i)` returns whether it has added to parameter i's gradient.
template <class Added>
void require_no_average(std::span<const ParameterEntry> parameters, Added&& added) {
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].reduced.first && added(i))
      throw GradientError(detail::formatted(
          "backward_sum found that the gradient of parameter '{}' still holds the previous reduction's "
          "average: call zero_grad before it, or put the earlier backward under no_sync",
          parameters[i].name));
}

/// Detects parameters that were added, replaced, frozen or unfrozen after DistributedDataParallel was constructed.
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
  /// reaches are not detected. `superseded` returns whether a newer wrapper of the parameters is alive.
  template <class List, class Superseded>
  void check(at::ArrayRef<at::Tensor> losses, List&& list, Superseded&& superseded) {
    require_equal_flags(superseded);
    const bool unknown_leaf = finds_unknown_leaf(losses);
    if (!std::exchange(listed_, true) || unknown_leaf) require_known(list());
  }

 private:
  template <class Superseded>
  void require_equal_flags(Superseded&& superseded) const {
    table_.each([&](const NamedTensor& parameter, const ParameterEntry* trained) {
      if (parameter.tensor.requires_grad() != (trained != nullptr))
        throw UsageError(detail::formatted(
            "parameter '{}' was {} after DistributedDataParallel was made, which averages the gradients of "
            "those that required grad then: {}",
            parameter.name, trained ? "frozen" : "unfrozen",
            superseded()
                ? "this one is out of date, and a newer one of the same parameters is alive: use that "
                  "one, and destroy this one"
                : "construct it again, or with a Trainer do so between epochs"));
    });
  }
  /// Returns whether the losses depend on an unseen leaf that is not a parameter of the model, such as an
  /// input that requires grad. Each such leaf is reported once.
  bool finds_unknown_leaf(at::ArrayRef<at::Tensor> losses) {
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
  void require_known(const std::vector<NamedTensor>& parameters) {
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

  const ParameterTable& table_;
  std::vector<std::string> ignored_;
  std::unordered_set<const c10::TensorImpl*> known_;
  // Weak references, so that the address of a destroyed leaf is not reused by another tensor.
  std::unordered_set<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> unknown_leaves_;
  GraphSearch search_;
  bool listed_ = false;
};

}  // namespace lockstep::inline v0_1::detail
