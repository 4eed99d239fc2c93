#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

/// Detects gradients that still hold the previous reduction's averages. A sum that is accumulated into such
/// an average can no longer be divided by its count.
class ReducedGradientTracker {
 public:
  /// Records the gradients after a reduction.
  void note(const std::vector<NamedTensor>& parameters) {
    left_.resize(parameters.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) left_[i] = state_of(parameters[i].tensor);
  }

  /// Forgets, before a backward, the gradients that were cleared or replaced. A gradient that was written to,
  /// such as by clipping, still counts as an average unless it is all zeros. On a device, where reading the
  /// values would synchronize, a gradient that was written to counts as cleared.
  void recognize(const std::vector<NamedTensor>& parameters) {
    for (std::size_t i = 0; i < left_.size(); ++i) {
      const at::Tensor& gradient = parameters[i].tensor.mutable_grad();
      const State now = state_of(parameters[i].tensor);
      if (left_[i] == now) continue;
      const bool written = gradient.defined() && gradient.unsafeGetTensorImpl() == left_[i].first;
      left_[i] = written && !counts_as_cleared(gradient) ? now : State{};
    }
  }

  /// Throws GradientError, after the backward, that names a parameter whose gradient still held an average
  /// and was accumulated into. `added(i)` returns whether parameter i's gradient was.
  template <class Added>
  void require_untouched(const std::vector<NamedTensor>& parameters, Added&& added) const {
    for (std::size_t i = 0; i < left_.size(); ++i)
      if (left_[i].first && added(i))
        throw GradientError(detail::formatted(
            "backward_sum found the gradient of parameter '{}' as the last reduction left it, a mean "
            "already, to which no sum can be added: call zero_grad between them, or put the first of them "
            "under no_sync",
            parameters[i].name));
  }

  /// Returns whether parameter i's gradient was replaced or written to since it was recorded.
  [[nodiscard]] bool changed(const std::vector<NamedTensor>& parameters, std::size_t i) const {
    return left_[i] != state_of(parameters[i].tensor);
  }

 private:
  // Compares bytes, since an operator would allocate its result.
  static bool counts_as_cleared(const at::Tensor& gradient) {
    if (!gradient.is_cpu() || gradient.layout() != at::kStrided || !gradient.is_non_overlapping_and_dense())
      return true;
    const auto* bytes = static_cast<const char*>(gradient.const_data_ptr());
    return gradient.numel() == 0 ||
           (bytes[0] == 0 && std::memcmp(bytes, bytes + 1, gradient.nbytes() - 1) == 0);
  }

  using State = std::pair<const c10::TensorImpl*, std::int64_t>;
  // Returns the gradient's identity and version counter; null if it is undefined.
  static State state_of(const at::Tensor& parameter) {
    const at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) return {};
    return {gradient.unsafeGetTensorImpl(), gradient._version()};
  }

  std::vector<State> left_;
};

}  // namespace lockstep::detail
