#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <queue>
#include <random>
#include <utility>

#include "support/catch.hpp"

namespace lockstep_test {

/// A clock, what is to happen, and random numbers. A simulation derives from it.
class VirtualTime {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = Time::duration;

  explicit VirtualTime(std::uint64_t seed) : random_(seed) {}

 protected:
  ~VirtualTime() = default;

  std::uint64_t draw(std::int64_t least, std::int64_t most) {
    return static_cast<std::uint64_t>(std::uniform_int_distribution<std::int64_t>(least, most)(random_));
  }
  Duration milliseconds(std::int64_t least, std::int64_t most) {
    return std::chrono::milliseconds(draw(least, most));
  }
  /// The time that a message takes; some connections are slow for a moment.
  Duration delay() { return std::chrono::microseconds(draw(50, draw(0, 99) == 0 ? 200'000 : 2'000)); }

  void at(Duration delay, std::function<void()> work) {
    events_.push({now_ + delay, order_++, std::move(work)});
  }
  /// Does what is to happen until nothing is. Calls `before(time)` before the clock advances, and `after()` after each event.
  template <class Before, class After>
  void run_events(const Before& before, const After& after) {
    while (!events_.empty()) {
      const auto next = events_.top();
      events_.pop();
      before(next.time);
      now_ = std::max(now_, next.time);
      next.work();
      after();
      if (++steps_ > 4'000'000) FAIL("the run does not end");
    }
  }

  const Time begin_ = Time(std::chrono::hours(1));
  Time now_ = begin_;

 private:
  struct Scheduled {
    Time time;
    std::uint64_t order;
    std::function<void()> work;
    bool operator<(const Scheduled& other) const {
      return std::pair(time, order) > std::pair(other.time, other.order);
    }
  };

  std::mt19937_64 random_;
  std::uint64_t order_ = 0, steps_ = 0;
  std::priority_queue<Scheduled> events_;
};

}  // namespace lockstep_test
