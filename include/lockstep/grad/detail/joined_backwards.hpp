#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <exception>
#include <utility>
#include <vector>

#include "lockstep/detail/linkage.hpp"

namespace lockstep::detail {

/// A reduction of another model that the running `ddp.backward` has reached and will close.
struct JoinedReduction {
  void* reducer;
  std::size_t made;  // index of construction in this process, which orders reducers equally on every rank
  void (*close)(void* reducer, const std::exception_ptr& failure);
  void (*abandon)(void* reducer);
};
LOCKSTEP_PROCESS_WIDE inline std::atomic<std::size_t> reducers_made{0};

/// The nested `ddp.backward` calls of one thread.
struct OpenBackwards {
  int running = 0;
  /// Number of running `backward_sum` calls. No other model can join these: its gradients would be divided by
  /// the world size instead of the count.
  int counting = 0;
  std::vector<JoinedReduction> joined;
};
LOCKSTEP_PROCESS_WIDE inline OpenBackwards& open_backwards_here() {
  thread_local OpenBackwards here;
  return here;
}
/// The most recent outermost call of any thread.
LOCKSTEP_PROCESS_WIDE inline std::atomic<OpenBackwards*> latest_open_backwards{nullptr};

/// Returns the running calls that a gradient on `device` may belong to, or null. The engine computes CPU
/// gradients in the thread that called backward, and others in its own threads.
inline OpenBackwards* open_backwards_for(c10::Device device) {
  OpenBackwards* open = device.is_cpu() ? &open_backwards_here() : latest_open_backwards.load();
  return open && open->running > 0 ? open : nullptr;
}

/// Marks a `ddp.backward` as running in a scope. `running` is the flag of its model.
class InsideBackward {
 public:
  InsideBackward(bool& running, bool counts)
      : nested(std::exchange(running, true)),
        calls(open_backwards_here()),
        outermost(calls.running++ == 0),
        running_(running),
        counts_(counts) {
    calls.counting += counts_;
    if (outermost) latest_open_backwards = &calls;
  }
  InsideBackward(const InsideBackward&) = delete;
  InsideBackward& operator=(const InsideBackward&) = delete;
  ~InsideBackward() {
    calls.counting -= counts_;
    --calls.running;
    running_ = nested;
    OpenBackwards* mine = &calls;
    if (outermost) latest_open_backwards.compare_exchange_strong(mine, nullptr);
  }

  const bool nested;  ///< inside another `ddp.backward` of the same model
  OpenBackwards& calls;
  const bool outermost;  ///< not inside a `ddp.backward` of any model

 private:
  bool& running_;
  bool counts_;
};

}  // namespace lockstep::detail
