#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include "lockstep/data/generator.hpp"
#include "lockstep/error.hpp"
#include "lockstep/precision/precision.hpp"

namespace lockstep::inline v0_1 {
namespace detail {

class GeneratorStates {
 public:
  explicit GeneratorStates(at::TensorList inputs) : states_{{at::kCPU, default_generator_state()}} {
    for (const at::Tensor& input : inputs)
      if (input.defined() && !input.is_cpu() && states_.back().first != input.device())
        states_.emplace_back(input.device(), default_generator_state(input.device()));
  }
  void restore() const {
    for (const auto& [device, state] : states_) set_default_generator_state(state, device);
  }

 private:
  std::vector<std::pair<at::Device, at::Tensor>> states_;
};

template <class Function>
struct CheckpointedCall : torch::CustomClassHolder {
  CheckpointedCall(Function function, at::TensorList inputs)
      : function(std::move(function)), generators(inputs), autocast(AutocastScope::current()) {}

  Function function;  ///< of a list of tensors, returns a list
  GeneratorStates generators;
  AutocastScope::States autocast;

  std::vector<at::Tensor> recompute(const std::vector<at::Tensor>& inputs) {
    const GeneratorStates now(inputs);
    const at::AutoGradMode with_graph(true);
    const AutocastScope scope(autocast);
    try {
      generators.restore();
      std::vector<at::Tensor> outputs = function(inputs);
      now.restore();
      return outputs;
    } catch (...) {
      now.restore();
      throw;
    }
  }
};

template <class Function>
struct CheckpointNode : torch::autograd::Function<CheckpointNode<Function>> {
  using Call = CheckpointedCall<Function>;

  // `leaf` makes the output require grad where no input does.
  static std::vector<at::Tensor> forward(torch::autograd::AutogradContext* context,
                                         const c10::intrusive_ptr<Call>& call, at::TensorList inputs,
                                         const std::optional<at::Tensor>& /*leaf*/) {
    context->save_for_backward(inputs.vec());
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    // A cast of a parameter that autocast caches here has no graph, and must not be used outside.
    const bool cached = at::autocast::is_autocast_cache_enabled();
    at::autocast::set_autocast_cache_enabled(false);
    try {
      std::vector<at::Tensor> outputs = call->function(inputs.vec());
      at::autocast::set_autocast_cache_enabled(cached);
      return outputs;
    } catch (...) {
      at::autocast::set_autocast_cache_enabled(cached);
      throw;
    }
  }

  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* context,
                                          const std::vector<at::Tensor>& gradients) {
    if (at::GradMode::is_enabled() || !torch::autograd::Engine::get_default_engine().is_checkpoint_valid())
      throw GradientError(
          "the backward of lockstep::checkpoint accumulates into leaves, and supports neither create_graph "
          "nor torch::autograd::grad: call backward on the loss");
    std::vector<at::Tensor> inputs = context->get_saved_variables();
    for (at::Tensor& input : inputs)
      if (input.defined()) input = input.detach().set_requires_grad(input.requires_grad());
    const auto call = context->saved_data.at("call").toCapsule();
    const std::vector<at::Tensor> outputs = static_cast<Call&>(*call).recompute(inputs);
    std::vector<at::Tensor> roots, seeds, result(inputs.size() + 2);
    for (std::size_t i = 0; i < outputs.size(); ++i)
      if (outputs[i].requires_grad() && gradients.at(i).defined()) {
        roots.push_back(outputs[i]);
        seeds.push_back(gradients[i]);
      }
    if (!roots.empty()) torch::autograd::backward(roots, seeds);
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (inputs[i].defined()) result[i + 1] = inputs[i].grad();
    return result;
  }
};

}  // namespace detail

/// Returns `function(inputs...)` without keeping its activations: backward calls the function again and
/// differentiates that call. Gradients are bitwise equal to those of a plain call, unless a parameter takes
/// part in several calls, whose gradients are then added in another order.
///
/// 1. The function takes the inputs, which are tensors, and returns a tensor or a std::vector of tensors. It is
///    copied, and what it refers to must live until the backward: capture a module holder by value.
/// 2. The second call gets the states that the first one had of autocast and of the default generators of the
///    CPU and of the inputs' devices, so that dropout drops the same elements.
/// 3. Works inside DistributedDataParallel, with DdpOptions::static_graph too. The recomputation is a
///    re-entrant backward, so DdpOptions::find_unused_parameters does not see the function's parameters.
/// 4. Unlike Python's, it also computes the gradients of the function's parameters if no input requires grad.
///
/// Backward throws GradientError under create_graph or torch::autograd::grad. A plain call if grad mode is off.
///
/// Counterpart: torch.utils.checkpoint.checkpoint with use_reentrant=True.
template <class Function, std::convertible_to<at::Tensor>... Inputs>
auto checkpoint(Function function, const Inputs&... inputs) {
  using Result = std::remove_cvref_t<std::invoke_result_t<Function&, const decltype(at::Tensor(inputs))&...>>;
  constexpr bool single = std::same_as<Result, at::Tensor>;
  static_assert(single || std::same_as<Result, std::vector<at::Tensor>>,
                "lockstep: the function of a checkpoint returns a tensor or a std::vector of tensors");
  if (!at::GradMode::is_enabled()) return Result(std::invoke(function, at::Tensor(inputs)...));
  const std::vector<at::Tensor> list{at::Tensor(inputs)...};
  auto of_list = [function = std::move(function)](const std::vector<at::Tensor>& list) mutable {
    return [&]<std::size_t... i>(std::index_sequence<i...>) {
      if constexpr (single)
        return std::vector<at::Tensor>{std::invoke(function, list[i]...)};
      else
        return std::vector<at::Tensor>(std::invoke(function, list[i]...));
    }
    (std::index_sequence_for<Inputs...>{});
  };
  static const at::Tensor leaf = at::zeros({0}).requires_grad_(true);
  std::optional<at::Tensor> own_leaf = leaf;
  for (const at::Tensor& input : list)
    if (input.defined() && input.requires_grad()) own_leaf.reset();
  using Call = detail::CheckpointedCall<decltype(of_list)>;
  auto outputs = detail::CheckpointNode<decltype(of_list)>::apply(
      c10::make_intrusive<Call>(std::move(of_list), list), at::TensorList(list), own_leaf);
  if constexpr (single)
    return at::Tensor(std::move(outputs[0]));
  else
    return outputs;
}

}  // namespace lockstep::inline v0_1
