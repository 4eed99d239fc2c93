#pragma once

#include <utility>

#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include "lockstep/detail/describe.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::inline v0_1 {
namespace detail {

template <class Dictionary>
std::vector<NamedTensor> each_once(const Dictionary& dictionary) {
  std::vector<NamedTensor> result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : dictionary)
    if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second)
      result.push_back({item.key(), item.value()});
  return result;
}

/// Returns a checksum that changes when any one element changes: the sum of the elements' bits as integers,
/// which is exact in any order.
LOCKSTEP_INLINE at::Tensor sum_of_bits(const at::Tensor& tensor) {
  const at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  const std::size_t size = real.element_size();
  const at::ScalarType integer = size == 8   ? at::kLong
                                 : size == 4 ? at::kInt
                                 : size == 2 ? at::kShort
                                             : at::kByte;
  return real.view(integer).sum(at::kLong);
}

LOCKSTEP_INLINE std::string digest_of(const std::vector<NamedTensor>& parameters) {
  std::vector<at::Tensor> sums;
  for (const NamedTensor& parameter : parameters)
    sums.push_back(sum_of_bits(parameter.tensor).to(parameters[0].tensor.device(), /*non_blocking=*/true));
  const at::Tensor all = at::stack(sums).cpu();
  return {static_cast<const char*>(all.const_data_ptr()), all.nbytes()};
}

LOCKSTEP_INLINE NamedValues describe(const std::vector<NamedTensor>& parameters,
                                     const std::vector<NamedTensor>& buffers) {
  NamedValues values;
  const auto add = [&values](std::string_view kind, const std::vector<NamedTensor>& items, bool trained) {
    for (std::size_t i = 0; i < items.size(); ++i) {
      const at::Tensor& tensor = items[i].tensor;
      std::string text = detail::formatted("'{}' {}", items[i].name, describe(tensor));
      if (!tensor.is_contiguous()) text += " with strides " + shape_text(tensor.strides());
      if (trained && !tensor.requires_grad()) text += ", without gradient";
      values.emplace_back(detail::formatted("{} {}", kind, i), std::move(text));
    }
  };
  add("parameter", parameters, true);
  add("buffer", buffers, false);
  return values;
}

}  // namespace detail

LOCKSTEP_INLINE std::vector<NamedTensor> unique_parameters(const torch::nn::Module& module) {
  return detail::each_once(module.named_parameters());
}

LOCKSTEP_INLINE std::vector<NamedTensor> unique_buffers(const torch::nn::Module& module) {
  return detail::each_once(module.named_buffers());
}

LOCKSTEP_INLINE detail::ModelTensors tensors_of(const torch::nn::Module& module) {
  detail::ModelTensors tensors{unique_parameters(module), unique_buffers(module), {}};
  module.apply([&](const torch::nn::Module& child) {
    if (const auto* table = child.as<torch::nn::EmbeddingImpl>(); table && table->options.sparse())
      tensors.sparse.insert(table->weight.unsafeGetTensorImpl());
    if (const auto* bag = child.as<torch::nn::EmbeddingBagImpl>(); bag && bag->options.sparse())
      tensors.sparse.insert(bag->weight.unsafeGetTensorImpl());
  });
  return tensors;
}

LOCKSTEP_INLINE detail::ModelTensors tensors_of(const std::vector<NamedTensor>& list) {
  detail::ModelTensors tensors;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const NamedTensor& item : list)
    if (item.tensor.defined() && seen.insert(item.tensor.unsafeGetTensorImpl()).second)
      tensors.parameters.push_back(item);
  return tensors;
}

LOCKSTEP_INLINE detail::ModelTensors tensors_of(const std::vector<at::Tensor>& list) {
  std::vector<NamedTensor> named;
  for (const at::Tensor& tensor : list) named.push_back({std::to_string(named.size()), tensor});
  return tensors_of(named);
}

}  // namespace lockstep::inline v0_1
