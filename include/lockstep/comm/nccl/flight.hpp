#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/nccl/device.hpp"

namespace lockstep::detail {

/// What the caller calls what it sends, such as a bucket and its parameters, for the messages of errors.
using Label = std::shared_ptr<const std::string>;

/// "all_reduce #57 (bucket 2 of 5)"
inline std::string text_of(const Call& call, const Label& label) {
  return label ? fmt::format("{} ({})", call.text(), *label) : call.text();
}

/// One call's work on the communicator's stream, from its issue to its end.
template <NcclDevice D>
struct Flight {
  Call call;
  Label label;
  typename D::Event ready{};  // recorded on the caller's stream, before it
  typename D::Event done{};   // recorded on the communicator's stream, behind it
  typename D::Stream from{};  // the caller's
  std::vector<at::Tensor>
      kept;               // until it is complete, or ordered before what follows on the caller's stream
  bool landed = false;    // complete, without an error before it
  bool held = false;      // by a Work
  bool captured = false;  // into a graph: nothing of it happens now, and its events are the graph's
};

/// The flights of a communicator, in the order of its stream. Those that have ended are used again: once
/// warm, a collective allocates nothing here.
///
/// Thread safety: every function may be called from any thread. Tensors are let go of outside the lock.
template <NcclDevice D>
class Flights {
 public:
  using FlightPtr = std::shared_ptr<Flight<D>>;

  explicit Flights(const D& device) : device_(device) {}
  ~Flights() {
    for (const auto& flights : {under_way_, idle_})
      for (const FlightPtr& flight : flights) {
        device_.destroy_event(flight->ready);
        device_.destroy_event(flight->done);
      }
  }
  Flights(const Flights&) = delete;
  Flights& operator=(const Flights&) = delete;

  /// A flight to be filled, held by the caller; `start` must follow, whatever happens in between.
  [[nodiscard]] FlightPtr take() {
    {
      std::lock_guard lock(mutex_);
      if (!idle_.empty() && !idle_.front()->held) {
        FlightPtr flight = std::move(idle_.front());
        idle_.pop_front();
        flight->landed = false;
        flight->held = true;
        return flight;
      }
    }
    auto flight = std::make_shared<Flight<D>>();
    flight->ready = device_.make_event();
    flight->done = device_.make_event();
    flight->held = true;
    return flight;
  }

  /// Its `done` has been recorded.
  void start(const FlightPtr& flight) {
    std::lock_guard lock(mutex_);
    under_way_.push_back(flight);
  }

  /// Lets go of those that have ended, from the oldest on; they count as complete unless `failed()`, asked
  /// after each was seen to have ended. Throws what the device throws.
  template <class Failed>
  void sweep(Failed&& failed) {
    for (;;) {
      std::vector<at::Tensor> garbage;
      std::lock_guard lock(mutex_);
      if (under_way_.empty()) return;
      const FlightPtr oldest = under_way_.front();
      if (!oldest->captured) {
        if (!device_.done(oldest->done)) return;
        if (!failed()) oldest->landed = true;
        garbage.swap(oldest->kept);
        idle_.push_back(oldest);
      }
      // Of one that was captured, the Work alone knows when its tensors may go.
      under_way_.pop_front();
      // The lock is let go of first, then the garbage.
    }
  }

  /// The tensors of one that is ordered before whatever may use their memory next.
  void let_go_of_tensors(Flight<D>& flight) {
    std::vector<at::Tensor> garbage;
    std::lock_guard lock(mutex_);
    garbage.swap(flight.kept);
  }

  /// The Work no longer needs it.
  void give_back(Flight<D>& flight) noexcept {
    std::lock_guard lock(mutex_);
    flight.held = false;
  }

  [[nodiscard]] bool landed(const Flight<D>& flight) const {
    std::lock_guard lock(mutex_);
    return flight.landed;
  }
  void land(Flight<D>& flight) {
    std::lock_guard lock(mutex_);
    flight.landed = true;
  }

  [[nodiscard]] bool empty() const {
    std::lock_guard lock(mutex_);
    return under_way_.empty();
  }
  /// What the oldest is, if there is one.
  [[nodiscard]] std::pair<Call, Label> oldest() const {
    std::lock_guard lock(mutex_);
    if (under_way_.empty()) return {};
    return {under_way_.front()->call, under_way_.front()->label};
  }

 private:
  D device_;
  mutable std::mutex mutex_;
  std::deque<FlightPtr> under_way_, idle_;
};

}  // namespace lockstep::detail
