#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep::detail {

/// Implements `wait` and `synchronize` for a Reduction of several collectives. `Derived::finish(wait)` calls
/// `wait(work)` for each Work in turn and launches the next phase in between. The timeout of `synchronize`
/// covers all phases together.
template <class Derived>
struct PhasedReduction {
  void wait() {
    static_cast<Derived*>(this)->finish([](auto& work) { work.wait(); });
  }
  void synchronize(std::chrono::milliseconds timeout) {
    using std::chrono::milliseconds;
    const auto until = std::chrono::steady_clock::now() + timeout;
    static_cast<Derived*>(this)->finish([until](auto& work) {
      const auto left = std::chrono::ceil<milliseconds>(until - std::chrono::steady_clock::now());
      work.synchronize(std::max(milliseconds(0), left));
    });
  }
};

}  // namespace lockstep::detail
