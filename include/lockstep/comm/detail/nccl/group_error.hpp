#pragma once

#include <exception>
#include <string>

#include "lockstep/comm/detail/membership.hpp"
#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/comm/detail/nccl/handle.hpp"
#include "lockstep/comm/detail/sticky_error.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// The first error of a group, and how it ends the group: whoever sees an error first keeps it, tells the
/// other ranks unless it comes from one of them, and only then aborts NCCL, so that no rank hears of a
/// consequence before its cause.
///
/// Thread safety: every function may be called from any thread.
template <NcclDevice D>
class GroupError {
 public:
  GroupError(Membership& membership, NcclHandle<D>& handle) : membership_(membership), handle_(handle) {}

  /// Whether there is one. Costs one atomic read.
  [[nodiscard]] bool set() const noexcept { return error_.set(); }
  [[nodiscard]] std::exception_ptr get() const noexcept { return error_.get(); }

  /// Keeps the error if it is the first, tells the others of it unless it came from them, and ends what is
  /// in flight.
  void record_and_abort(const std::exception_ptr& error) noexcept {
    if (error_.keep(error)) membership_.publish(error);
    handle_.abort();
  }
  /// The same on a thread of the program, which gets the first one; `publish` is false where it is known to
  /// come from another rank.
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

  /// Makes every later call throw, tells the other ranks, and ends what is in flight.
  void abort(const std::string& reason) noexcept {
    if (error_.keep(aborted(reason))) membership_.publish(reason);
    handle_.abort();
  }
  /// The same while an exception is on its way that the destructors it runs do not know.
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
