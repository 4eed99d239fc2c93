#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

#include "lockstep/comm/detail/group_state.hpp"
#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/comm/detail/nccl/diagnosis.hpp"
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

  Waiting(GroupState& state, NcclHandle<D>& handle, Diagnosis<D>& diagnosis)
      : state_(state), handle_(handle), diagnosis_(diagnosis) {}

  /// Blocks until `complete()`, which it polls, returns true. Throws if the group has failed, or at `until`.
  template <class Complete>
  void await(const Call& call, const Label& label, Clock::time_point until, Complete&& complete) {
    for (int round = 0; !complete(); ++round) {
      state_.check_error();
      state_.look(call);
      if (Clock::now() >= until) late(call, label);
      if (round % 64 == 63) {
        if (auto error = diagnosis_.of_state(call, label)) state_.fail(error, true);
        if (auto error = state_.membership().look(call)) state_.fail(error, false);
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
      state_.check_error();
      state_.look(call);
      if (Clock::now() >= call.start + state_.timeout()) late(call, label);
    });
    if (result == NcclResult::success) return;
    state_.check_error();
    state_.fail(diagnosis_.of_result(call, label, result), true);
  }

 private:
  // Throws the error of a call whose time to wait has passed.
  [[noreturn]] void late(const Call& call, const Label& label) {
    const bool last = Clock::now() >= call.start + state_.timeout();
    const auto error = diagnosis_.of_lateness(call, label);
    try {
      std::rethrow_exception(error);
    } catch (const TimeoutError&) {
      if (!last) throw;  // the caller's own, shorter timeout
    } catch (...) {
    }
    state_.fail(error, true);
  }

  GroupState& state_;
  NcclHandle<D>& handle_;
  Diagnosis<D>& diagnosis_;
};

}  // namespace lockstep::detail
