#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace lockstep::detail {

/// Runs `work` in a thread and waits for it, at most `timeout`. A thread that a stuck peer or pipe blocks is
/// left behind.
inline void at_most(std::chrono::milliseconds timeout, std::function<void()> work) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable done_changed;
    bool done = false;
  };
  auto shared = std::make_shared<Shared>();
  try {
    std::thread([shared, work = std::move(work)] {
      try {
        work();
      } catch (...) {  // the failure being reported matters, not this one
      }
      std::lock_guard lock(shared->mutex);
      shared->done = true;
      shared->done_changed.notify_all();
    }).detach();
  } catch (const std::system_error&) {
    return;
  }
  std::unique_lock lock(shared->mutex);
  shared->done_changed.wait_for(lock, timeout, [&] { return shared->done; });
}

}  // namespace lockstep::detail
