#pragma once

#include <concepts>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

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

/// In which number format a step runs. One lives as long as its optimizer; the training loop calls it three
/// times a step, in this order:
///
/// 1. `forward(f)` runs `f()` - the model's forward and the loss, or an evaluation - in the precision's
///    context and returns its result unchanged; the context is left whatever `f` throws.
/// 2. `scale(loss)` gives the tensor that backward starts from. The gradients that backward accumulates are
///    those of this tensor, so that the reduction over the ranks sees them scaled alike.
/// 3. `step(optimizer)` undoes the scale in the gradients, which are reduced by now, and steps the optimizer.
///    It returns whether it stepped: false where the precision refused gradients that are not finite. The
///    answer is the same on every rank. Where only the device knows it so far, it is a StepOutcome, which
///    waits when it is asked.
///
/// Two more calls may come between 2 and 3 where it has them: `agree(optimizer, comm)`, collective, for
/// reductions that do not carry what is not finite to every rank; `unscale(optimizer)`, after which whoever
/// looks at the gradients sees the true ones; and in place of 3 `forget()`, where something threw. One that
/// has `save` and `load` is kept in checkpoints.
template <class P>
concept Precision = std::movable<P> && std::default_initializable<P> &&
    requires(P& precision, at::Tensor (*forward)(), const at::Tensor& loss,
             torch::optim::Optimizer& optimizer) {
  { precision.forward(forward) } -> std::same_as<at::Tensor>;
  { precision.scale(loss) } -> std::convertible_to<at::Tensor>;
  { precision.step(optimizer) } -> std::convertible_to<bool>;
};

/// One that scales losses, so that gradients are not the true ones before `unscale`.
template <class P>
concept ScalingPrecision = Precision<P> && requires(P& precision, torch::optim::Optimizer& optimizer) {
  precision.unscale(optimizer);
};

}  // namespace lockstep
