#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

#include "lockstep/grad/hooks/hook.hpp"

namespace lockstep {

/// A Reduction that needs no waiting.
struct FinishedReduction {
  void wait() const noexcept {}
  void synchronize(std::chrono::milliseconds) const noexcept {}
};

/// Leaves each rank its own gradients, undivided, as Python's noop_hook does: to measure how long a step
/// takes without gradients on the wire (a few bytes still tell whether a rank has failed). Ranks part from
/// one another, so it is not for training.
struct NoOpHook {
  static constexpr bool predivides = false;
  static constexpr bool propagates_nan = false;
  static constexpr bool ranks_diverge = true;
  /// A graph can hold it; see CapturedStep.
  static constexpr bool capturable = true;

  template <Communicator Comm>
  FinishedReduction start(Comm&, const GradientBucket&) {
    return {};
  }
  [[nodiscard]] std::string_view name() const { return "no_op"; }
  [[nodiscard]] std::uint64_t wire_bytes() const { return 0; }
};

}  // namespace lockstep
