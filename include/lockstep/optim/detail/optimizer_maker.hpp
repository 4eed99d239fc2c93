#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep::inline v0_1::detail {

template <class Make, class Parameters>
struct MadeBy {
  using type = void;
};
template <class Make, class Parameters>
requires std::invocable<Make, Parameters>
struct MadeBy<Make, Parameters> {
  using type = std::invoke_result_t<Make, Parameters>;
};
/// The return type of a function of the parameters; void if it cannot be called with them.
template <class Make, class Parameters = std::vector<at::Tensor>>
using MadeByOf = typename MadeBy<Make, Parameters>::type;

/// A function of the parameters that returns an optimizer, or a std::unique_ptr to one.
template <class Make, class Parameters = std::vector<at::Tensor>>
concept OptimizerMaker = std::derived_from<MadeByOf<Make&, Parameters>, torch::optim::Optimizer> ||
    std::convertible_to<MadeByOf<Make&, Parameters>, std::unique_ptr<torch::optim::Optimizer>>;

/// Calls `make` and returns its optimizer in a std::unique_ptr.
template <class Make, class Parameters>
requires OptimizerMaker<Make, Parameters> std::unique_ptr<torch::optim::Optimizer> make_optimizer_by(
    Make& make, Parameters parameters) {
  using Made = MadeByOf<Make&, Parameters>;
  if constexpr (std::derived_from<Made, torch::optim::Optimizer>)
    return std::unique_ptr<torch::optim::Optimizer>(new Made(make(std::move(parameters))));
  else
    return make(std::move(parameters));
}

}  // namespace lockstep::inline v0_1::detail
