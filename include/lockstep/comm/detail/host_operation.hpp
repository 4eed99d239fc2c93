#pragma once

#include <any>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::inline v0_1::detail {

/// What a Work of lockstep's backends throws where the ranks have launched different operations.
struct OtherOperation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class Error = std::runtime_error>
std::exception_ptr error_of(const std::string& text) {
  return std::make_exception_ptr(Error(text));
}
inline std::exception_ptr aborted_error() {
  return error_of("the operation was aborted");
}

/// An operation of one of lockstep's backends. The mutex of its engine guards its end; `ended` is thread-safe.
struct HostOperation {
  enum class Kind : std::uint8_t {
    barrier,
    broadcast,
    all_reduce,
    reduce,
    all_gather,
    all_to_all,
    send,
    receive
  };
  using Function = std::function<void(bool failed)>;

  [[nodiscard]] bool ended() const { return has_ended.load(std::memory_order_acquire); }
  [[nodiscard]] bool is_message() const { return kind == Kind::send || kind == Kind::receive; }

  /// Calls `function(failed)` when the operation ends, at once if it has. It must not launch or wait.
  void at_end(Function function) {
    if (ended()) return function(error != nullptr);
    functions.push_back(std::move(function));
  }
  /// Ends the operation, with an error unless `why` is null, and releases its tensors. A function that throws makes the
  /// operation fail.
  void end(std::exception_ptr why) {
    for (const auto& function : std::exchange(functions, {})) try {
        function(why != nullptr);
      } catch (...) {
        if (!why) why = std::current_exception();
      }
    tensors.reset();
    error = std::move(why);
    has_ended.store(true, std::memory_order_release);
  }

  Kind kind = Kind::barrier;
  std::any tensors;  ///< owns the memory of input and output
  std::vector<Function> functions;
  std::exception_ptr error;  ///< valid once the operation has ended
  std::atomic<bool> has_ended{false};
};

}  // namespace lockstep::inline v0_1::detail
