#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep::detail {

template <class Make>
struct MadeBy {
  using type = void;
};
template <std::invocable<std::vector<at::Tensor>> Make>
struct MadeBy<Make> {
  using type = std::invoke_result_t<Make, std::vector<at::Tensor>>;
};
/// What a function makes of parameters; void where it is not called with any.
template <class Make>
using MadeByOf = typename MadeBy<Make>::type;

/// A function of the parameters that returns an optimizer, or a std::unique_ptr to one.
template <class Make>
concept OptimizerMaker = std::derived_from<MadeByOf<Make&>, torch::optim::Optimizer> ||
    std::convertible_to<MadeByOf<Make&>, std::unique_ptr<torch::optim::Optimizer>>;

/// What it makes, on the heap.
template <OptimizerMaker Make>
std::unique_ptr<torch::optim::Optimizer> make_optimizer_by(Make& make, std::vector<at::Tensor> parameters) {
  using Made = MadeByOf<Make&>;
  if constexpr (std::derived_from<Made, torch::optim::Optimizer>)
    return std::unique_ptr<torch::optim::Optimizer>(new Made(make(std::move(parameters))));
  else
    return make(std::move(parameters));
}

}  // namespace lockstep::detail
