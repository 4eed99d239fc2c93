#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

#include "lockstep/grad/hooks/hook.hpp"

namespace lockstep {

/// A Reduction that is complete already.
struct FinishedReduction {
  void wait() const noexcept {}
  void synchronize(std::chrono::milliseconds) const noexcept {}
};

/// Leaves each rank its own, undivided gradients, to measure a step without gradient communication (a few
/// bytes still tell whether a rank has failed). Not for training: the ranks diverge. Counterpart: noop_hook.
struct NoOpHook {
  static constexpr bool predivides = false;
  static constexpr bool propagates_nan = false;
  static constexpr bool ranks_diverge = true;
  /// CapturedStep can capture it.
  static constexpr bool capturable = true;

  template <Communicator Comm>
  FinishedReduction start(Comm&, const GradientBucket&) {
    return {};
  }
  [[nodiscard]] std::string_view name() const { return "no_op"; }
  [[nodiscard]] std::uint64_t wire_bytes() const { return 0; }
};

}  // namespace lockstep
