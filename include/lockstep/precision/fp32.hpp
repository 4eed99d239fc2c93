#pragma once

#include <utility>

#include "lockstep/precision/precision.hpp"

namespace lockstep {

/// Runs everything in the parameters' own dtype, without context and without loss scaling. Compiles to
/// nothing.
struct Fp32 {
  /// CapturedStep can capture it.
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
