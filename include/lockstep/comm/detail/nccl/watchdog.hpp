#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace lockstep::detail {

/// A thread that polls while there is something to watch, and sleeps otherwise.
///
/// Thread safety: any thread but its own may call any function.
class Watchdog {
 public:
  /// Calls `enter()` once. Then, when woken, calls `look()` every `interval` until it returns false. `look`
  /// must not throw.
  Watchdog(std::chrono::milliseconds interval, std::function<void()> enter, std::function<bool()> look)
      : interval_(interval),
        thread_([this, enter = std::move(enter), look = std::move(look)] { run(enter, look); }) {}
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// Starts the polling, because there is something to watch.
  void wake() {
    std::lock_guard lock(mutex_);
    if (!std::exchange(busy_, true)) changed_.notify_all();
  }

 private:
  void run(const std::function<void()>& enter, const std::function<bool()>& look) {
    try {
      enter();
    } catch (...) {  // look() finds the same failure
    }
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || busy_; });
      changed_.wait_for(lock, interval_, [this] { return stopping_; });
      if (stopping_) return;
      busy_ = false;  // a wake() from here on causes another look
      lock.unlock();
      const bool more = look();
      lock.lock();
      busy_ = busy_ || more;
    }
  }

  const std::chrono::milliseconds interval_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false, busy_ = false;
  std::thread thread_;
};

}  // namespace lockstep::detail
