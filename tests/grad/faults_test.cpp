// Ranks that fail in backward, or come with another model: all end soon, the cause is shown, no process
// remains.
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

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
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

TEST_CASE("a parameter that takes no part on one rank ends all, named") {
  const auto ended =
      lockstep_test::run({lockstep_test::test_program("grad_fault_program"), "--nproc", "3", "unused"});
  CHECK(ended.code == 1);
  CHECK_THAT(ended.error, ContainsSubstring("rank 1 (none of the parameters took part)"));
  CHECK(ended.left == 0);
}

TEST_CASE("a model that differs on one rank ends all with one error that names the parameter") {
  const auto [mode, text] = GENERATE(table<std::string, std::string>({
      {"shape",
       "parameter 2 is 'second.weight' [8, 8] float32 on ranks 0, 2 and 'second.weight' [12, 8] float32 on "
       "rank 1"},
      {"dtype",
       "parameter 0 is 'first.weight' [8, 8] float32 on ranks 0, 2 and 'first.weight' [8, 8] float64 on rank "
       "1"},
      {"name",
       "parameter 0 is 'first.weight' [8, 8] float32 on ranks 0, 2 and 'fc.weight' [8, 8] float32 on rank 1"},
      {"order",
       "parameter 4 is 'third.weight' [8, 8] float32 on ranks 0, 2 and 'fourth.weight' [8, 8] float32 on "
       "rank 1"},
  }));
  CAPTURE(mode);
  const auto ended =
      lockstep_test::run({lockstep_test::test_program("grad_fault_program"), "--nproc", "3", mode});
  CHECK(ended.code == 1);
  CHECK_THAT(ended.error, ContainsSubstring(text));
  CHECK(count(ended.error, text) == 1);
  CHECK(ended.left == 0);
}

}  // namespace faults_test
