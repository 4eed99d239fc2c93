#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace lockstep {

/// What a GradScaler hands to a step: the gradients are divided by `scale`, and nothing is stepped where
/// `found_inf` is 1. Each one element, or undefined.
struct StepScale {
  at::Tensor scale, found_inf;

  [[nodiscard]] bool given() const { return scale.defined() || found_inf.defined(); }
  /// The same on `device`, copied without a wait where it is another.
  [[nodiscard]] StepScale on(const at::Device& device) const {
    const auto there = [&](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.to(device, tensor.scalar_type(), /*non_blocking=*/true) : tensor;
    };
    return {there(scale), there(found_inf)};
  }
};

/// An optimizer whose step itself divides the gradients by a scaler's scale, and finds on the device whether
/// it is to be left out: nothing waits for the device, and no gradient is read or written once more for the
/// division. A class derives from this beside torch::optim::Optimizer, and GradScaler then uses it.
class ScaledStep {
 public:
  /// Whether `step_scaled` can be called with the options as they are now.
  [[nodiscard]] virtual bool takes_scale() = 0;
  /// A step with divided gradients, or where `found_inf` is 1 none: parameters, states and counts of steps
  /// are then as they were.
  virtual void step_scaled(const StepScale& scale) = 0;

 protected:
  ScaledStep() = default;
  ScaledStep(const ScaledStep&) = default;
  ScaledStep& operator=(const ScaledStep&) = default;
  ~ScaledStep() = default;
};

/// Whether a step was made, which only the device may know so far.
class StepOutcome {
 public:
  StepOutcome(bool stepped) : stepped_(stepped) {}  // NOLINT(google-explicit-constructor): it is just that
  /// Left out where `found_inf`, of one element, is not 0.
  explicit StepOutcome(at::Tensor found_inf) : found_inf_(std::move(found_inf)) {}

  /// Whether the host knows it, so that asking does not wait.
  [[nodiscard]] bool known() const { return !found_inf_.defined(); }
  /// Whether the step was made; waits for the device where only that knows.
  operator bool() const {  // NOLINT(google-explicit-constructor)
    return known() ? stepped_ : found_inf_.item<float>() == 0;
  }
  /// One element, 0 or 1, that says whether it was left out; undefined where the host knows.
  [[nodiscard]] const at::Tensor& found_inf() const { return found_inf_; }

 private:
  bool stepped_ = false;
  at::Tensor found_inf_;
};

}  // namespace lockstep
