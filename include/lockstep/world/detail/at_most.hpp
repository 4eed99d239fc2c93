#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace lockstep::detail {

/// A thread that runs work which a stuck peer or pipe may block. The destructor joins a thread whose work has
/// ended, and leaves any other thread behind, so the work must own what it uses. Work that has not begun by
/// then is never run nor destroyed: a process that exits may have destroyed its static objects.
class LeavableThread {
 public:
  /// Starts `work`, which is called once and then destroyed. Throws std::system_error if no thread can be started.
  template <class Work>
  explicit LeavableThread(Work work)
      : shared_(std::make_shared<Shared>()),
        thread_([shared = shared_, work = std::make_unique<Work>(std::move(work))]() mutable {
          std::unique_lock lock(shared->mutex);
          shared->changed.wait(lock, [&] { return !shared->left; });  // once left, never returns
          shared->begun = true;
          lock.unlock();
          std::exception_ptr error;
          try {
            (*work)();
          } catch (...) {
            error = std::current_exception();
          }
          work.reset();
          lock.lock();
          shared->error = std::move(error);
          shared->ended = true;
          shared->changed.notify_all();
        }) {}

  ~LeavableThread() {
    static_cast<void>(cancel());
    ends_within({}) ? thread_.join() : thread_.detach();
  }
  LeavableThread(const LeavableThread&) = delete;
  LeavableThread& operator=(const LeavableThread&) = delete;

  /// Waits for the end of the work, at most `timeout`. Returns whether it has ended.
  [[nodiscard]] bool ends_within(std::chrono::milliseconds timeout) const {
    std::unique_lock lock(shared_->mutex);
    return shared_->changed.wait_for(lock, timeout, [&] { return shared_->ended; });
  }

  /// Keeps work that has not begun from running. Returns whether it had not begun.
  [[nodiscard]] bool cancel() const {
    const std::lock_guard lock(shared_->mutex);
    shared_->left = !shared_->begun;
    return shared_->left;
  }

  /// Throws what the work has thrown. The work must have ended.
  void rethrow() const {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->error) std::rethrow_exception(shared_->error);
  }

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool begun = false, ended = false, left = false;
    std::exception_ptr error;
  };

  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

/// Runs `work` in a LeavableThread and waits for it, at most `timeout`. Ignores what it throws: the failure
/// that is being reported matters more. No-op if no thread can be started.
inline void at_most(std::chrono::milliseconds timeout, std::function<void()> work) try {
  static_cast<void>(LeavableThread(std::move(work)).ends_within(timeout));
} catch (const std::system_error&) {
}

}  // namespace lockstep::detail
