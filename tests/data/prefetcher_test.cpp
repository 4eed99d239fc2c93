#include "lockstep/data/detail/prefetcher.hpp"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <stdexcept>

#include "support/catch.hpp"

namespace prefetcher_test {

using Squares = lockstep::detail::Prefetcher<int, int>;

namespace {

Squares::Source count_to(int end, std::atomic<int>* drawn = nullptr) {
  return [i = 0, end, drawn]() mutable -> std::optional<int> {
    if (i == end) return std::nullopt;
    if (drawn) ++*drawn;
    return i++;
  };
}

void pause(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

}  // namespace

TEST_CASE("results come in the order of the jobs, whatever the timing") {
  for (const std::size_t workers : {1, 2, 5}) {
    for (const std::size_t depth : {0, 1, 3, 100}) {
      Squares squares(workers, depth, count_to(60), [](int& i) {
        if (i % 7 == 0) pause(2);
        return i * i;
      });
      for (int i = 0; i < 60; ++i) {
        const auto result = squares.next();
        REQUIRE(result.has_value());
        CHECK(*result == i * i);
      }
      CHECK_FALSE(squares.next().has_value());
      CHECK_FALSE(squares.next().has_value());
    }
  }
}

TEST_CASE("no more jobs are drawn ahead than asked for") {
  std::atomic<int> drawn = 0;
  Squares squares(2, 4, count_to(100, &drawn), [](int& i) { return i; });
  CHECK(drawn == 0);
  for (int i = 0; i < 50; ++i) {
    CHECK(*squares.next() == i);
    CHECK(drawn <= i + 1 + 4);
  }
}

TEST_CASE("workers work at the same time") {
  // Each job waits for the other: one worker alone would never end.
  std::atomic<int> inside = 0;
  Squares squares(2, 2, count_to(2), [&](int& i) {
    ++inside;
    while (inside < 2) std::this_thread::yield();
    return i;
  });
  CHECK(*squares.next() == 0);
  CHECK(*squares.next() == 1);
}

TEST_CASE("what a worker throws arrives with its job, after the results before it") {
  Squares squares(3, 6, count_to(10), [](int& i) {
    if (i == 4) throw std::runtime_error("job 4");
    pause(1);
    return i;
  });
  for (int i = 0; i < 4; ++i) CHECK(*squares.next() == i);
  CHECK_THROWS_WITH(squares.next(), "job 4");
  CHECK(*squares.next() == 5);
}

TEST_CASE("leaving early joins every worker, finishing only the jobs that run") {
  std::atomic<int> alive = 0, finished = 0;
  struct Alive {
    std::atomic<int>* count = nullptr;
    ~Alive() {
      if (count) --*count;
    }
  };
  {
    Squares squares(
        3, 50, count_to(1000),
        [&](int& i) {
          pause(20);
          ++finished;
          return i;
        },
        [&] {
          thread_local Alive mine;
          mine.count = &alive;
          ++alive;
        });
    CHECK(*squares.next() == 0);
  }
  CHECK(alive == 0);
  CHECK(finished <= 30);
}

TEST_CASE("one that is never asked starts no job and ends at once") {
  std::atomic<int> drawn = 0;
  {
    Squares squares(2, 4, count_to(5, &drawn), [](int& i) { return i; });
  }
  CHECK(drawn == 0);
}

TEST_CASE("threads that the machine does not give are missed in words") {
  // No address space holds such a stack: starting a thread fails as it does where there are too many.
  pthread_attr_t usual, huge;
  REQUIRE(pthread_getattr_default_np(&usual) == 0);
  REQUIRE(pthread_getattr_default_np(&huge) == 0);
  REQUIRE(pthread_attr_setstacksize(&huge, std::size_t{1} << 56) == 0);
  REQUIRE(pthread_setattr_default_np(&huge) == 0);
  std::string message;
  try {
    Squares squares(3, 4, count_to(10), [](int& i) { return i; });
  } catch (const lockstep::Error& error) {
    message = error.what();
  }
  REQUIRE(pthread_setattr_default_np(&usual) == 0);
  CHECK_THAT(message, ContainsSubstring("only 0 of 3 worker threads could be started (") &&
                          ContainsSubstring("ask for fewer workers"));
}

}  // namespace prefetcher_test
