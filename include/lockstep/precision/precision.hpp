#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// Enables autocast to `dtype` on this thread in a scope, on the CPU and the GPU, if there is one. Cached
/// casts of parameters live until the outermost of nested scopes ends, or a scope of another dtype begins or
/// ends: LibTorch would reuse casts to the wrong dtype. Counterpart: torch.autocast.
class AutocastScope {
 public:
  explicit AutocastScope(at::ScalarType dtype) {
    for (std::size_t i = 0; i < before_.size(); ++i) {
      before_[i] = {at::autocast::is_autocast_enabled(devices[i]),
                    at::autocast::get_autocast_dtype(devices[i])};
      if (!reaches(devices[i])) continue;
      other_dtype_ = other_dtype_ || (before_[i].enabled && before_[i].dtype != dtype);
      at::autocast::set_autocast_enabled(devices[i], true);
      at::autocast::set_autocast_dtype(devices[i], dtype);
    }
    at::autocast::increment_nesting();
    if (other_dtype_) at::autocast::clear_cache();
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;
  ~AutocastScope() {
    if (at::autocast::decrement_nesting() == 0 || other_dtype_) at::autocast::clear_cache();
    for (std::size_t i = 0; i < before_.size(); ++i) {
      if (!reaches(devices[i])) continue;
      at::autocast::set_autocast_enabled(devices[i], before_[i].enabled);
      at::autocast::set_autocast_dtype(devices[i], before_[i].dtype);
    }
  }

 private:
  static constexpr std::array devices{at::kCPU, at::kCUDA};
  static bool reaches(at::DeviceType device) { return device == at::kCPU || at::hasCUDA(); }

  struct Before {
    bool enabled;
    at::ScalarType dtype;
  };
  std::array<Before, devices.size()> before_{};
  bool other_dtype_ = false;  // the enclosing scope has another dtype
};

}  // namespace lockstep::detail

namespace lockstep {

/// The arguments that a GradScaler passes to a step: gradients are divided by `scale`, and the step is
/// skipped if `found_inf` is 1. Each has one element, or is undefined.
struct StepScale {
  at::Tensor scale, found_inf;

  [[nodiscard]] bool given() const { return scale.defined() || found_inf.defined(); }
  /// Returns a copy on `device`. Does not block the host.
  [[nodiscard]] StepScale on(const at::Device& device) const {
    const auto there = [&](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.to(device, tensor.scalar_type(), /*non_blocking=*/true) : tensor;
    };
    return {there(scale), there(found_inf)};
  }
};

/// An optimizer whose step divides the gradients by a scaler's scale and decides on the device whether to
/// skip. It does not synchronize with the device and needs no separate pass to unscale. A class derives from
/// this and from torch::optim::Optimizer; GradScaler then uses it.
class ScaledStep {
 public:
  /// Returns whether the current options allow `step_scaled`.
  [[nodiscard]] virtual bool takes_scale() = 0;
  /// Steps with divided gradients. If `found_inf` is 1, leaves parameters, states and step counts unchanged.
  virtual void step_scaled(const StepScale& scale) = 0;

 protected:
  ScaledStep() = default;
  ScaledStep(const ScaledStep&) = default;
  ScaledStep& operator=(const ScaledStep&) = default;
  ~ScaledStep() = default;
};

/// The outcome of a step: made or skipped. Only the device may know it; querying it then synchronizes.
class StepOutcome {
 public:
  StepOutcome(bool stepped) : stepped_(stepped) {}  // NOLINT(google-explicit-constructor): it is just that
  /// Constructs the outcome of a step that is skipped if the one-element `found_inf` is not 0.
  explicit StepOutcome(at::Tensor found_inf) : found_inf_(std::move(found_inf)) {}

  /// Returns whether the host knows the outcome, so that querying it does not block.
  [[nodiscard]] bool known() const { return !found_inf_.defined(); }
  /// Returns whether the step was made. Synchronizes with the device unless `known()`.
  operator bool() const {  // NOLINT(google-explicit-constructor)
    return known() ? stepped_ : found_inf_.item<float>() == 0;
  }
  /// Returns one element, 0 or 1: whether the step was skipped. Undefined if the host knows the outcome.
  [[nodiscard]] const at::Tensor& found_inf() const { return found_inf_; }

