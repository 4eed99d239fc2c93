#pragma once

#include <cstring>
#include <utility>

#include "lockstep/detail/linkage.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE ParameterTable::ParameterTable(std::vector<NamedTensor> parameters,
                                               const std::unordered_set<const c10::TensorImpl*>& sparse)
    : all(std::move(parameters)) {
  for (const auto& [name, tensor] : all)
    if (tensor.requires_grad())
      trained.push_back({.name = name,
                         .tensor = tensor,
                         .bytes = static_cast<std::size_t>(tensor.numel()) * tensor.element_size(),
                         .dtype = tensor.scalar_type(),
                         .device = tensor.device(),
                         .sparse = sparse.contains(tensor.unsafeGetTensorImpl())});
}

LOCKSTEP_INLINE void note_reduced(std::span<ParameterEntry> parameters) {
  for (ParameterEntry& parameter : parameters) parameter.reduced = parameter.version();
}

LOCKSTEP_INLINE bool counts_as_cleared(const at::Tensor& gradient) {
  if (!gradient.is_cpu() || gradient.layout() != at::kStrided || !gradient.is_non_overlapping_and_dense())
    return true;
  const auto* bytes = static_cast<const char*>(gradient.const_data_ptr());
  return gradient.numel() == 0 ||
         (bytes[0] == 0 && std::memcmp(bytes, bytes + 1, gradient.nbytes() - 1) == 0);
}

LOCKSTEP_INLINE void forget_cleared(std::span<ParameterEntry> parameters) {
  for (ParameterEntry& parameter : parameters) {
    const GradientVersion now = parameter.version();
    if (parameter.reduced == now) continue;
    const bool written = now.first && now.first == parameter.reduced.first;
    parameter.reduced = written && !counts_as_cleared(parameter.gradient()) ? now : GradientVersion{};
  }
}

}  // namespace lockstep::detail
