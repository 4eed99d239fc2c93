#pragma once

#include <atomic>
#include <utility>

#include "lockstep/detail/linkage.hpp"

namespace lockstep::inline v0_1::detail {

/// Marks this thread as capturing: device work is recorded into a graph instead of executed, so no device
/// value may be read.
class CaptureScope {
 public:
  CaptureScope() : before_(std::exchange(capturing_, true)) { ++captures_; }
  CaptureScope(const CaptureScope&) = delete;
  CaptureScope& operator=(const CaptureScope&) = delete;
  ~CaptureScope() {
    capturing_ = before_;
    --captures_;
  }

  [[nodiscard]] static bool active() { return capturing_; }
  /// Returns whether a thread of the process captures: backward runs on threads of LibTorch's own.
  [[nodiscard]] static bool active_anywhere() { return captures_ > 0; }

 private:
  LOCKSTEP_PROCESS_WIDE inline static constinit thread_local bool capturing_ = false;
  LOCKSTEP_PROCESS_WIDE inline static constinit std::atomic<int> captures_ = 0;

  const bool before_;
};

}  // namespace lockstep::inline v0_1::detail
