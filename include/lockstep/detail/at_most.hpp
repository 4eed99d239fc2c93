#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

namespace lockstep::inline v0_1::detail {

/// A thread that runs work which a stuck peer or pipe may block. The destructor joins a thread whose work has
/// ended, and leaves any other thread behind, so the work must own what it uses. Work that has not begun by
/// then is never run nor destroyed: a process that exits may have destroyed its static objects.
class LeavableThread {
 public:
  /// Starts `work`, which is called once and then destroyed. Throws std::system_error if the system grants no
  /// thread.
  template <class Work>
  explicit LeavableThread(Work work) {
    std::packaged_task<void()> task([work = std::make_unique<Work>(std::move(work))]() mutable {
      const auto once = std::move(work);  // is destroyed before the end is seen
      (*once)();
    });
    end_ = task.get_future().share();
    thread_ = std::thread([begun = begun_, task = std::move(task)]() mutable {
      while (begun->exchange(true)) pause();  // left: never returns
      task();
    });
  }
  ~LeavableThread() {
    static_cast<void>(cancel());
    ends_within({}) ? thread_.join() : thread_.detach();
  }
  LeavableThread(const LeavableThread&) = delete;
  LeavableThread& operator=(const LeavableThread&) = delete;

  /// Waits for the end of the work, at most `timeout`. Returns whether it has ended.
  [[nodiscard]] bool ends_within(std::chrono::milliseconds timeout) const {
    return end_.wait_for(timeout) == std::future_status::ready;
  }
  /// Keeps work that has not begun from running. Returns whether it had not begun.
  [[nodiscard]] bool cancel() const { return !begun_->exchange(true); }
  /// Throws what the work has thrown. The work must have ended.
  void rethrow() const { end_.get(); }

 private:
  const std::shared_ptr<std::atomic<bool>> begun_ = std::make_shared<std::atomic<bool>>(false);
  std::shared_future<void> end_;
  std::thread thread_;
};

/// Runs `work` in a LeavableThread and waits for it, at most `timeout`. Ignores what it throws: the failure
/// that is being reported matters more. No-op if no thread can be started.
inline void at_most(std::chrono::milliseconds timeout, std::function<void()> work) try {
  static_cast<void>(LeavableThread(std::move(work)).ends_within(timeout));
} catch (const std::system_error&) {
}

/// The same for work that returns a value. Returns `otherwise` if there is none within `timeout`.
template <class Result, class Work>
Result at_most(std::chrono::milliseconds timeout, Result otherwise, Work work) try {
  const auto result = std::make_shared<Result>(otherwise);
  const LeavableThread thread([result, work = std::move(work)]() mutable { *result = work(); });
  return thread.ends_within(timeout) ? *result : otherwise;
} catch (const std::system_error&) {
  return otherwise;
}

}  // namespace lockstep::inline v0_1::detail
