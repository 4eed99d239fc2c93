// Ranks that do not come to a batch norm: all end, the cause is shown with the module, no process remains.
#include <chrono>

#include "support/catch.hpp"
#include "support/process.hpp"

namespace faults_test {

namespace {

using namespace std::chrono_literals;

// How long the program may take from the fault to its end: a rank that nobody tells would wait for minutes.
constexpr auto after_fault = 20s;

lockstep_test::Ended run(const std::string& mode) {
  return lockstep_test::run({lockstep_test::test_program("nn_fault_program"), "--nproc", "3", mode});
}

}  // namespace

TEST_CASE("a rank that does not come is named with the batch norm that waits") {
  const auto [mode, module] = GENERATE(table<std::string, std::string>(
      {{"late", "SyncBatchNorm1d '1', forward"}, {"late in backward", "SyncBatchNorm1d '4', backward"}}));
  CAPTURE(mode);
  const auto ended = run(mode);
  CHECK(ended.code == 1);
  CHECK_THAT(ended.error, ContainsSubstring(module) && ContainsSubstring("rank 1"));
  CHECK(ended.left == 0);
}

TEST_CASE("a rank whose input does not fit ends all with its own words") {
  const auto ended = run("shape");
  CHECK(ended.code != 0);
  CHECK_THAT(ended.error, ContainsSubstring("SyncBatchNorm1d '1' takes an input [N, C] or [N, C, L]"));
  CHECK(ended.left == 0);
}

TEST_CASE("a rank that is killed in training ends all") {
  auto process =
      lockstep_test::start({lockstep_test::test_program("nn_fault_program"), "--nproc", "3", "dies"});
  REQUIRE(process.wait_for_output("the fault", 60s));
  REQUIRE(process.wait(after_fault));
  CHECK(process.exit_code() == 137);
  CHECK(lockstep_test::processes_left(process.marker()) == 0);
}

}  // namespace faults_test
