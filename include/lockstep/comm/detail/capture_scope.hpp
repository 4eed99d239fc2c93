#pragma once

#include <utility>

#include "lockstep/detail/linkage.hpp"

namespace lockstep::detail {

/// Marks this thread as capturing: device work is recorded into a graph instead of executed, so no device
/// value may be read.
class CaptureScope {
 public:
  CaptureScope() : before_(std::exchange(on(), true)) {}
  CaptureScope(const CaptureScope&) = delete;
  CaptureScope& operator=(const CaptureScope&) = delete;
  ~CaptureScope() { on() = before_; }

  [[nodiscard]] static bool active() { return on(); }

 private:
  LOCKSTEP_PROCESS_WIDE static bool& on() {
    static thread_local bool on = false;
    return on;
  }

  bool before_;
};

}  // namespace lockstep::detail
