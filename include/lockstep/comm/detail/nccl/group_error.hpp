#pragma once

#include <exception>
#include <string>

#include "lockstep/comm/detail/membership.hpp"
#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/comm/detail/nccl/handle.hpp"
#include "lockstep/comm/detail/sticky_error.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// The first error of a group, and how it ends the group. The thread that sees an error first stores it,
/// publishes it to the other ranks unless it is another rank's, and only then aborts NCCL, so that no rank
/// sees a consequence before its cause.
///
/// Thread-safe.
template <NcclDevice D>
class GroupError {
 public:
  GroupError(Membership& membership, NcclHandle<D>& handle) : membership_(membership), handle_(handle) {}

  /// Returns whether there is an error. Costs one atomic read.
  [[nodiscard]] bool set() const noexcept { return error_.set(); }
  [[nodiscard]] std::exception_ptr get() const noexcept { return error_.get(); }

  /// Stores the error if it is the first, publishes it unless it is another rank's, and aborts all work in
  /// flight.
  void record_and_abort(const std::exception_ptr& error) noexcept {
    if (error_.keep(error)) membership_.publish(error);
    handle_.abort();
  }
  /// record_and_abort() on a thread of the program, then throws the first error. `publish` is false for an
  /// error known to come from another rank.
  [[noreturn]] void fail(const std::exception_ptr& error, bool publish) {
    if (publish)
      record_and_abort(error);
    else if (error_.keep(error))
      handle_.abort();
    rethrow();
  }
  [[noreturn]] void rethrow() {
    membership_.notice();
    std::rethrow_exception(error_.get());
  }

  /// Fails every later call, publishes `reason` to the other ranks, and aborts the works in flight.
  void abort(const std::string& reason) noexcept {
    if (error_.keep(aborted(reason))) membership_.publish(reason);
    handle_.abort();
  }
  /// abort() during stack unwinding, where the reason is unknown: the destructors do not see the exception.
  void abort_by_exception() noexcept {
    const char* reason = "an exception, which its own output names, has ended it";
    if (error_.keep(aborted(reason))) membership_.publish_vague(reason);
    handle_.abort();
  }

 private:
  static std::exception_ptr aborted(const std::string& reason) {
    return std::make_exception_ptr(CommunicationError("the communicator was aborted: " + reason));
  }

  Membership& membership_;
  NcclHandle<D>& handle_;
  StickyError error_;
};

}  // namespace lockstep::detail
