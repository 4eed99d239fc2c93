#pragma once

#include <utility>

#include "lockstep/precision/precision.hpp"

namespace lockstep {

/// The parameters' own format throughout: no context, no scale, and nothing left of itself in the compiled
/// step.
struct Fp32 {
  /// A graph can hold it; see CapturedStep.
  static constexpr bool capturable = true;

  template <class Forward>
  decltype(auto) forward(Forward&& forward) const {
    return std::forward<Forward>(forward)();
  }

  const at::Tensor& scale(const at::Tensor& loss) const { return loss; }

  bool step(torch::optim::Optimizer& optimizer) const {
    optimizer.step();
    return true;
  }
};

}  // namespace lockstep
