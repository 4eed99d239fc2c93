#include "lockstep/optim/schedule.hpp"

#include <cmath>

#include "lockstep/train/extras.hpp"
#include "optim/common.hpp"

namespace schedule_test {

using namespace lockstep;

// Against Python's schedulers, value by value: optim_parity.py.
TEST_CASE("curves begin, turn and end where they say") {
  const LinearLR warm_up{.start_factor = 0.1, .total_iters = 10};
  CHECK(warm_up(0) == Approx(0.1));
  CHECK(warm_up(5) == Approx(0.55));
  CHECK(warm_up(10) == Approx(1));
  CHECK(warm_up(1000) == Approx(1));
  const CosineAnnealingLR cosine{.T_max = 10, .eta_min_factor = 0.2};
  CHECK(cosine(0) == Approx(1));
  CHECK(cosine(5) == Approx(0.6));
  CHECK(cosine(10) == Approx(0.2));
  CHECK(cosine(15) == Approx(0.2));  // Python's would rise again
  CHECK(PolynomialLR{.total_iters = 4, .power = 2}(1) == Approx(0.5625));
  CHECK(PolynomialLR{.total_iters = 4, .power = 2}(9) == 0);
  CHECK(StepLR{.step_size = 3, .gamma = 0.5}(2) == 1);
  CHECK(StepLR{.step_size = 3, .gamma = 0.5}(3) == 0.5);
  CHECK(MultiStepLR{.milestones = {5, 2}, .gamma = 0.5}(4) == 0.5);
  CHECK(MultiStepLR{.milestones = {5, 2}, .gamma = 0.5}(5) == 0.25);
  CHECK(ExponentialLR{.gamma = 0.5}(3) == Approx(0.125));
  CHECK(ConstantLR{}(4) == Approx(1.0 / 3));
  CHECK(ConstantLR{}(7) == 1);
  CHECK(ConstantLR{.factor = 0.5, .total_iters = 2}(1) == 0.5);
  const auto both = SequentialLR{warm_up, 10, SequentialLR{cosine, 10, ConstantLR{.factor = 1}}};
  CHECK(both(9) == Approx(0.91));
  CHECK(both(10) == Approx(1));
  CHECK(both(15) == Approx(0.6));
  CHECK(both(20) == 1);
}

TEST_CASE("a curve over steps or epochs is a Schedule") {
  const PerStep steps{LinearLR{.start_factor = 0, .total_iters = 4}};
  const PerEpoch epochs{LinearLR{.start_factor = 0, .total_iters = 4}};
  static_assert(Schedule<const PerStep<LinearLR>> && Schedule<const PerEpoch<LinearLR>>);
  CHECK(steps.rate_factor(100, 1) == Approx(0.25));
  CHECK(epochs.rate_factor(1, 100) == Approx(0.25));
}

TEST_CASE("a curve over no steps is refused") {
  CHECK(text_of<UsageError>([] { LinearLR{.total_iters = 0}(1); }) ==
        "LinearLR: total_iters is 0: give 1 or more");
  CHECK(text_of<UsageError>([] { CosineAnnealingLR{.T_max = -1}(1); }) != "");
  CHECK(text_of<UsageError>([] { PolynomialLR{.total_iters = 0}(1); }) != "");
  CHECK(text_of<UsageError>([] { StepLR{.step_size = 0}(1); }) != "");
}

TEST_CASE("the rate follows the global batch by the rule") {
  const World world;
  const GlobalBatch batch{.per_rank = 64, .accumulation = 16, .reference = 256};
  CHECK(scaled_rate(0.1, RateRule::linear, batch, world) == Approx(0.4));
  CHECK(scaled_rate(0.1, RateRule::square_root, batch, world) == Approx(0.2));
  CHECK(text_of<UsageError>([&] { scaled_rate(0.1, RateRule::linear, {.per_rank = 0}, world); }) != "");
  CHECK(text_of<UsageError>([&] { scaled_rate(-1, RateRule::linear, {}, world); }) != "");
}

}  // namespace schedule_test
