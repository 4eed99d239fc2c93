#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/autograd.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

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
  bool used = true;      ///< a rank has used it, as of the last usage exchange
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
  /// `sparse` holds the parameters whose gradients are sparse.
  ParameterTable(std::vector<NamedTensor> parameters,
                 const std::unordered_set<const c10::TensorImpl*>& sparse);
  ParameterTable(const ParameterTable&) = delete;
  ParameterTable(ParameterTable&&) = default;
  ParameterTable& operator=(const ParameterTable&) = delete;
  ParameterTable& operator=(ParameterTable&&) = default;

  std::vector<NamedTensor> all;         ///< in registration order
  std::vector<ParameterEntry> trained;  ///< those that require grad; the indices of buckets and reports
};

/// Records after a reduction which gradients hold an average. A later backward_sum must not add to them: its
/// sum is still to be divided by its count.
void note_reduced(std::span<ParameterEntry> parameters);

/// Forgets the averages that were cleared or replaced. Called before a backward. A gradient that was written
/// to, such as by clipping, still holds an average unless it is all zeros or lies on a device, where reading
/// it would synchronize.
void forget_cleared(std::span<ParameterEntry> parameters);

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

/// Detects parameters that were added, replaced, frozen or unfrozen after DistributedDataParallel was
/// constructed.
class WatchedParameters {
 public:
  /// `table` must outlive this object.
  WatchedParameters(const ParameterTable& table, std::vector<std::string> ignored);

  /// Checks the parameters before the backward of `losses`. Throws UsageError that names the parameter.
  /// `list` returns the current parameters of the model; it allocates, so it is called only at the first
  /// backward and when the losses depend on a leaf not seen before. Leaves that only a re-entrant backward
  /// reaches are not detected.
  template <class List>
  void check(at::ArrayRef<at::Tensor> losses, List&& list) {
    require_equal_flags();
    const bool unknown_leaf = finds_unknown_leaf(losses);
    if (!std::exchange(listed_, true) || unknown_leaf) require_known(list());
  }

 private:
  /// Throws UsageError if requires_grad of a parameter has changed.
  void require_equal_flags() const;
  /// Returns whether the losses depend on an unseen leaf that is not a parameter of the model, such as an
  /// input that requires grad. Each such leaf is reported once.
  bool finds_unknown_leaf(at::ArrayRef<at::Tensor> losses);
  /// Throws UsageError if a parameter is not in the table.
  void require_known(const std::vector<NamedTensor>& parameters);

  const ParameterTable& table_;
  std::vector<std::string> ignored_;
  std::unordered_set<const c10::TensorImpl*> known_;
  // Weak references, so that the address of a destroyed leaf is not reused by another tensor.
  std::unordered_set<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> unknown_leaves_;
  GraphSearch search_;
  bool listed_ = false;
};

}  // namespace lockstep::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/grad/detail/parameter_table-inl.hpp"
#endif
