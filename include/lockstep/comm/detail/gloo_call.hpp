#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/detail/call.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

/// Exposes the protected members of c10d's Work. Waiting on its condition variable directly avoids the
/// exception, with its stack trace, by which Work::wait reports a timeout.
struct WorkInternals : c10d::Work {
  static constexpr auto mutex = &WorkInternals::mutex_;
  static constexpr auto changed = &WorkInternals::cv_;
  static constexpr auto completed = &WorkInternals::completed_;
  static constexpr auto exception = &WorkInternals::exception_;
};

/// Calls `ring` on a thread of its own at `when`, unless the Alarm is destroyed earlier.
class Alarm {
 public:
  Alarm(std::chrono::steady_clock::time_point when, std::function<void()> ring)
      : thread_([this, when, ring = std::move(ring)] {
          std::unique_lock lock(mutex_);
          if (!changed_.wait_until(lock, when, [&] { return off_; })) ring();
        }) {}
  ~Alarm() {
    {
      std::lock_guard lock(mutex_);
      off_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool off_ = false;
  std::thread thread_;
};

/// Returns Gloo's error text without LibTorch's stack trace and source locations.
inline std::string gloo_error_text(const std::exception_ptr& cause) {
  std::string text = "of an unknown error";
  try {
    std::rethrow_exception(cause);
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  } catch (...) {
  }
  text = text.substr(0, text.find('\n'));
  // "[/path/to/pair.cc:553] Connection closed by peer [127.0.0.1]:41234"
  if (const auto end = text.find("] ");
      text.starts_with("[") && text.substr(0, end).find(".cc:") != std::string::npos)
    text = text.substr(end + 2);
  // "[enforce fail at /path/to/pair.cc:544] op.preamble.length <= op.nbytes. 60 vs 20"
  if (const auto sizes = text.find("op.nbytes. "); sizes != std::string::npos)
    return detail::formatted("the ranks gave it tensors of different sizes (a part of {} bytes)",
                             text.substr(sizes + std::string_view("op.nbytes. ").size()));
  return text.substr(0, text.find(". This is typically"));
}

}  // namespace lockstep::detail
