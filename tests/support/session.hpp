#pragma once

// For the file with main alone: it registers a listener.
#include <cstdio>
#include <string>
#include <utility>

#include "support/catch.hpp"

namespace lockstep_test {

#if __has_include(<catch2/catch_all.hpp>)
using EventListener = Catch::EventListenerBase;
#else
using EventListener = Catch::TestEventListenerBase;
#endif

/// Finds test cases that ran without an assertion and did not say why: WARN("SKIPPED: reason").
class AssertionCheck : public EventListener {
 public:
  using EventListener::EventListener;

  /// How many there were.
  static int& found() {
    static int count = 0;
    return count;
  }

  void testCaseStarting(const Catch::TestCaseInfo&) override { warned_ = false; }
  // Returns bool in Catch2 2, nothing in Catch2 3.
  using Ended =
      decltype(std::declval<EventListener&>().assertionEnded(std::declval<const Catch::AssertionStats&>()));
  Ended assertionEnded(const Catch::AssertionStats& stats) override {
    if (stats.assertionResult.getResultType() == Catch::ResultWas::Warning) warned_ = true;
    return static_cast<Ended>(true);
  }
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    if (warned_ || stats.totals.assertions.total() > 0) return;
    ++found();
    std::fprintf(stderr, "FAILED: the test case '%s' made no assertion\n", name(stats.testInfo).c_str());
  }

 private:
  static std::string name(const Catch::TestCaseInfo& info) { return info.name; }
  static std::string name(const Catch::TestCaseInfo* info) { return info->name; }

  bool warned_ = false;
};
CATCH_REGISTER_LISTENER(AssertionCheck)

/// Runs the session, and returns the exit code: not 0 where a test case made no assertion.
inline int run(Catch::Session& session) {
  const int code = session.run();
  return code == 0 && AssertionCheck::found() > 0 ? 1 : code;
}

}  // namespace lockstep_test
