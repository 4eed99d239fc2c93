#include "lockstep/optim/schedule.hpp"

#include <cmath>

#include "lockstep/train/extras.hpp"
#include "optim/common.hpp"

namespace schedule_test {

using namespace lockstep;

// Against Python's schedulers, value by value: optim_parity.py.
TEST_CASE("curves begin, turn and end where they say") {
  const LinearCurve warm_up{.length = 10, .start = 0.1};
  CHECK(warm_up(0) == Approx(0.1));
  CHECK(warm_up(5) == Approx(0.55));
  CHECK(warm_up(10) == Approx(1));
  CHECK(warm_up(1000) == Approx(1));
  const CosineCurve cosine{.length = 10, .floor = 0.2};
  CHECK(cosine(0) == Approx(1));
  CHECK(cosine(5) == Approx(0.6));
  CHECK(cosine(10) == Approx(0.2));
  CHECK(cosine(15) == Approx(0.2));  // Python's would rise again
  CHECK(PolynomialCurve{.length = 4, .power = 2}(1) == Approx(0.5625));
  CHECK(PolynomialCurve{.length = 4, .power = 2}(9) == 0);
  CHECK(StepCurve{.every = 3, .gamma = 0.5}(2) == 1);
  CHECK(StepCurve{.every = 3, .gamma = 0.5}(3) == 0.5);
  CHECK(MultiStepCurve{.milestones = {5, 2}, .gamma = 0.5}(4) == 0.5);
  CHECK(MultiStepCurve{.milestones = {5, 2}, .gamma = 0.5}(5) == 0.25);
  CHECK(ExponentialCurve{.gamma = 0.5}(3) == Approx(0.125));
  CHECK(ConstantCurve{}(7) == 1);
  CHECK(ConstantCurve{.factor = 0.5, .length = 2}(1) == 0.5);
  const auto both = Then{warm_up, 10, Then{cosine, 10, ConstantCurve{}}};
  CHECK(both(9) == Approx(0.91));
  CHECK(both(10) == Approx(1));
  CHECK(both(15) == Approx(0.6));
  CHECK(both(20) == 1);
}

TEST_CASE("a curve over steps or epochs is a Schedule") {
  const PerStep steps{LinearCurve{.length = 4, .start = 0}};
  const PerEpoch epochs{LinearCurve{.length = 4, .start = 0}};
  static_assert(Schedule<const PerStep<LinearCurve>> && Schedule<const PerEpoch<LinearCurve>>);
  CHECK(steps.rate_factor(100, 1) == Approx(0.25));
  CHECK(epochs.rate_factor(1, 100) == Approx(0.25));
}

TEST_CASE("a length of 0 is refused") {
  CHECK(text_of<UsageError>([] { LinearCurve{.length = 0}(1); }) ==
        "LinearCurve: a length of 0: give 1 or more");
  CHECK(text_of<UsageError>([] { CosineCurve{.length = -1}(1); }) != "");
  CHECK(text_of<UsageError>([] { PolynomialCurve{.length = 0}(1); }) != "");
  CHECK(text_of<UsageError>([] { StepCurve{.every = 0}(1); }) != "");
}

TEST_CASE("the rate follows the global batch by the rule") {
  const World world;
  const GlobalBatch batch{.per_rank = 64, .accumulation = 16, .reference = 256};
  CHECK(scaled_rate(0.1, RateRule::linear, batch, world) == Approx(0.4));
  CHECK(scaled_rate(0.1, RateRule::square_root, batch, world) == Approx(0.2));
  CHECK(scaled_rate(0.1, RateRule::constant, batch, world) == 0.1);
  CHECK(text_of<UsageError>([&] { scaled_rate(0.1, RateRule::linear, {.per_rank = 0}, world); }) != "");
  CHECK(text_of<UsageError>([&] { scaled_rate(-1, RateRule::linear, {}, world); }) != "");
}

}  // namespace schedule_test
