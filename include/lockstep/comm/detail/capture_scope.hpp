#pragma once

#include <utility>

#include "lockstep/detail/linkage.hpp"

namespace lockstep::detail {

/// Marks this thread as capturing: device work is recorded into a graph instead of executed, so no device
/// value may be read.
class CaptureScope {
 public:
  CaptureScope() : before_(std::exchange(capturing_, true)) {}
  CaptureScope(const CaptureScope&) = delete;
  CaptureScope& operator=(const CaptureScope&) = delete;
  ~CaptureScope() { capturing_ = before_; }

  [[nodiscard]] static bool active() { return capturing_; }

 private:
  LOCKSTEP_PROCESS_WIDE inline static constinit thread_local bool capturing_ = false;

  const bool before_;
};

}  // namespace lockstep::detail
