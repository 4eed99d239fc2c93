#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lockstep/comm/dtype_name.hpp"

namespace lockstep {

/// A parameter or buffer with its full name, such as "block.0.weight".
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

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
}  // namespace detail

/// The parameters in registration order, a tied tensor once, under its first name. `Module::parameters()`
/// lists a tied tensor as often as it is registered, and an optimizer over that list steps it as often.
inline std::vector<NamedTensor> unique_parameters(const torch::nn::Module& module) {
  return detail::each_once(module.named_parameters());
}

/// The buffers (such as running statistics) in registration order, each once.
inline std::vector<NamedTensor> unique_buffers(const torch::nn::Module& module) {
  return detail::each_once(module.named_buffers());
}

}  // namespace lockstep
