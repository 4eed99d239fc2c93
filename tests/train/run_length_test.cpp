#include "lockstep/train/detail/run_length.hpp"

#include "support/catch.hpp"

namespace run_length_test {

using lockstep::detail::RunLength;

TEST_CASE("steps need samples") {
  CHECK_THROWS_AS(RunLength({.steps = 1}, 0, 0, 0), lockstep::DataError);
  CHECK_THROWS_AS(RunLength({.epochs = 1}, 0, 0, 0), lockstep::DataError);
  CHECK_NOTHROW(RunLength({.epochs = 0}, 0, 0, 0));
}

TEST_CASE("what ranks see is told by runs of equal ranks") {
  CHECK(lockstep::detail::samples_text({26, 26, 26}) == "26 samples an epoch");
  CHECK(lockstep::detail::samples_text({26, 26, 25}) == "26 (2 ranks), 25 (1 rank) samples an epoch");
  CHECK(lockstep::detail::samples_text({5}) == "5 samples an epoch");
}

}  // namespace run_length_test
