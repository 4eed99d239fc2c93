#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "lockstep/comm/detail/call.hpp"
#include "lockstep/comm/detail/nccl/device.hpp"

namespace lockstep::detail {

/// What the caller calls what it sends, such as a bucket and its parameters, for the messages of errors.
using Label = std::shared_ptr<const std::string>;

/// "all_reduce #57 (bucket 2 of 5)"
inline std::string text_of(const Call& call, const Label& label) {
  return label ? fmt::format("{} ({})", call.text(), *label) : call.text();
}

/// One call's work on the communicator's stream, from its issue to its end.
template <NcclDevice D>
struct InFlightOp {
  Call call;
  Label label;
  typename D::Event ready{};  // recorded on the caller's stream, before it
  typename D::Event done{};   // recorded on the communicator's stream, behind it
  typename D::Stream from{};  // the caller's
  std::vector<at::Tensor>
      kept;                // until it is complete, or ordered before what follows on the caller's stream
  bool completed = false;  // complete, without an error before it
  bool ended = false;      // so that nobody asks for its events any more, but a Work that holds it
  bool held = false;       // by a Work
  bool captured = false;   // into a graph: nothing of it happens now, and its events cannot be asked
};

/// The operations of a communicator, in the order of its stream. Those that have ended are used again: once
/// warm, a collective allocates nothing here.
///
/// Thread safety: every function may be called from any thread, except that release() is for threads of the
/// program. Only take(), sweep() and release() call on the device or free memory, which may block; they do so
/// without the lock that the other functions take.
template <NcclDevice D>
class InFlightOps {
 public:
  using InFlightOpPtr = std::shared_ptr<InFlightOp<D>>;

  explicit InFlightOps(const D& device) : device_(device) {}
  ~InFlightOps() {
    for (const InFlightOpPtr& op : all_) {
      device_.destroy_event(op->ready);
      device_.destroy_event(op->done);
    }
  }
  InFlightOps(const InFlightOps&) = delete;
  InFlightOps& operator=(const InFlightOps&) = delete;

  /// A op to be filled, held by the caller, who starts it or gives it back.
  [[nodiscard]] InFlightOpPtr take() {
    InFlightOpPtr op = idle();
    if (!op) op = made();
    op->label = nullptr;
    op->completed = op->ended = op->captured = false;
    op->held = true;
    return op;
  }

  /// Its `done` has been recorded. Of one that is captured, the Work alone knows when it is over.
  void start(const InFlightOpPtr& op) {
    std::lock_guard lock(mutex_);
    if (!op->captured) under_way_.push_back(op);
  }

  /// Finds those that have ended, from the oldest on; they count as complete unless `failed()`, asked after
  /// each was seen to have ended. Throws what the device throws.
  template <class Failed>
  void sweep(Failed&& failed) {
    std::lock_guard sweeping(sweep_mutex_);
    for (;;) {
      InFlightOpPtr oldest;
      {
        std::lock_guard lock(mutex_);
        if (under_way_.empty()) return;
        oldest = under_way_.front();
      }
      if (!device_.done(oldest->done)) return;
      const bool completed = !failed();
      std::lock_guard lock(mutex_);
      under_way_.pop_front();
      if (completed) oldest->completed = true;
      oldest->ended = true;
      std::move(oldest->kept.begin(), oldest->kept.end(), std::back_inserter(ended_tensors_));
      oldest->kept.clear();
      if (!oldest->held) idle_.push_back(oldest);
    }
  }
  /// Frees the tensors of those that have ended. LibTorch's allocator may wait for the device in that.
  void release() {
    std::vector<at::Tensor> garbage;
    std::lock_guard lock(mutex_);
    garbage.swap(ended_tensors_);
    // The lock is released first, then the garbage.
  }
  /// No graph is being captured any more: what was captured and never joined needs its tensors no longer,
  /// since their memory stays the graph's.
  void end_capture() {
    std::vector<std::vector<at::Tensor>> garbage;
    std::lock_guard lock(mutex_);
    for (InFlightOpPtr& op : captured_) {
      garbage.push_back(std::exchange(op->kept, {}));
      idle_.push_back(std::move(op));
    }
    captured_.clear();
  }

  /// The device has failed, or does not end: nobody knows what it still does with the tensors of those that
  /// are under way, so that their memory is never given back.
  void abandon() noexcept {
    std::lock_guard lock(mutex_);
    for (const InFlightOpPtr& op : under_way_) abandon(*op);
    under_way_.clear();
  }
  void abandon(InFlightOp<D>& op) noexcept {
    static_cast<void>(new (std::nothrow) std::vector<at::Tensor>(std::move(op.kept)));
  }

  /// The tensors of one that is ordered before whatever may use their memory next.
  void let_go_of_tensors(InFlightOp<D>& op) {
    std::vector<at::Tensor> garbage;
    std::lock_guard lock(mutex_);
    garbage.swap(op.kept);
    if (op.captured) op.ended = true;  // what else is ordered behind it, or never will be
  }

  /// Whoever held it no longer needs it.
  void give_back(const InFlightOpPtr& op) noexcept {
    std::lock_guard lock(mutex_);
    op->held = false;
    if (op->ended)
      idle_.push_back(op);
    else if (op->captured)
      captured_.push_back(op);
  }
  /// The same for one that was never started.
  void put_back(const InFlightOpPtr& op) noexcept {
    op->kept.clear();
    std::lock_guard lock(mutex_);
    op->held = false;
    idle_.push_back(op);
  }

  [[nodiscard]] bool completed(const InFlightOp<D>& op) const {
    std::lock_guard lock(mutex_);
    return op.completed;
  }
  void complete(InFlightOp<D>& op) {
    std::lock_guard lock(mutex_);
    op.completed = true;
  }

  [[nodiscard]] bool empty() const {
    std::lock_guard lock(mutex_);
    return under_way_.empty();
  }
  /// What the oldest is, if there is one.
  [[nodiscard]] std::optional<std::pair<Call, Label>> oldest() const {
    std::lock_guard lock(mutex_);
    if (under_way_.empty()) return std::nullopt;
    return std::pair(under_way_.front()->call, under_way_.front()->label);
  }

 private:
  // One that is used again, or null.
  [[nodiscard]] InFlightOpPtr idle() {
    std::lock_guard lock(mutex_);
    if (idle_.empty()) return nullptr;
    InFlightOpPtr op = std::move(idle_.back());
    idle_.pop_back();
    return op;
  }
  // A new one. There is room for all of them in each list: giving back cannot fail.
  [[nodiscard]] InFlightOpPtr made() {
    auto op = std::make_shared<InFlightOp<D>>();
    {
      std::lock_guard lock(mutex_);
      if (all_.size() == all_.capacity())
        for (auto* list : {&all_, &idle_, &captured_}) list->reserve(2 * all_.size() + 8);
    }
    op->ready = device_.make_event();
    try {
      op->done = device_.make_event();
    } catch (...) {
      device_.destroy_event(op->ready);
      throw;
    }
    std::lock_guard lock(mutex_);
    all_.push_back(op);
    return op;
  }

  D device_;
  std::mutex sweep_mutex_;  // of those that ask the device: an event is not recorded anew meanwhile
  mutable std::mutex mutex_;
  std::deque<InFlightOpPtr> under_way_;
  std::vector<InFlightOpPtr> all_, idle_;
  std::vector<at::Tensor> ended_tensors_;  // of operations that have ended, until release()
  std::vector<InFlightOpPtr> captured_;    // that no Work holds, and whose tensors may still be in use
};

}  // namespace lockstep::detail
