#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

#include "lockstep/comm/detail/membership.hpp"
#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/comm/detail/nccl/diagnosis.hpp"
#include "lockstep/comm/detail/nccl/group_error.hpp"
#include "lockstep/comm/detail/nccl/handle.hpp"
#include "lockstep/comm/detail/nccl/in_flight_op.hpp"

namespace lockstep::detail {

/// The waits of the program's threads for a group. A wait ends at the group's first error and at the timeout
/// of its call.
///
/// Thread-safe.
template <NcclDevice D>
class Waiting {
 public:
  using Clock = std::chrono::steady_clock;

  Waiting(Membership& membership, NcclHandle<D>& handle, Diagnosis<D>& diagnosis, GroupError<D>& error,
          std::chrono::milliseconds timeout)
      : membership_(membership), handle_(handle), diagnosis_(diagnosis), error_(error), timeout_(timeout) {}

  /// Throws if another rank has failed, or has left before this call.
  void look(const Call& call) {
    if (!membership_.news()) return;
    if (auto error = membership_.look(call)) error_.fail(error, false);
  }

  /// Blocks until `complete()`, which it polls, returns true. Throws if the group has failed, or at `until`.
  template <class Complete>
  void await(const Call& call, const Label& label, Clock::time_point until, Complete&& complete) {
    for (int round = 0; !complete(); ++round) {
      if (error_.set()) error_.rethrow();
      look(call);
      if (Clock::now() >= until) late(call, label);
      if (round % 64 == 63) {
        if (auto error = diagnosis_.of_state(call, label)) error_.fail(error, true);
        if (auto error = membership_.look(call)) error_.fail(error, false);
      }
      if (round < 64)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(std::min(round, 1000)));
    }
  }

  /// Blocks until NCCL's `result` is no longer in_progress. Throws if it is an error.
  void await_ready(const Call& call, const Label& label, NcclResult result) {
    result = handle_.settle(result, [&] {
      if (error_.set()) error_.rethrow();
      look(call);
      if (Clock::now() >= call.start + timeout_) late(call, label);
    });
    if (result == NcclResult::success) return;
    if (error_.set()) error_.rethrow();
    error_.fail(diagnosis_.of_result(call, label, result), true);
  }

 private:
  // Throws the error of a call whose time to wait has passed.
  [[noreturn]] void late(const Call& call, const Label& label) {
    const bool last = Clock::now() >= call.start + timeout_;
    const auto error = diagnosis_.of_lateness(call, label);
    try {
      std::rethrow_exception(error);
    } catch (const TimeoutError&) {
      if (!last) throw;  // the caller's own, shorter timeout
    } catch (...) {
    }
    error_.fail(error, true);
  }

  Membership& membership_;
  NcclHandle<D>& handle_;
  Diagnosis<D>& diagnosis_;
  GroupError<D>& error_;
  std::chrono::milliseconds timeout_;
};

}  // namespace lockstep::detail
