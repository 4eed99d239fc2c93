#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep::detail {

/// The two ways to wait for a Reduction of several collectives, made of one: `Derived::finish(wait)` calls
/// `wait(work)` for each Work in turn and does between them what is to be done. One deadline holds for all.
template <class Derived>
struct PhasedReduction {
  void join_stream() {
    static_cast<Derived*>(this)->finish([](auto& work) { work.join_stream(); });
  }
  void wait_host(std::chrono::milliseconds deadline) {
    using std::chrono::milliseconds;
    const auto until = std::chrono::steady_clock::now() + deadline;
    static_cast<Derived*>(this)->finish([until](auto& work) {
      const auto left = std::chrono::ceil<milliseconds>(until - std::chrono::steady_clock::now());
      work.wait_host(std::max(milliseconds(0), left));
    });
  }
};

}  // namespace lockstep::detail
