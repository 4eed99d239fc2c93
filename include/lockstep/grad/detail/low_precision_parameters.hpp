#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/autograd.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

/// Switches a model's floating-point parameters to a low-precision dtype for a step and back to their own
/// dtype afterwards. Changes the data of the module's own tensors, so the module needs no change.
///
/// Autograd treats a leaf of another dtype as another leaf. Each parameter keeps both of its accumulators,
/// and with them the hooks on both.
class LowPrecisionParameters {
  struct Parameter {
    const NamedTensor* named;  // in the ParameterTable
    at::ScalarType own;
    Accumulator of_own, of_short;  // null if it does not require grad
    at::Tensor full;               // the data in its own dtype, while it is low precision
    std::uint32_t version = 0;     // version counter of the low-precision data
  };

 public:
  /// `parameters` must outlive this object.
  LowPrecisionParameters(const std::vector<NamedTensor>& parameters, at::ScalarType type) : type_(type) {
    for (const NamedTensor& parameter : parameters) {
      if (!parameter.tensor.is_floating_point() || parameter.tensor.scalar_type() == type) continue;
      parameters_.push_back(
          {&parameter, parameter.tensor.scalar_type(), accumulator_of(parameter.tensor), {}, {}});
    }
  }
  LowPrecisionParameters(const LowPrecisionParameters&) = delete;
  LowPrecisionParameters& operator=(const LowPrecisionParameters&) = delete;
  ~LowPrecisionParameters() { restore(); }

  [[nodiscard]] bool active() const { return active_; }

