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

#include "lockstep/comm/detail/call.hpp"
#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

/// The caller's name for the data of a call, such as a bucket and its parameters, for error messages.
using Label = std::shared_ptr<const std::string>;

/// Returns "all_reduce #57 (bucket 2 of 5)".
inline std::string text_of(const Call& call, const Label& label) {
  return label ? detail::formatted("{} ({})", call.text(), *label) : call.text();
}

/// The work of one call on the communicator's stream, from its launch to its completion.
template <NcclDevice D>
struct InFlightOp {
  Call call;
  Label label;
  typename D::Event ready{};     // recorded on the caller's stream, before the op
  typename D::Event done{};      // recorded on the communicator's stream, after the op
  typename D::Stream from{};     // the caller's stream
  std::vector<at::Tensor> kept;  // until complete, or ordered before later work on the caller's stream
  bool completed = false;        // complete, without an earlier error
  bool ended = false;            // its events are no longer queried, except through a Work that holds it
  bool held = false;             // by a Work
  bool captured = false;         // into a graph: it does not run now, and its events cannot be queried
};

/// The operations of a communicator, in stream order. Ended operations are reused: after warm-up, a
/// collective allocates nothing here.
///
/// Thread safety: any thread may call any function, except release(), which is for threads of the program.
/// Only take(), sweep() and release() call on the device or free memory, which may block; they do so without
/// the lock that the other functions take.
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

  /// Returns an unused op, held by the caller, who starts it or puts it back.
  [[nodiscard]] InFlightOpPtr take() {
    InFlightOpPtr op = idle();
    if (!op) op = made();
    op->label = nullptr;
    op->completed = op->ended = op->captured = false;
    op->held = true;
    return op;
  }

  /// Adds an op whose `done` event is recorded. Only its Work tracks a captured op.
  void start(const InFlightOpPtr& op) {
    std::lock_guard lock(mutex_);
    if (!op->captured) under_way_.push_back(op);
  }

  /// Finds ended ops, oldest first. An op counts as complete unless `failed()` returns true after the op was
  /// seen to have ended. Throws the device's exceptions.
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
  /// Frees the tensors of ended ops. LibTorch's allocator may wait for the device meanwhile.
  void release() {
    std::vector<at::Tensor> garbage;
    std::lock_guard lock(mutex_);
    garbage.swap(ended_tensors_);
    // destroyed in reverse order: the lock is released first, then the garbage
  }
  /// Call it once no graph capture is active. Releases the tensors of captured ops that were never joined:
  /// the graph owns their memory.
  void end_capture() {
    std::vector<std::vector<at::Tensor>> garbage;
    std::lock_guard lock(mutex_);
    for (InFlightOpPtr& op : captured_) {
      garbage.push_back(std::exchange(op->kept, {}));
      idle_.push_back(std::move(op));
    }
    captured_.clear();
  }

  /// Leaks the tensors of all ops in flight. For a device that has failed or hangs: it may still access their
  /// memory.
  void abandon() noexcept {
    std::lock_guard lock(mutex_);
    for (const InFlightOpPtr& op : under_way_) abandon(*op);
    under_way_.clear();
  }
  void abandon(InFlightOp<D>& op) noexcept {
    static_cast<void>(new (std::nothrow) std::vector<at::Tensor>(std::move(op.kept)));
  }

  /// Releases the tensors of an op that is ordered before all later uses of their memory.
  void release_tensors(InFlightOp<D>& op) {
    std::vector<at::Tensor> garbage;
    std::lock_guard lock(mutex_);
    garbage.swap(op.kept);
    if (op.captured) op.ended = true;  // later work is ordered after it by now, or never will be
  }

  /// The holder of `op` no longer needs it.
  void give_back(const InFlightOpPtr& op) noexcept {
    std::lock_guard lock(mutex_);
    op->held = false;
    if (op->ended)
      idle_.push_back(op);
    else if (op->captured)
      captured_.push_back(op);
  }
  /// give_back() for an op that was never started.
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
  /// Returns the call and label of the oldest op in flight, std::nullopt if there is none.
  [[nodiscard]] std::optional<std::pair<Call, Label>> oldest() const {
    std::lock_guard lock(mutex_);
    if (under_way_.empty()) return std::nullopt;
    return std::pair(under_way_.front()->call, under_way_.front()->label);
  }

 private:
  // Returns an op for reuse, or null.
  [[nodiscard]] InFlightOpPtr idle() {
    std::lock_guard lock(mutex_);
    if (idle_.empty()) return nullptr;
    InFlightOpPtr op = std::move(idle_.back());
    idle_.pop_back();
    return op;
  }
  // Creates an op. Reserves room for it in each list, so that giving it back cannot fail.
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
  std::mutex sweep_mutex_;  // held while events are queried: they must not be recorded again meanwhile
  mutable std::mutex mutex_;
  std::deque<InFlightOpPtr> under_way_;
  std::vector<InFlightOpPtr> all_, idle_;
  std::vector<at::Tensor> ended_tensors_;  // of ended operations, until release()
  std::vector<InFlightOpPtr> captured_;    // held by no Work; their tensors may still be in use
};

}  // namespace lockstep::detail
