#pragma once

#include <concepts>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include "lockstep/comm/detail/describe.hpp"

namespace lockstep {

/// A parameter or buffer with its qualified name, such as "block.0.weight".
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

}  // namespace lockstep

namespace lockstep::detail {
template <class Dictionary>
std::vector<NamedTensor> each_once(const Dictionary& dictionary) {
  std::vector<NamedTensor> result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : dictionary)
    if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second)
      result.push_back({item.key(), item.value()});
  return result;
}
}  // namespace lockstep::detail

namespace lockstep {

/// Returns the parameters in registration order, a tied tensor once, under its first name.
/// `Module::parameters()` repeats a tied tensor, and an optimizer over that list steps it repeatedly.
inline std::vector<NamedTensor> unique_parameters(const torch::nn::Module& module) {
  return detail::each_once(module.named_parameters());
}

/// Returns the buffers (such as running statistics) in registration order, each once.
inline std::vector<NamedTensor> unique_buffers(const torch::nn::Module& module) {
  return detail::each_once(module.named_buffers());
}

}  // namespace lockstep

namespace lockstep::detail {
template <class M>
concept ModuleImpl = std::derived_from<M, torch::nn::Module>;
template <class M>
concept ModuleHandle = std::copyable<M> && requires(M& handle) {
  { *handle } -> std::convertible_to<const torch::nn::Module&>;
};
}  // namespace lockstep::detail

namespace lockstep {

/// A LibTorch model: a module (`ConvNetImpl`), or a handle to one (a TORCH_MODULE holder such as `ConvNet`,
/// or a shared_ptr).
template <class M>
concept Model = detail::ModuleImpl<M> || detail::ModuleHandle<M>;

/// A TorchScript module (`torch::jit::Module`). Recognized by its members, which avoids its heavy header.
template <class M>
concept ScriptModule =
    !Model<M> && std::copyable<M> && requires(M & module, std::vector<c10::IValue> inputs) {
  { module.forward(std::move(inputs)) } -> std::same_as<c10::IValue>;
  (*module.named_parameters(true).begin()).value;
  (*module.named_buffers(true).begin()).name;
};

/// A list of parameters without a module.
template <class M>
concept ParameterList = std::same_as<M, std::vector<at::Tensor>> || std::same_as<M, std::vector<NamedTensor>>;

/// A model that DistributedDataParallel can wrap.
template <class M>
concept Trainable = Model<M> || ScriptModule<M> || ParameterList<M>;

/// A model's parameters and buffers, each once, and the parameters that get sparse gradients.
struct ModelTensors {
  std::vector<NamedTensor> parameters, buffers;
  std::unordered_set<const c10::TensorImpl*> sparse;
};

/// Returns the tensors of a model. The weights of Embedding and EmbeddingBag with `sparse(true)` get sparse
/// gradients.
inline ModelTensors tensors_of(const torch::nn::Module& module) {
  ModelTensors tensors{unique_parameters(module), unique_buffers(module), {}};
  module.apply([&](const torch::nn::Module& child) {
    if (const auto* table = child.as<torch::nn::EmbeddingImpl>(); table && table->options.sparse())
      tensors.sparse.insert(table->weight.unsafeGetTensorImpl());
    if (const auto* bag = child.as<torch::nn::EmbeddingBagImpl>(); bag && bag->options.sparse())
      tensors.sparse.insert(bag->weight.unsafeGetTensorImpl());
  });
  return tensors;
}
template <detail::ModuleHandle M>
ModelTensors tensors_of(const M& model) {
  return tensors_of(static_cast<const torch::nn::Module&>(*model));
}
template <ScriptModule M>
ModelTensors tensors_of(const M& model) {
  ModelTensors tensors;
  std::unordered_set<const c10::TensorImpl*> seen;
  const auto collect = [&](const auto& list, std::vector<NamedTensor>& result) {
    for (const auto& item : list)
      if (item.value.defined() && seen.insert(item.value.unsafeGetTensorImpl()).second)
        result.push_back({item.name, item.value});
  };
  collect(model.named_parameters(true), tensors.parameters);
  collect(model.named_buffers(true), tensors.buffers);
  return tensors;
}
/// Returns the tensors of a parameter list. Unnamed tensors are named by their index.
inline ModelTensors tensors_of(const std::vector<NamedTensor>& list) {
  ModelTensors tensors;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const NamedTensor& item : list)
    if (item.tensor.defined() && seen.insert(item.tensor.unsafeGetTensorImpl()).second)
      tensors.parameters.push_back(item);
  return tensors;
}
inline ModelTensors tensors_of(const std::vector<at::Tensor>& list) {
  std::vector<NamedTensor> named;
  for (const at::Tensor& tensor : list) named.push_back({std::to_string(named.size()), tensor});
  return tensors_of(named);
}

}  // namespace lockstep
