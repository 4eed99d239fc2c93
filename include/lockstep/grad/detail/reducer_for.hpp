#pragma once

#include <concepts>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "lockstep/comm/local_comm.hpp"
#include "lockstep/grad/detail/accumulate_hook.hpp"
#include "lockstep/grad/detail/end_of_backward.hpp"
#include "lockstep/grad/detail/low_precision_parameters.hpp"
#include "lockstep/grad/detail/reducer.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

/// Replaces the Reducer in a single process. Registers hooks only for low-precision parameters, whose step
/// must end with a bare `loss.backward()` too.
class NoReducer {
 public:
  NoReducer(const std::vector<NamedTensor>& parameters, LowPrecisionParameters* low_precision)
      : parameters_(parameters), low_precision_(low_precision) {}
  NoReducer(const NoReducer&) = delete;
  NoReducer& operator=(const NoReducer&) = delete;

  /// Registers accumulate hooks on the low-precision leaves. A no-op after the first call.
  void hook_low_precision_gradients() {
    if (!hooks_.empty()) return;
    for (const NamedTensor& parameter : parameters_) hooks_.emplace_back(parameter.tensor, OnGradient{this});
  }

  int no_sync_depth = 0;
  double count = 0;
  bool inside_backward = false;  // ddp.backward is running, and ends the step itself

 private:
  struct OnGradient {
    NoReducer* self;
    void operator()() const { self->on_gradient(); }
  };

  void on_gradient() {
    const std::lock_guard lock(mutex_);  // the autograd engine runs one thread for each device
    if (inside_backward || no_sync_depth > 0 || std::exchange(waits_, true)) return;
    at_end_of_backward([weak = std::weak_ptr(self_)](bool ended) {
      const auto self = weak.lock();
      if (!self) return;
      (*self)->waits_ = false;
      if (ended) (*self)->low_precision_->end_step();
    });
  }

  std::vector<NamedTensor> parameters_;
  LowPrecisionParameters* low_precision_;
  std::mutex mutex_;
  bool waits_ = false;  // for the end of a bare backward
  std::shared_ptr<NoReducer*> self_ = std::make_shared<NoReducer*>(this);
  std::vector<AccumulateHook<OnGradient>> hooks_;
};

/// Whether the communicator type has one rank at compile time. Hooks, copies and checks are then compiled
/// out.
template <class Comm>
inline constexpr bool alone = std::same_as<Comm, LocalComm>;
template <class Comm, class Hook>
struct ReducerFor {
  using type = Reducer<Comm, Hook>;
};
template <class Hook>
struct ReducerFor<LocalComm, Hook> {
  using type = NoReducer;
};

}  // namespace lockstep::detail
