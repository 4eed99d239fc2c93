#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <exception>
#include <utility>
#include <vector>

#include "lockstep/detail/process_wide.hpp"

namespace lockstep::detail {

/// A reduction of another model, which the running `ddp.backward` has reached and will end.
struct JoinedReduction {
  void* reducer;
  std::size_t made;  // the how-manieth reducer of this process: the same order on every rank
  void (*close)(void* reducer, const std::exception_ptr& failure);
  void (*abandon)(void* reducer);
};
LOCKSTEP_PROCESS_WIDE inline std::atomic<std::size_t> reducers_made{0};

/// The `ddp.backward` calls that run in one thread, one inside the other.
struct OpenBackwards {
  int running = 0;
  /// How many of them are of a sum with a count: no other model can join those, whose gradients would be
  /// divided by the world size instead.
  int counting = 0;
  std::vector<JoinedReduction> joined;
};
LOCKSTEP_PROCESS_WIDE inline OpenBackwards& open_backwards_here() {
  thread_local OpenBackwards here;
  return here;
}
/// The latest that any thread has begun.
LOCKSTEP_PROCESS_WIDE inline std::atomic<OpenBackwards*> latest_open_backwards{nullptr};

/// The calls that a gradient on `device` may belong to, or null where there are none. The engine computes
/// those of a CPU in the thread that called backward, and others in threads of its own.
inline OpenBackwards* open_backwards_for(c10::Device device) {
  OpenBackwards* open = device.is_cpu() ? &open_backwards_here() : latest_open_backwards.load();
  return open && open->running > 0 ? open : nullptr;
}

/// Marks a `ddp.backward` as running while it lives, in `running`, which is of its model.
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

  const bool nested;  ///< inside another one of the same model
  OpenBackwards& calls;
  const bool outermost;  ///< inside none of any model

 private:
  bool& running_;
  bool counts_;
};

}  // namespace lockstep::detail