 private:
  bool stepped_ = false;
  at::Tensor found_inf_;
};

/// The number format of a training step. An instance lives as long as its optimizer. The training loop calls
/// it three times per step, in this order:
///
/// 1. `forward(f)` runs `f()` (the model's forward and the loss, or an evaluation) in the precision's context
///    and returns its result unchanged. It leaves the context even if `f` throws.
/// 2. `scale(loss)` returns the tensor from which backward starts. Backward accumulates the gradients of this
///    tensor, so the reduction over the ranks sees gradients of equal scale.
/// 3. `step(optimizer)` unscales the reduced gradients and steps the optimizer. It returns whether it
///    stepped: false if the gradients are not finite. The result is the same on every rank. If only the
///    device knows it, it is a StepOutcome, which synchronizes when queried.
///
/// Optional members: `agree(optimizer, comm)`, a collective between 2 and 3, for reductions that do not
/// propagate infinities and NaN to every rank; `unscale(optimizer)` between 2 and 3, after which the
/// gradients are unscaled; `forget()` in place of 3, if something threw; `save` and `load`, with which
/// checkpoints store the precision.
template <class P>
concept Precision = std::movable<P> && std::default_initializable<P> &&
    requires(P& precision, at::Tensor (*forward)(), const at::Tensor& loss,
             torch::optim::Optimizer& optimizer) {
  { precision.forward(forward) } -> std::same_as<at::Tensor>;
  { precision.scale(loss) } -> std::convertible_to<at::Tensor>;
  { precision.step(optimizer) } -> std::convertible_to<bool>;
};

/// A Precision that scales losses: gradients are scaled until `unscale`.
template <class P>
concept ScalingPrecision = Precision<P> && requires(P& precision, torch::optim::Optimizer& optimizer) {
  precision.unscale(optimizer);
};

/// Runs everything in the parameters' own dtype, without context and without loss scaling. Compiles to
/// nothing.
struct Fp32 {
  /// CapturedStep can capture it.
  static constexpr bool capturable = true;

  template <class Forward>
  decltype(auto) forward(Forward&& forward) const {
    return std::forward<Forward>(forward)();
  }

  const at::Tensor& scale(const at::Tensor& loss) const { return loss; }

  bool step(torch::optim::Optimizer& optimizer) const {
    optimizer.step();
    return true;
  }
};

/// Runs the forward in bfloat16 where autocast supports it; parameters, gradients and the optimizer step keep
/// their own dtype. Needs no loss scaling: bfloat16 has the range of float32. Counterpart:
/// torch.autocast(dtype=torch.bfloat16).
struct Bf16 : Fp32 {
  template <class Forward>
  decltype(auto) forward(Forward&& forward) const {
    const detail::AutocastScope scope(at::kBFloat16);
    return std::forward<Forward>(forward)();
  }
};

/// A scope in which products of float32 tensors may round their factors to TensorFloat-32 (10 bits of
/// mantissa, sums in float32), in the whole process. The destructor restores the previous settings of
/// LibTorch:
///
/// - matrix products, as by `torch.set_float32_matmul_precision("high")`: cuBLAS on a GPU; on a CPU oneDNN,
///   which uses it on processors with such units (AMX) and computes in float32 elsewhere;
/// - convolutions and recurrent layers on a GPU, as by `torch.backends.cudnn.allow_tf32 = True`, which is
///   LibTorch's default.
///
/// Destroy scopes in reverse order of construction. Throws UsageError if LibTorch's settings of single
/// backends contradict each other, since they could not be restored.
class Tf32Scope {
 public:
  Tf32Scope() try
      : matmul_(name_of(at::globalContext().float32MatmulPrecision())),
        cudnn_(at::globalContext().allowTF32CuDNN()) {
    at::globalContext().setFloat32MatmulPrecision("high");
    at::globalContext().setAllowTF32CuDNN(true);
  } catch (const c10::Error& error) {
    throw UsageError(detail::formatted(
        "Tf32: LibTorch's float32 settings of single backends contradict each other, and could "
        "not be put back: leave them as they are ({})",
        error.what_without_backtrace()));
  }
  Tf32Scope(const Tf32Scope&) = delete;
  Tf32Scope& operator=(const Tf32Scope&) = delete;
  ~Tf32Scope() {
    at::globalContext().setFloat32MatmulPrecision(matmul_);
    at::globalContext().setAllowTF32CuDNN(cudnn_);
  }

 private:
  static const char* name_of(at::Float32MatmulPrecision precision) {
    switch (precision) {
      case at::Float32MatmulPrecision::HIGH:
        return "high";
      case at::Float32MatmulPrecision::MEDIUM:
        return "medium";
      default:
        return "highest";
    }
  }

  std::string matmul_;
  bool cudnn_;
};

/// Runs the forward, and from `scale` to `step` the backward and its reduction, with TensorFloat-32 allowed;
/// the optimizer step is in float32. See Tf32Scope for its effect on each device. Needs no loss scaling: the
/// range is that of float32.
class Tf32 {
 public:
  /// CapturedStep can capture it.
  static constexpr bool capturable = true;

  template <class Forward>
  decltype(auto) forward(Forward&& forward) const {
    const Tf32Scope scope;
    return std::forward<Forward>(forward)();
  }

  const at::Tensor& scale(const at::Tensor& loss) {
    if (!backward_) backward_ = std::make_unique<Tf32Scope>();
    return loss;
  }

  bool step(torch::optim::Optimizer& optimizer) {
    backward_.reset();
    optimizer.step();
    return true;
  }

  /// Leaves the scope of an abandoned backward.
  void forget() { backward_.reset(); }

 private:
  std::unique_ptr<Tf32Scope> backward_;
};

}  // namespace lockstep
