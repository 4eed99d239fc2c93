#pragma once

#include <cstring>
#include <utility>

#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/low_precision_parameters.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE LowPrecisionParameters::LowPrecisionParameters(const std::vector<NamedTensor>& parameters,
                                                               at::ScalarType type)
    : type_(type) {
  for (const NamedTensor& parameter : parameters) {
    if (!parameter.tensor.is_floating_point() || parameter.tensor.scalar_type() == type) continue;
    parameters_.push_back(
        {&parameter, parameter.tensor.scalar_type(), accumulator_of(parameter.tensor), {}, {}});
  }
}

LOCKSTEP_INLINE void LowPrecisionParameters::cast(bool backward_follows) {
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
    if (parameter.low_precision_accumulator)
      set_accumulator(tensor, parameter.low_precision_accumulator);
    else
      parameter.low_precision_accumulator = accumulator_of(tensor);
    parameter.version = version_of(tensor);
  }
}

LOCKSTEP_INLINE void LowPrecisionParameters::restore() {
  if (!std::exchange(active_, false)) return;
  const c10::InferenceMode no_inference(false);
  for (Parameter& parameter : parameters_) {
    parameter.named->tensor.set_data(std::exchange(parameter.full, {}));
    if (parameter.own_accumulator) set_accumulator(parameter.named->tensor, parameter.own_accumulator);
  }
}

LOCKSTEP_INLINE void LowPrecisionParameters::end_step() {
  restore();
  for (const Parameter& parameter : parameters_)
    if (at::Tensor& grad = parameter.named->tensor.mutable_grad();
        grad.defined() && grad.scalar_type() == type_)
      grad = grad.to(parameter.own);
}

LOCKSTEP_INLINE void LowPrecisionParameters::check_backward(at::ArrayRef<at::Tensor> losses) {
  search_.run(losses);
  for (const Parameter& parameter : parameters_) {
    const Accumulator& other = active_ ? parameter.own_accumulator : parameter.low_precision_accumulator;
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

LOCKSTEP_INLINE Accumulator LowPrecisionParameters::accumulator_of(const at::Tensor& tensor) {
  return tensor.requires_grad() ? torch::autograd::impl::grad_accumulator(tensor) : Accumulator();
}

LOCKSTEP_INLINE std::uint32_t LowPrecisionParameters::version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

LOCKSTEP_INLINE void LowPrecisionParameters::require_as_made(const Parameter& parameter,
                                                             bool backward_follows) {
  const at::Tensor& tensor = parameter.named->tensor;
  if (tensor.scalar_type() != parameter.own)
    throw UsageError(detail::formatted(
        "parameter '{}' is {} and was {} when DistributedDataParallel was made with DdpOptions::param_dtype: "
        "convert the model before, and let one wrapper alone have that option",
        parameter.named->name, c10::toString(tensor.scalar_type()), c10::toString(parameter.own)));
  if (backward_follows && parameter.own_accumulator && !tensor.requires_grad())
    throw UsageError(detail::formatted(
        "parameter '{}' is frozen in a forward with grad mode, after DistributedDataParallel was made with "
        "DdpOptions::param_dtype, which cannot tell when that forward's step ends: freeze before, or use "
        "Bf16 or Fp16 instead of param_dtype",
        parameter.named->name));
}

LOCKSTEP_INLINE void LowPrecisionParameters::require_unchanged(bool by_values) const {
  for (const Parameter& parameter : parameters_) {
    const at::Tensor& tensor = parameter.named->tensor;
    if (version_of(tensor) == parameter.version && !(by_values && tensor.is_cpu() && differs(parameter)))
      continue;
    throw UsageError(detail::formatted(
        "parameter '{}' was changed while it was in the type of DdpOptions::param_dtype, between a forward "
        "and the end of its reduction, which would be lost: let the optimizer step after ddp.backward(loss), "
        "outside no_sync, and no forward change its parameters",
        parameter.named->name));
  }
}

LOCKSTEP_INLINE bool LowPrecisionParameters::differs(const Parameter& parameter) const {
  const at::Tensor held = parameter.full.to(type_).contiguous();
  const at::Tensor holds = parameter.named->tensor.detach().contiguous();
  return std::memcmp(held.const_data_ptr(), holds.const_data_ptr(), held.nbytes()) != 0;
}

LOCKSTEP_INLINE void cast_buffers(const std::vector<NamedTensor>& buffers, at::ScalarType type) {
  for (NamedTensor buffer : buffers)
    if (buffer.tensor.is_floating_point()) buffer.tensor.set_data(buffer.tensor.variable_data().to(type));
}

}  // namespace lockstep::detail
