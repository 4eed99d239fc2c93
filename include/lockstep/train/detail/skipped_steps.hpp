#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/precision/precision.hpp"

namespace lockstep::detail {

/// Counts the steps that a precision skipped, without synchronizing with the device that holds the outcome.
class SkippedSteps {
 public:
  SkippedSteps() = default;
  explicit SkippedSteps(std::int64_t before) : known_(before) {}

  void add(bool stepped) { known_ += stepped ? 0 : 1; }
  void add(const StepOutcome& outcome) {
    if (outcome.known()) return add(static_cast<bool>(outcome));
    const at::Tensor& one = outcome.found_inf();
    there_ = there_.defined() ? there_ + one.to(there_.device()) : one;
  }

  /// Returns the count. Synchronizes with the device if an outcome is known only there.
  [[nodiscard]] std::int64_t count() const {
    return known_ + (there_.defined() ? static_cast<std::int64_t>(there_.item<float>()) : 0);
  }

 private:
  std::int64_t known_ = 0;
  at::Tensor there_;
};

}  // namespace lockstep::detail
