#include "lockstep/train/gradient_clip.hpp"

#include "lockstep/comm/gloo_comm.hpp"
#include "support/ranks.hpp"
#include "train/regression.hpp"

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
  lockstep::Trainer(world, options, together, lockstep::GradientClip{.max_norm = 0.5})
      .fit(data, squared_error);

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
