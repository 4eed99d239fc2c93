#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/grad/distributed_data_parallel.hpp"

namespace lockstep::inline v0_1::detail {

/// Returns the torch::nn::Module of a model, which is a module or a holder.
template <Model M>
torch::nn::Module& module_of(M& model) {
  if constexpr (ModuleImpl<M>)
    return model;
  else
    return *model;
}

/// Returns the device for a model's batches: the device of its first parameter, or the CPU.
inline at::Device device_of(const torch::nn::Module& module) {
  const std::vector<at::Tensor> parameters = module.parameters();
  return parameters.empty() ? at::Device(at::kCPU) : parameters[0].device();
}

/// Runs the model's forward on `input`.
template <Model M, class Input>
decltype(auto) call_model(M& model, Input&& input) {
  if constexpr (ModuleImpl<M>)
    return model.forward(std::forward<Input>(input));
  else
    return (*model).forward(std::forward<Input>(input));
}

/// A model that `M()` constructs: a default-constructible module, or a holder of one.
template <class M>
concept DefaultConstructibleModel = (ModuleImpl<M> && std::default_initializable<M>) || requires {
  requires std::default_initializable<typename M::ContainedType>;
};

/// Owns a model, which is a module or a holder. A module is kept in a shared pointer, as LibTorch requires.
template <Model M>
class ModelHandle {
 public:
  explicit ModelHandle(M model) : model_(hold(std::move(model))) {}

  /// Returns the model as the user passed it.
  [[nodiscard]] M& get() {
    if constexpr (ModuleImpl<M>)
      return *model_;
    else
      return model_;
  }
  [[nodiscard]] torch::nn::Module& module() { return module_of(get()); }

 private:
  static auto hold(M model) {
    if constexpr (ModuleImpl<M>)
      return std::make_shared<M>(std::move(model));
    else
      return model;
  }

  std::conditional_t<ModuleImpl<M>, std::shared_ptr<M>, M> model_;
};

}  // namespace lockstep::inline v0_1::detail
