#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include <c10/util/SmallVector.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/gloo_group.hpp"

namespace lockstep::detail {

/// The Work of GlooComm. On a CPU wait() and synchronize() are equivalent. Not thread-safe.
class [[nodiscard]] GlooWork {
 public:
  /// Constructs a Work that is complete.
  GlooWork() = default;
  GlooWork(std::shared_ptr<GlooGroup> group, Call call) : group_(std::move(group)), call_(call) {}

  GlooWork(GlooWork&&) noexcept = default;
  GlooWork& operator=(GlooWork&& other) noexcept {
    if (this == &other) return *this;
    let_go();
    group_ = std::move(other.group_);
    call_ = other.call_;
    parts_ = std::move(other.parts_);
    other.parts_.clear();
    at_end_ = std::move(other.at_end_);
    error_ = std::move(other.error_);
    return *this;
  }
  ~GlooWork() { let_go(); }

  void wait() { wait_until(call_.start + timeout()); }
  void synchronize() { wait_until(call_.start + timeout()); }
  void synchronize(std::chrono::milliseconds timeout) {
    // Take the minimum first: the largest duration would overflow the clock.
    wait_until(std::min(std::chrono::steady_clock::now() + std::min(timeout, this->timeout()),
                        call_.start + this->timeout()));
  }

  [[nodiscard]] std::exception_ptr error() const noexcept {
    if (error_) return error_;
    for (const auto& part : parts_)
      if (auto error = part->exception()) return error;
    return nullptr;
  }

  /// Adds a c10d work that must be complete before this one is.
  void add(c10::intrusive_ptr<c10d::Work> part) { parts_.push_back(std::move(part)); }
  /// Sets the function that the first wait runs after completion. It never runs if nothing waits.
  void at_end(std::function<void()> work) { at_end_ = std::move(work); }

 private:
  [[nodiscard]] std::chrono::milliseconds timeout() const {
    return group_ ? group_->timeout() : std::chrono::milliseconds(0);
  }

  void wait_until(std::chrono::steady_clock::time_point until) {
    if (error_) std::rethrow_exception(error_);
    try {
      while (!parts_.empty()) {
        if (call_.peer >= 0)
          group_->await_message(call_, parts_.front(), until);
        else
          group_->await(call_, *parts_.front(), until);
        parts_.erase(parts_.begin());  // a message may be waited for only once
      }
    } catch (...) {
      if (group_->failed()) error_ = std::current_exception();
      throw;
    }
    group_.reset();
    if (at_end_) std::exchange(at_end_, nullptr)();
  }

  // Gloo drops a message whose work is destroyed, so the group keeps it.
  void let_go() noexcept {
    if (group_ && call_.peer >= 0)
      for (auto& part : parts_) group_->keep(std::move(part));
  }

  std::shared_ptr<GlooGroup> group_;
  Call call_;
  c10::SmallVector<c10::intrusive_ptr<c10d::Work>, 1> parts_;
  std::function<void()> at_end_;
  std::exception_ptr error_;
};

static_assert(AsyncWork<GlooWork>);

}  // namespace lockstep::detail