  /// Makes the parameters low precision until `restore`. If they are low precision already, checks that they
  /// are unchanged. Throws UsageError that names the parameter, and changes nothing, if a parameter was
  /// modified while low precision, does not have its own dtype, or was frozen since construction and
  /// `backward_follows` is true.
  void shorten(bool backward_follows) {
    if (active_) return require_unchanged(true);
    const c10::InferenceMode no_inference(false);
    std::vector<at::Tensor> low_precision;
    low_precision.reserve(parameters_.size());
    for (Parameter& parameter : parameters_) {
      require_as_made(parameter, backward_follows);
      parameter.full = parameter.named->tensor.variable_data();
      low_precision.push_back(parameter.full.to(type_));
    }
    active_ = true;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      Parameter& parameter = parameters_[i];
      const at::Tensor& tensor = parameter.named->tensor;
      tensor.set_data(low_precision[i]);
      if (parameter.of_short)
        set_accumulator(tensor, parameter.of_short);
      else
        parameter.of_short = accumulator_of(tensor);
      parameter.version = version_of(tensor);
    }
  }

  /// Restores the data in the parameters' own dtype. A no-op if they are not low precision.
  void restore() {
    if (!std::exchange(active_, false)) return;
    const c10::InferenceMode no_inference(false);
    for (Parameter& parameter : parameters_) {
      parameter.named->tensor.set_data(std::exchange(parameter.full, {}));
      if (parameter.of_own) set_accumulator(parameter.named->tensor, parameter.of_own);
    }
  }

  /// Calls `restore`, and casts low-precision gradients to the parameters' own dtype.
  void end_step() {
    restore();
    for (const Parameter& parameter : parameters_)
      if (at::Tensor& grad = parameter.named->tensor.mutable_grad();
          grad.defined() && grad.scalar_type() == type_)
        grad = grad.to(parameter.own);
  }

  /// Checks the parameters before the backward of `losses`. Throws UsageError if a parameter has another
  /// dtype than in the forward of `losses`, or was modified while low precision.
  void check_backward(at::ArrayRef<at::Tensor> losses) {
    search_.run(losses);
    for (const Parameter& parameter : parameters_) {
      const Accumulator& other = active_ ? parameter.of_own : parameter.of_short;
      if (!other || !search_.reached(&*other)) continue;
      throw UsageError(
          active_ ? detail::formatted(
                        "parameter '{}' took part in the forward in its own type, and is in that of "
                        "DdpOptions::param_dtype now: call ddp(x), or before_forward(), before each forward",
                        parameter.named->name)
                  : detail::formatted(
                        "parameter '{}' took part in the forward in the type of DdpOptions::param_dtype, and "
                        "is in its own again, since another backward or forget() has ended that step: call "
                        "ddp.backward once for each forward, before the next one, or under no_sync",
                        parameter.named->name));
    }
    if (active_) require_unchanged(false);
  }

  /// The type of a forward argument: `input` casts floating-point tensors to the low-precision dtype and
  /// forwards everything else unchanged.
  template <class T>
  using Input = std::conditional_t<std::same_as<std::remove_cvref_t<T>, at::Tensor>, at::Tensor, T&&>;
  template <class T>
  [[nodiscard]] Input<T> input(T&& given) const {
    if constexpr (std::same_as<std::remove_cvref_t<T>, at::Tensor>)
      return given.defined() && given.is_floating_point() ? given.to(type_) : given;
    else
      return std::forward<T>(given);
  }

 private:
  static Accumulator accumulator_of(const at::Tensor& tensor) {
    return tensor.requires_grad() ? torch::autograd::impl::grad_accumulator(tensor) : Accumulator();
  }
  static std::uint32_t version_of(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->version_counter().current_version();
  }

  static void require_as_made(const Parameter& parameter, bool backward_follows) {
    const at::Tensor& tensor = parameter.named->tensor;
    if (tensor.scalar_type() != parameter.own)
      throw UsageError(detail::formatted(
          "parameter '{}' is {} and was {} when DistributedDataParallel was made with "
          "DdpOptions::param_dtype: "
          "convert the model before, and let one wrapper alone have that option",
          parameter.named->name, c10::toString(tensor.scalar_type()), c10::toString(parameter.own)));
    if (backward_follows && parameter.of_own && !tensor.requires_grad())
      throw UsageError(detail::formatted(
          "parameter '{}' is frozen in a forward with grad mode, after DistributedDataParallel was made with "
          "DdpOptions::param_dtype, which cannot tell when that forward's step ends: freeze before, or leave "
          "param_dtype and take Bf16 or Fp16",
          parameter.named->name));
  }

  // LibTorch's optimizers write through `data()`, which does not bump the version: on CPUs, compare values.
  void require_unchanged(bool by_values) const {
    for (const Parameter& parameter : parameters_) {
      const at::Tensor& tensor = parameter.named->tensor;
      if (version_of(tensor) == parameter.version && !(by_values && tensor.is_cpu() && differs(parameter)))
        continue;
      throw UsageError(detail::formatted(
          "parameter '{}' was changed while it was in the type of DdpOptions::param_dtype, between a forward "
          "and "
          "the end of its reduction, which would be lost: let the optimizer step after ddp.backward(loss), "
          "outside no_sync, and no forward change its parameters",
          parameter.named->name));
    }
  }
  [[nodiscard]] bool differs(const Parameter& parameter) const {
    const at::Tensor held = parameter.full.to(type_).contiguous();
    const at::Tensor holds = parameter.named->tensor.detach().contiguous();
    return std::memcmp(held.const_data_ptr(), holds.const_data_ptr(), held.nbytes()) != 0;
  }

  at::ScalarType type_;
  std::vector<Parameter> parameters_;
  GraphSearch search_;
  bool active_ = false;
};

/// Makes the parameters low precision in a scope, if they are not already. Registers no hooks on their
/// gradients: for forwards without grad mode only.
class LowPrecisionScope {
 public:
  explicit LowPrecisionScope(LowPrecisionParameters& parameters) {
    if (parameters.active()) return;
    parameters.shorten(/*backward_follows=*/false);
    parameters_ = &parameters;
  }
  LowPrecisionScope(const LowPrecisionScope&) = delete;
  LowPrecisionScope& operator=(const LowPrecisionScope&) = delete;
  ~LowPrecisionScope() {
    if (parameters_) parameters_->restore();
  }

 private:
  LowPrecisionParameters* parameters_ = nullptr;
};

/// Casts floating-point buffers to `type` in place.
inline void cast_buffers(const std::vector<NamedTensor>& buffers, at::ScalarType type) {
  for (NamedTensor buffer : buffers)
    if (buffer.tensor.is_floating_point()) buffer.tensor.set_data(buffer.tensor.variable_data().to(type));
}

}  // namespace lockstep::detail
