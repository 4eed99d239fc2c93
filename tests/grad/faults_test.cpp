// Ranks that fail in backward, or come with another model: all end soon, the cause is shown, no process remains.
#include <chrono>

#include "support/catch.hpp"
#include "support/process.hpp"

namespace faults_test {

namespace {

using namespace std::chrono_literals;

// How long the program may take from the fault to its end: a rank that nobody tells would wait for minutes.
constexpr auto after_fault = 20s;

lockstep_test::Process start(const std::string& mode, int ranks) {
  return lockstep_test::start(
      {lockstep_test::test_program("grad_fault_program"), "--nproc", std::to_string(ranks), mode});
}

}  // namespace

TEST_CASE("a rank that throws with buckets in flight ends all, whether or not the others come") {
  const std::string mode = GENERATE("throws", "throws alone");
  CAPTURE(mode);
  auto process = start(mode, 3);
  REQUIRE(process.wait_for_output("the fault", 60s));
  REQUIRE(process.wait(after_fault));
  CHECK(process.exit_code() == 1);
  CHECK_THAT(process.error(), ContainsSubstring("thrown inside backward"));
  CHECK_THAT(process.error(), ContainsSubstring("rank 1"));
  CHECK(lockstep_test::processes_left(process.marker()) == 0);
}

TEST_CASE("a rank that is killed in training ends all") {
  auto process = start("dies", 3);
  REQUIRE(process.wait_for_output("the fault", 60s));
  REQUIRE(process.wait(after_fault));
  CHECK(process.exit_code() == 137);
  CHECK(lockstep_test::processes_left(process.marker()) == 0);
}

TEST_CASE("a rank that does not come to backward is named with the bucket and its parameters") {
  const auto ended =
      lockstep_test::run({lockstep_test::test_program("grad_fault_program"), "--nproc", "3", "late"});
  CHECK(ended.code == 1);
  CHECK_THAT(ended.error, ContainsSubstring("rank 1"));
  CHECK_THAT(ended.error, ContainsSubstring("bucket 1 of"));
  CHECK_THAT(ended.error, ContainsSubstring("'fourth.bias'"));
  CHECK_THAT(ended.error, ContainsSubstring("in backward 3"));
  CHECK(ended.left == 0);
}

TEST_CASE("a model that differs on one rank ends all with one error that names the parameter") {
  const std::string text =
      "parameter 2 is 'second.weight' [8, 8] float32 on ranks 0, 2 and 'second.weight' [12, 8] float32 on "
      "rank 1";
  const auto ended =
      lockstep_test::run({lockstep_test::test_program("grad_fault_program"), "--nproc", "3", "shape"});
  CHECK(ended.code == 1);
  CHECK(lockstep_test::count(ended.error, text) == 1);
  CHECK(ended.left == 0);
}

}  // namespace faults_test
