#pragma once

#include <chrono>
#include <exception>
#include <string>

#include "lockstep/comm/detail/membership.hpp"
#include "lockstep/comm/detail/nccl/error_text.hpp"
#include "lockstep/comm/detail/nccl/handle.hpp"
#include "lockstep/comm/detail/nccl/in_flight_op.hpp"
#include "lockstep/comm/detail/own_error.hpp"
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
    const std::string words = nccl_error_text(result, handle_.last_error());
    const std::string what = text_of(call, label);
    if (result == NcclResult::remote_error || result == NcclResult::system_error)
      if (auto error = membership_.cause_of(
              call, detail::formatted("it does not answer, and {} has ended with it ({})", what, words)))
        return error;
    return std::make_exception_ptr(CommunicationError(failure_text(what, rank(), words), rank()));
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

}  // namespace lockstep::detail
