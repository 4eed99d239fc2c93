#pragma once

#include <algorithm>

#include "lockstep/comm/detail/gloo_group.hpp"
#include "lockstep/comm/detail/gloo_work.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE GlooWork::GlooWork() = default;

LOCKSTEP_INLINE GlooWork::GlooWork(GlooWork&&) noexcept = default;

LOCKSTEP_INLINE GlooWork::GlooWork(std::shared_ptr<GlooGroup> group, Call call)
    : group_(std::move(group)), call_(call) {}

LOCKSTEP_INLINE GlooWork& GlooWork::operator=(GlooWork&& other) noexcept {
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

LOCKSTEP_INLINE GlooWork::~GlooWork() {
  let_go();
}

LOCKSTEP_INLINE void GlooWork::wait() {
  wait_until(call_.start + timeout());
}

LOCKSTEP_INLINE void GlooWork::synchronize() {
  wait_until(call_.start + timeout());
}

LOCKSTEP_INLINE void GlooWork::synchronize(std::chrono::milliseconds timeout) {
  // Take the minimum first: the largest duration would overflow the clock.
  wait_until(std::min(std::chrono::steady_clock::now() + std::min(timeout, this->timeout()),
                      call_.start + this->timeout()));
}

LOCKSTEP_INLINE std::exception_ptr GlooWork::error() const noexcept {
  if (error_) return error_;
  for (const auto& part : parts_)
    if (auto error = part->exception()) return error;
  return nullptr;
}

LOCKSTEP_INLINE void GlooWork::add(c10::intrusive_ptr<c10d::Work> part) {
  parts_.push_back(std::move(part));
}

LOCKSTEP_INLINE void GlooWork::at_end(std::function<void()> work) {
  at_end_ = std::move(work);
}

LOCKSTEP_INLINE std::chrono::milliseconds GlooWork::timeout() const {
  return group_ ? group_->timeout() : std::chrono::milliseconds(0);
}

LOCKSTEP_INLINE void GlooWork::wait_until(std::chrono::steady_clock::time_point until) {
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
    if (group_->state().failed()) error_ = std::current_exception();
    throw;
  }
  group_.reset();
  if (at_end_) std::exchange(at_end_, nullptr)();
}

LOCKSTEP_INLINE void GlooWork::let_go() noexcept {
  if (group_ && call_.peer >= 0)
    for (auto& part : parts_) group_->keep(std::move(part));
}

}  // namespace lockstep::detail
