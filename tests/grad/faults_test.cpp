// Ranks that fail in backward: all end soon, the cause is shown, no process remains.
#include <chrono>

#include "support/catch.hpp"
#include "support/process.hpp"

namespace faults_test {

namespace {

using namespace std::chrono_literals;

// How long the program may take from the fault to its end: a rank that nobody tells would wait for minutes.
constexpr auto after_fault = 20s;

lockstep_test::Process start(const std::string& mode) {
  return lockstep_test::start({lockstep_test::test_program("grad_fault_program"), "--nproc", "3", mode});
}

}  // namespace

TEST_CASE("a rank that throws with buckets in flight ends all, whether or not the others come") {
  const std::string mode = GENERATE("throws", "throws alone");
  CAPTURE(mode);
  auto process = start(mode);
  REQUIRE(process.wait_for_output("the fault", 60s));
  REQUIRE(process.wait(after_fault));
  CHECK(process.exit_code() == 1);
  CHECK_THAT(process.error(), ContainsSubstring("thrown inside backward"));
  CHECK(lockstep_test::processes_left(process.marker()) == 0);
}

TEST_CASE("a rank that is killed in training ends all") {
  auto process = start("dies");
  REQUIRE(process.wait_for_output("the fault", 60s));
  REQUIRE(process.wait(after_fault));
  CHECK(process.exit_code() == 137);
  CHECK(lockstep_test::processes_left(process.marker()) == 0);
}

TEST_CASE("a rank that does not come to backward is named with the bucket and its parameters") {
  const auto ended =
      lockstep_test::run({lockstep_test::test_program("grad_fault_program"), "--nproc", "3", "late"});
  CHECK(ended.code == 1);
  for (const char* words :
       {"rank 1 has not entered all_reduce #",
        "(bucket 1 of 4, with parameter 7 'fourth.bias', parameter 6 'fourth.weight', in backward 3)"})
    CHECK_THAT(ended.error, ContainsSubstring(words));
  CHECK(ended.left == 0);
}

}  // namespace faults_test
