#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <thread>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/detail/group_state.hpp"
#include "lockstep/comm/detail/membership.hpp"
#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/comm/detail/nccl/handle.hpp"
#include "lockstep/comm/detail/nccl/in_flight_op.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// Finds the reason why a call cannot complete, and the rank at fault. Returns errors instead of throwing
/// them. Thread-safe.
template <NcclDevice D>
class Diagnosis {
 public:
  Diagnosis(Membership& membership, NcclHandle<D>& handle) : membership_(membership), handle_(handle) {}

  /// Returns the error of an NCCL result: another rank's failure if that is the cause.
  [[nodiscard]] std::exception_ptr of_result(const Call& call, const Label& label, NcclResult result) {
    const std::string text = nccl_error_text(result, handle_.last_error());
    const std::string what = text_of(call, label);
    if (result == NcclResult::remote_error || result == NcclResult::system_error)
      if (auto error = membership_.cause_of(
              call, detail::formatted("it does not answer, and {} has ended with it ({})", what, text)))
        return error;
    return std::make_exception_ptr(CommunicationError(failure_text(what, rank(), text), rank()));
  }

  /// Returns NCCL's asynchronous error. Returns null if there is none, if the communicator is gone, or while
  /// another thread calls on it.
  [[nodiscard]] std::exception_ptr of_state(const Call& call, const Label& label) {
    if (handle_.gone()) return nullptr;
    const NcclResult state = handle_.state_if_idle().value_or(NcclResult::success);
    if (state == NcclResult::success || state == NcclResult::in_progress || handle_.gone()) return nullptr;
    return of_result(call, label, state);
  }

  /// Returns the TimeoutError of a call, which names the late ranks, or another rank's failure.
  [[nodiscard]] std::exception_ptr of_lateness(const Call& call, const Label& label) {
    if (auto error = membership_.look(call)) return error;
    std::string text = membership_.lateness_of(call);
    if (label) text += detail::formatted(" ({})", *label);
    if (auto error = membership_.look(call)) return error;
    return std::make_exception_ptr(TimeoutError(text, rank()));
  }

  /// Returns the error of an exception that the device threw, such as out of memory.
  [[nodiscard]] std::exception_ptr of_exception(const std::string& what, const std::exception& error) {
    return std::make_exception_ptr(CommunicationError(failure_text(what, rank(), first_line(error)), rank()));
  }

 private:
  [[nodiscard]] int rank() const { return membership_.world().rank(); }

  Membership& membership_;
  NcclHandle<D>& handle_;
};

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
      if (Clock::now() >= until) throw_timeout(call, label);
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
      if (Clock::now() >= call.start + state_.timeout()) throw_timeout(call, label);
    });
    if (result == NcclResult::success) return;
    state_.check_error();
    state_.fail(diagnosis_.of_result(call, label, result), true);
  }

 private:
  // Throws the error of a call whose time to wait has passed.
  [[noreturn]] void throw_timeout(const Call& call, const Label& label) {
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
