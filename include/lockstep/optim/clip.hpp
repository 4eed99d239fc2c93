#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/utils/ParamsHash.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <torch/nn/module.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::inline v0_1 {

struct ClipOptions {
  double norm_type = 2;  ///< any number above 0, or infinity for the largest absolute value
  /// Throw GradientError with the name of a parameter if the norm is NaN or infinite. Synchronizes with the device.
  bool error_if_nonfinite = false;
};

namespace detail {

inline const at::Tensor& tensor_of(const at::Tensor& parameter) {
  return parameter;
}
inline const at::Tensor& tensor_of(const NamedTensor& parameter) {
  return parameter.tensor;
}
inline std::string name_of(const std::vector<at::Tensor>&, std::size_t index) {
  return detail::formatted("parameter {}", index);
}
inline std::string name_of(const std::vector<NamedTensor>& parameters, std::size_t index) {
  return detail::formatted("'{}'", parameters[index].name);
}

template <class Parameters>
std::vector<at::Tensor> dense_gradients(const char* what, const Parameters& parameters) {
  std::vector<at::Tensor> gradients;
  gradients.reserve(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& gradient = tensor_of(parameters[i]).grad();
    if (!gradient.defined()) continue;
    if (gradient.is_sparse())
      throw GradientError(detail::formatted("{}: the gradient of {} is sparse: leave that parameter out",
                                            what, name_of(parameters, i)));
    gradients.push_back(gradient);
  }
  return gradients;
}

template <class Parameters>
[[noreturn]] void refuse_norm(const Parameters& parameters, double norm) {
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (const at::Tensor& gradient = tensor_of(parameters[i]).grad();
        gradient.defined() && !at::isfinite(gradient).all().template item<bool>())
      throw GradientError(
          detail::formatted("the norm of the gradients is {}: the gradient of {} holds values that are "
                            "not finite; lower the learning rate, or skip this step",
                            norm, name_of(parameters, i)));
  throw GradientError(
      detail::formatted("the norm of the gradients is {}, though each value is finite: their squares "
                        "overflow; lower the learning rate, or skip this step",
                        norm));
}

/// Calls `work` on the tensors of each device and dtype, in the iteration order of Python's map. The order
/// determines the bits of the total norm.
template <class Work>
void each_kind_in_order(const std::vector<at::Tensor>& tensors, Work&& work) {
  bool alike = true;
  for (const at::Tensor& tensor : tensors)
    alike =
        alike && tensor.scalar_type() == tensors[0].scalar_type() && tensor.device() == tensors[0].device();
  if (alike) return work(tensors);
  using Kind = std::pair<at::Device, at::ScalarType>;
  std::unordered_map<Kind, std::vector<at::Tensor>, at::native::ParamsHash<Kind>> kinds;
  for (const at::Tensor& tensor : tensors) kinds[{tensor.device(), tensor.scalar_type()}].push_back(tensor);
  for (const auto& kind : kinds) work(kind.second);
}

}  // namespace detail

/// Returns the norm of all gradients as if they were one vector: one element on the first gradient's device, 0 for an
/// empty list. Does not synchronize with the device. Throws UsageError if `norm_type` is not above 0.
///
/// Counterpart: torch.nn.utils.get_total_norm.
inline at::Tensor total_norm(const std::vector<at::Tensor>& gradients, double norm_type = 2) {
  const at::NoGradGuard no_grad;
  if (!(norm_type > 0))
    throw UsageError(
        detail::formatted("a norm of type {}: give 2, another number above 0, or infinity", norm_type));
  if (gradients.empty()) return at::scalar_tensor(0.0);
  std::vector<at::Tensor> norms;
  detail::each_kind_in_order(gradients, [&](const std::vector<at::Tensor>& group) {
    for (at::Tensor& norm : at::_foreach_norm(group, norm_type))
      norms.push_back(norm.to(gradients[0].device()));
  });
  return at::linalg_vector_norm(at::stack(norms), norm_type);
}

namespace detail {

template <class Parameters>
at::Tensor clip_norm(const Parameters& parameters, double max_norm, const ClipOptions& options) {
  const at::NoGradGuard no_grad;
  if (!(max_norm >= 0))
    throw UsageError(detail::formatted("clip_grad_norm: a norm of {} at most: give 0 or more", max_norm));
  const auto gradients = dense_gradients("clip_grad_norm", parameters);
  const at::Tensor norm = total_norm(gradients, options.norm_type);
  if (options.error_if_nonfinite && !at::isfinite(norm).item<bool>())
    refuse_norm(parameters, norm.item<double>());
  if (gradients.empty()) return norm;
  // Python divides a number by a tensor in these two steps.
  const at::Tensor factor = at::clamp(at::reciprocal(norm + 1e-6) * max_norm, std::nullopt, 1.0);
  each_kind_in_order(gradients, [&](const std::vector<at::Tensor>& group) {
    at::_foreach_mul_(group, factor.to(group[0].device()));
  });
  return norm;
}

template <class Parameters>
void clip_value(const Parameters& parameters, double largest) {
  const at::NoGradGuard no_grad;
  if (!(largest >= 0))
    throw UsageError(detail::formatted("clip_grad_value: values of {} at most: give 0 or more", largest));
  const auto gradients = dense_gradients("clip_grad_value", parameters);
  if (gradients.empty()) return;
  each_kind_in_order(gradients, [&](const std::vector<at::Tensor>& group) {
    at::_foreach_clamp_min_(group, -largest);
    at::_foreach_clamp_max_(group, largest);
  });
}

}  // namespace detail

/// Clips the gradients so that their total norm is at most `max_norm`. Returns the norm before clipping (see
/// total_norm). Bitwise equal to Python's.
///
/// After `ddp.backward` gradients are equal on all ranks, so the norm is the same on every rank without a
/// collective. With gradient accumulation, call it once, after the last micro-batch. Unscale the gradients of
/// half precision first. Throws GradientError if a gradient is sparse, UsageError if `max_norm` is negative.
///
/// Counterpart: torch.nn.utils.clip_grad_norm_.
inline at::Tensor clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm,
                                 const ClipOptions& options = {}) {
  return detail::clip_norm(parameters, max_norm, options);
}
/// A tied parameter counts once. Errors name the parameters.
inline at::Tensor clip_grad_norm(const torch::nn::Module& module, double max_norm,
                                 const ClipOptions& options = {}) {
  return detail::clip_norm(unique_parameters(module), max_norm, options);
}

/// Clamps every value of the gradients to [-clip_value, clip_value]. Throws GradientError if a gradient is
/// sparse, UsageError if `clip_value` is negative. Counterpart: torch.nn.utils.clip_grad_value_.
inline void clip_grad_value(const std::vector<at::Tensor>& parameters, double clip_value) {
  detail::clip_value(parameters, clip_value);
}
/// A tied parameter counts once.
inline void clip_grad_value(const torch::nn::Module& module, double clip_value) {
  detail::clip_value(unique_parameters(module), clip_value);
}

}  // namespace lockstep::inline v0_1
