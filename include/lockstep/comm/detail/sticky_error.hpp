#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <utility>

namespace lockstep::detail {

/// Keeps the first of many errors. Thread-safe.
class StickyError {
 public:
  /// Returns whether there is an error. Costs one atomic read.
  [[nodiscard]] bool set() const noexcept { return set_.load(std::memory_order_acquire); }

  /// Keeps the error if it is the first. Returns whether it is.
  bool keep(std::exception_ptr error) noexcept {
    std::lock_guard lock(mutex_);
    if (error_) return false;
    error_ = std::move(error);
    set_.store(true, std::memory_order_release);
    return true;
  }
  [[nodiscard]] std::exception_ptr get() const noexcept {
    std::lock_guard lock(mutex_);
    return error_;
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> set_{false};
  std::exception_ptr error_;
};

}  // namespace lockstep::detail
