#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/grad/detail/autograd.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

/// Switches a model's floating-point parameters to a low-precision dtype for a step and back to their own
/// dtype afterwards. Changes the data of the module's own tensors, so the module needs no change.
///
/// After a change of dtype, autograd creates a new gradient accumulator for the same leaf. Each parameter
/// keeps the accumulators of both dtypes, so that the hooks on both stay in place.
class LowPrecisionParameters {
  struct Parameter {
    const NamedTensor* named;  // in the ParameterTable
    at::ScalarType own;
    Accumulator own_accumulator, low_precision_accumulator;  // null if it does not require grad
    at::Tensor full;            // the data in its own dtype, while it is low precision
    std::uint32_t version = 0;  // version counter of the low-precision data
  };

 public:
  /// `parameters` must outlive this object.
  LowPrecisionParameters(const std::vector<NamedTensor>& parameters, at::ScalarType type);
  LowPrecisionParameters(const LowPrecisionParameters&) = delete;
  LowPrecisionParameters& operator=(const LowPrecisionParameters&) = delete;
  ~LowPrecisionParameters() { restore(); }

  [[nodiscard]] bool active() const { return active_; }

  /// Makes the parameters low precision until `restore`. If they are low precision already, checks that they
  /// are unchanged. Throws UsageError that names the parameter, and changes nothing, if a parameter was
  /// modified while low precision, does not have its own dtype, or was frozen since construction and
  /// `backward_follows` is true.
  void cast(bool backward_follows);

  /// Restores the data in the parameters' own dtype. A no-op if they are not low precision.
  void restore();

  /// Calls `restore`, and casts low-precision gradients to the parameters' own dtype.
  void end_step();

  /// Checks the parameters before the backward of `losses`. Throws UsageError if a parameter has another
  /// dtype than in the forward of `losses`, or was modified while low precision.
  void check_backward(at::ArrayRef<at::Tensor> losses);

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
  static Accumulator accumulator_of(const at::Tensor& tensor);
  static std::uint32_t version_of(const at::Tensor& tensor);

  static void require_as_made(const Parameter& parameter, bool backward_follows);

  // LibTorch's optimizers write through `data()`, which does not bump the version: on CPUs, compare values.
  void require_unchanged(bool by_values) const;
  [[nodiscard]] bool differs(const Parameter& parameter) const;

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
    parameters.cast(/*backward_follows=*/false);
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
void cast_buffers(const std::vector<NamedTensor>& buffers, at::ScalarType type);

}  // namespace lockstep::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/grad/detail/low_precision_parameters-inl.hpp"
#endif
