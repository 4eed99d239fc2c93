#include "lockstep/train/extras.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "lockstep/comm/cpu_comm.hpp"
#include "support/ranks.hpp"
#include "train/regression.hpp"

namespace extras_ranks_test {

TEST_CASE("the norm before clipping is known to the hooks after it, and after the step") {
  const auto& world = test_world();
  const auto data = curve(12 * world.size());
  const lockstep::TrainerOptions options{.batch_size = 3, .lr = 0.1, .seed = 4, .progress = false};
  std::vector<double> before, found, after, told;
  const auto norm_of = [](const lockstep::Gradients& gradients) {
    double sum = 0;
    for (const auto& parameter : gradients.parameters) sum += parameter.grad().pow(2).sum().item<double>();
    return std::sqrt(sum);
  };
  // Hooks are called in their order.
  lockstep::Trainer trainer(world, options, tanh_network(1, 4, 7));
  trainer.fit(data, squared_error, lockstep::OnGradients{[&](const auto& gradients) {
                CHECK(!gradients.total_norm.defined());
                before.push_back(norm_of(gradients));
              }},
              lockstep::GradientClip{.max_norm = 0.25}, lockstep::OnGradients{[&](const auto& gradients) {
                found.push_back(gradients.total_norm.template item<double>());
                after.push_back(norm_of(gradients));
              }},
              lockstep::OnStep{
                  [&](const lockstep::StepReport& step) { told.push_back(step.total_norm.item<double>()); }});
  REQUIRE(told.size() == 4);
  CHECK(found == told);
  for (std::size_t i = 0; i < told.size(); ++i) {
    CHECK(told[i] == Approx(before[i]));
    CHECK(after[i] == Approx(std::min(before[i], 0.25)).epsilon(1e-4));
  }
  // Without one there is none.
  lockstep::Trainer(world, options, tanh_network(1, 4, 7))
      .fit(data, squared_error,
           lockstep::OnStep{[](const lockstep::StepReport& step) { CHECK(!step.total_norm.defined()); }});
}

TEST_CASE("a norm that is not finite is refused on every rank, and the next run is a good one") {
  const auto& world = test_world();
  lockstep::Trainer trainer(world, {.batch_size = 2, .progress = false}, tanh_network(1, 3, 5));
  const lockstep::GradientClip clip{.max_norm = 1, .options = {.error_if_nonfinite = true}};
  const auto data = curve(4 * world.size());
  bool bad = true;
  const auto loss = [&](auto& model, const auto& batch) {
    return squared_error(model, batch) * (bad && world.rank() == 0 ? std::nan("") : 1.0);
  };
  CHECK_THROWS_AS(trainer.fit(data, loss, clip), lockstep::GradientError);
  bad = false;
  CHECK(std::isfinite(trainer.fit(data, loss, clip).loss));
}

TEST_CASE("clipping under accumulation is that of one process on the whole step") {
  const auto& world = test_world();
  const auto data = curve(9 * world.size() + 1);
  const auto start = tanh_network(1, 4, 7);
  auto together = copy_of(start), alone = copy_of(start);
  const lockstep::TrainerOptions options{.epochs = 2,
                                         .batch_size = 3,
                                         .accumulate = 2,
                                         .lr = 0.1,
                                         .shuffle = false,
                                         .pad = false,
                                         .progress = false};
  lockstep::Trainer(world, options, together)
      .fit(data, squared_error, lockstep::GradientClip{.max_norm = 0.5});

  torch::optim::SGD optimizer(alone->parameters(), 0.1);
  int clipped = 0;
  for (int epoch = 0; epoch < 2; ++epoch)
    for (std::size_t first = 0; first < data.size(); first += static_cast<std::size_t>(6 * world.size())) {
      // Samples are dealt out in turn, so that a step of all ranks is a run of consecutive ones.
      std::vector<std::size_t> step;
      for (std::size_t i = first;
           i < std::min(data.size(), first + static_cast<std::size_t>(6 * world.size())); ++i)
        step.push_back(i);
      const auto batch = data.get_batch(step);
      optimizer.zero_grad();
      squared_error(alone, batch).backward();
      clipped += torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.5) > 0.5 ? 1 : 0;
      optimizer.step();
    }
  CHECK(clipped > 0);
  CHECK(distance(together, alone) < 1e-6);
}

}  // namespace extras_ranks_test
