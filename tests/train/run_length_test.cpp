#include "lockstep/train/detail/run_length.hpp"

#include "support/catch.hpp"

namespace run_length_test {

using lockstep::detail::RunLength;

TEST_CASE("a run of epochs ends after that many more") {
  const RunLength run({.epochs = 2}, 10, 3, 30);
  CHECK(!run.reached(3, 30));
  CHECK(!run.reached(4, 40));
  CHECK(run.reached(5, 50));
  CHECK(run.plan(3, 30).epochs == 5);
  CHECK(run.plan(3, 30).steps == 10);
}

TEST_CASE("a run without a length is one epoch") {
  const RunLength run({}, 10, 0, 0);
  CHECK(!run.reached(0, 9));
  CHECK(run.reached(1, 10));
}

TEST_CASE("a run of steps cuts its last epoch short") {
  const RunLength run({.steps = 25}, 10, 0, 4);
  CHECK(run.plan(0, 4).epochs == 3);
  CHECK(run.plan(0, 4).steps == 10);
  CHECK(run.plan(2, 24).steps == 5);
  CHECK(run.plan(2, 24).epochs == 3);
  CHECK(!run.reached(2, 28));
  CHECK(run.reached(2, 29));
}

TEST_CASE("steps need samples") {
  CHECK_THROWS_AS(RunLength({.steps = 1}, 0, 0, 0), lockstep::DataError);
  CHECK_THROWS_AS(RunLength({.epochs = 1}, 0, 0, 0), lockstep::DataError);
  CHECK_NOTHROW(RunLength({.epochs = 0}, 0, 0, 0));
}

TEST_CASE("of a stream the end is not known") {
  const RunLength epochs({.epochs = 2}, std::nullopt, 0, 0);
  CHECK(!epochs.plan(1, 7).steps);
  CHECK(epochs.plan(1, 7).epochs == 2);
  const RunLength steps({.steps = 9}, std::nullopt, 0, 0);
  CHECK(steps.plan(1, 7).steps == 2);
  CHECK(!steps.reached(1, 7));
  CHECK(steps.reached(1, 9));
}

TEST_CASE("what ranks see is told by runs of equal ranks") {
  CHECK(lockstep::detail::samples_text({26, 26, 26}) == "26 samples an epoch");
  CHECK(lockstep::detail::samples_text({26, 26, 25}) == "26 (2 ranks), 25 (1 rank) samples an epoch");
  CHECK(lockstep::detail::samples_text({5}) == "5 samples an epoch");
}

}  // namespace run_length_test
