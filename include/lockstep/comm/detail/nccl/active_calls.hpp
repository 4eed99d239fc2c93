#pragma once

#include <chrono>
#include <mutex>
#include <optional>
#include <utility>

#include "lockstep/comm/detail/call.hpp"
#include "lockstep/comm/detail/nccl/in_flight_op.hpp"

namespace lockstep::detail {

/// The device and NCCL calls that the program's threads have entered and not returned from. Any of them may
/// block: a launch blocks while the device's queue is full.
///
/// Thread-safe. No function blocks.
class ActiveCalls {
 public:
  using Clock = std::chrono::steady_clock;

  /// A call that is active while this object lives.
  class Scope {
   public:
    Scope(ActiveCalls& calls, const Call& call, const Label& label)
        : calls_(calls), call_(call), label_(label) {
      std::lock_guard lock(calls_.mutex_);
      previous_ = std::exchange(calls_.newest_, this);
      if (previous_) previous_->next_ = this;
    }
    ~Scope() {
      std::lock_guard lock(calls_.mutex_);
      (next_ ? next_->previous_ : calls_.newest_) = previous_;
      if (previous_) previous_->next_ = next_;
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    friend class ActiveCalls;

    ActiveCalls& calls_;
    const Call call_;
    const Label label_;
    const Clock::time_point entered_ = Clock::now();
    Scope *previous_ = nullptr, *next_ = nullptr;  // the neighbours in the list, by age
  };

  struct Entry {
    Call call;
    Label label;
    Clock::time_point entered;  // later than `call.start` if the call was issued earlier
  };
  /// Returns the call that was entered first, std::nullopt if none is active.
  [[nodiscard]] std::optional<Entry> oldest() const {
    std::lock_guard lock(mutex_);
    const Scope* oldest = newest_;
    while (oldest && oldest->previous_) oldest = oldest->previous_;
    if (!oldest) return std::nullopt;
    return Entry{oldest->call_, oldest->label_, oldest->entered_};
  }

 private:
  mutable std::mutex mutex_;
  Scope* newest_ = nullptr;
};

}  // namespace lockstep::detail
