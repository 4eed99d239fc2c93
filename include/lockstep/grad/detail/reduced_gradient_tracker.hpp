#pragma once

#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "lockstep/error.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

/// Remembers the gradients that a reduction has left, to know them again where nobody has touched them. They
/// are means already: what adds to them afterwards cannot be divided by a count any more.
class ReducedGradientTracker {
 public:
  void note(const std::vector<NamedTensor>& parameters) {
    left_.resize(parameters.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) left_[i] = state_of(parameters[i].tensor);
  }

  /// Before a backward: forgets those that somebody has cleared or replaced. One that was written to, such as
  /// by clipping, is a mean still, unless it was set to zeros; on a device, which would have to be waited
  /// for, it counts as cleared.
  void recognize(const std::vector<NamedTensor>& parameters) {
    for (std::size_t i = 0; i < left_.size(); ++i) {
      const at::Tensor& gradient = parameters[i].tensor.mutable_grad();
      const State now = state_of(parameters[i].tensor);
      if (left_[i] == now) continue;
      const bool written = gradient.defined() && gradient.unsafeGetTensorImpl() == left_[i].first;
      left_[i] = written && !counts_as_cleared(gradient) ? now : State{};
    }
  }

  /// After it: throws GradientError that names a parameter whose gradient was there still, and was added to,
  /// as `added(i)` tells.
  template <class Added>
  void require_untouched(const std::vector<NamedTensor>& parameters, Added&& added) const {
    for (std::size_t i = 0; i < left_.size(); ++i)
      if (left_[i].first && added(i))
        throw GradientError(fmt::format(
            "backward_sum found the gradient of parameter '{}' as the last reduction left it, a mean "
            "already, to which no sum can be added: call zero_grad between them, or put the first of them "
            "under no_sync",
            parameters[i].name));
  }

  /// Whether the gradient is not as the last reduction left it.
  [[nodiscard]] bool changed(const std::vector<NamedTensor>& parameters, std::size_t i) const {
    return left_[i] != state_of(parameters[i].tensor);
  }

 private:
  // All bytes of zeros are, and those of an operator's result would be memory of its own.
  static bool counts_as_cleared(const at::Tensor& gradient) {
    if (!gradient.is_cpu() || gradient.layout() != at::kStrided || !gradient.is_non_overlapping_and_dense())
      return true;
    const auto* bytes = static_cast<const char*>(gradient.const_data_ptr());
    return gradient.numel() == 0 ||
           (bytes[0] == 0 && std::memcmp(bytes, bytes + 1, gradient.nbytes() - 1) == 0);
  }

  using State = std::pair<const c10::TensorImpl*, std::int64_t>;
  // The tensor, and how often it was written to; null where there is none.
  static State state_of(const at::Tensor& parameter) {
    const at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) return {};
    return {gradient.unsafeGetTensorImpl(), gradient._version()};
  }

  std::vector<State> left_;
};

}  // namespace lockstep::detail
