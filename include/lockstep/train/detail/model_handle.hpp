#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/grad/distributed_data_parallel.hpp"

namespace lockstep::detail {

/// The torch::nn::Module of a model in any of its forms.
template <Model M>
torch::nn::Module& module_of(M& model) {
  if constexpr (ModuleImpl<M>)
    return model;
  else
    return *model;
}

/// Where the batches of a model belong: the device of its first parameter, or the CPU.
inline at::Device device_of(const torch::nn::Module& module) {
  const std::vector<at::Tensor> parameters = module.parameters();
  return parameters.empty() ? at::Device(at::kCPU) : parameters[0].device();
}

/// What the model makes of `input`.
template <Model M, class Input>
decltype(auto) call_model(M& model, Input&& input) {
  if constexpr (ModuleImpl<M>)
    return model.forward(std::forward<Input>(input));
  else
    return (*model).forward(std::forward<Input>(input));
}

/// Whether `M()` makes a model: a module, or a holder of one, with a default constructor.
template <class M>
concept DefaultConstructibleModel = (ModuleImpl<M> && std::default_initializable<M>) || requires {
  requires std::default_initializable<typename M::ContainedType>;
};

/// Holds a model in any of its forms. A module itself is kept behind a shared pointer, as LibTorch wants its
/// modules.
template <Model M>
class ModelHandle {
 public:
  explicit ModelHandle(M model) : model_(hold(std::move(model))) {}

  /// The model in the user's own form.
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

}  // namespace lockstep::detail
