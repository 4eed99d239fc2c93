#include "lockstep/comm/detail/nccl/watchdog.hpp"

#include <atomic>
#include <thread>
#include <vector>

#include "happens_before.hpp"
#include "support/catch.hpp"

namespace watchdog_test {

using namespace std::chrono_literals;
using lockstep::detail::Watchdog;

namespace {

template <class Condition>
bool soon(Condition condition) {
  for (int i = 0; i < 2000 && !condition(); ++i) std::this_thread::sleep_for(1ms);
  return condition();
}

}  // namespace

TEST_CASE("a watchdog looks while there is something to look after, and sleeps otherwise") {
  std::atomic<int> left{0}, looks{0};
  std::atomic<bool> entered{false};
  Watchdog dog(
      1ms, [&] { entered = true; },
      [&] {
        ++looks;
        return left > 0 && --left > 0;
      });
  CHECK(soon([&] { return entered.load(); }));
  std::this_thread::sleep_for(20ms);
  CHECK(looks == 0);
  for (int round = 0; round < 3; ++round) {
    looks = 0;
    left = 5;
    dog.wake();
    CHECK(soon([&] { return left == 0; }));
    std::this_thread::sleep_for(20ms);
    CHECK(looks >= 5);
    CHECK(looks <= 6);
  }
}

TEST_CASE("waking loses nothing, and a watchdog ends at once") {
  std::atomic<int> issued{0}, seen{0};
  {
    Watchdog dog(
        1ms, [] {}, [&] { return seen.exchange(issued) != issued; });
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&] {
        for (int i = 0; i < 200; ++i) {
          ++issued;
          dog.wake();
        }
      });
    for (std::thread& thread : threads) thread.join();
    CHECK(soon([&] { return seen == 800; }));
  }
  // An end that waited for the next look would take an hour.
  Watchdog dog(
      1h, [] {}, [] { return true; });
  dog.wake();
}

TEST_CASE("the log of what happens before what") {
  lockstep_test::HappensBefore log;
  const int host = log.add_actor("the host"), a = log.add_actor("stream a"), b = log.add_actor("stream b");
  float memory[8];
  log.access(a, memory, sizeof memory, true, "a kernel");
  SECTION("two that nothing orders") {
    log.access(b, memory + 4, 4, false, "another");
    REQUIRE(log.violations().size() == 1);
    CHECK(log.violations()[0] ==
          "another on stream b reads what a kernel on stream a writes, and nothing orders them");
  }
  SECTION("an event orders them") {
    const auto event = log.clock(a);
    log.learn(b, event);
    log.access(b, memory, 4, true, "another");
    CHECK(log.violations().empty());
    log.access(a, memory, 4, false, "a third");
    CHECK(log.violations().size() == 1);
  }
  SECTION("what is read twice needs no order") {
    log.learn(b, log.clock(a));
    log.access(b, memory, 4, false, "a read");
    log.access(a, memory, 4, false, "a read");
    CHECK(log.violations().empty());
  }
  SECTION("memory is free when its owner or the host knows that it is not in use") {
    log.access(b, memory + 100, 4, true, "elsewhere");
    log.release(memory, sizeof memory, host, b);
    CHECK(log.violations().size() == 1);
    log.access(a, memory, 4, true, "a kernel");
    log.release(memory, sizeof memory, host, a);
    CHECK(log.violations().size() == 1);
  }
}

}  // namespace watchdog_test
