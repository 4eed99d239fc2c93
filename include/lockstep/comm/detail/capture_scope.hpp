#pragma once

#include <utility>

#include "lockstep/detail/linkage.hpp"

namespace lockstep::detail {

/// Whether this thread captures; see CaptureScope.
LOCKSTEP_PROCESS_WIDE inline constinit thread_local bool capturing = false;

/// Marks this thread as capturing: device work is recorded into a graph instead of executed, so no device
/// value may be read.
class CaptureScope {
 public:
  CaptureScope() : before_(std::exchange(capturing, true)) {}
  CaptureScope(const CaptureScope&) = delete;
  CaptureScope& operator=(const CaptureScope&) = delete;
  ~CaptureScope() { capturing = before_; }

  [[nodiscard]] static bool active() { return capturing; }

 private:
  const bool before_;
};

}  // namespace lockstep::detail
