#pragma once

#include <chrono>
#include <functional>
#include <stdexcept>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/detail/libtorch_version.hpp"

namespace lockstep::detail {

/// What a Work of lockstep's backends throws where the ranks have launched different operations.
struct OtherOperation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// An operation of a HostBackend.
class HostWork : public c10d::Work {
 public:
  /// Blocks until the operation has completed or failed, at most until `until`. Returns whether it has.
  virtual bool wait_until(std::chrono::steady_clock::time_point until) = 0;
  /// Calls `function(failed)` when the operation has completed or failed, at once if it has. The function must neither
  /// launch an operation nor wait for one.
  virtual void at_end(std::function<void(bool failed)> function) = 0;
};

/// A backend of lockstep's own, on the host. It has no thread: whoever waits for one operation moves all of them on. So
/// a wait must be told to the operation, and not be made of questions whether it has completed.
class HostBackend : public c10d::Backend, public AbortableBackend {
 public:
  using c10d::Backend::Backend;
  /// Completes the operations that were launched, whether or not somebody has their Works, at most until `until`.
  virtual void drain(std::chrono::steady_clock::time_point until) = 0;
};

}  // namespace lockstep::detail
