// Exact weights: however samples fall to ranks and micro-batches, training is that of one process on the
// whole of each step, to rounding.
#include <random>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/data/sampler.hpp"
#include "support/ranks.hpp"
#include "train/regression.hpp"

namespace exact_weights_test {

namespace {

using lockstep::TrainerOptions;

struct Sizes {
  std::int64_t length, batch, accumulate;
  int depth = 1, width = 4;
  std::uint64_t seed = 1;
};

TrainerOptions options_of(const Sizes& sizes) {
  return {.epochs = 3,
          .batch_size = sizes.batch,
          .accumulate = sizes.accumulate,
          .seed = sizes.seed,
          .pad = false,
          .progress = false};
}

// By all ranks. Returns the last epoch's loss.
template <class S, class Loss>
double train_together(torch::nn::Sequential net, const Sizes& sizes, Loss&& loss) {
  lockstep::Trainer trainer{test_world(), options_of(sizes), net, std::in_place_type<S>, momentum_sgd};
  return trainer.fit(curve(sizes.length), loss).loss;
}

// By this process, on the samples of all ranks in each step.
template <class S>
double train_alone(torch::nn::Sequential& net, const Sizes& sizes) {
  const auto data = curve(sizes.length);
  auto optimizer = momentum_sgd.function(net->parameters());
  std::vector<S> ranks;
  struct Group {
    int number;
    [[nodiscard]] int rank() const { return number; }
    [[nodiscard]] int size() const { return test_world().size(); }
  };
  for (int r = 0; r < test_world().size(); ++r)
    ranks.push_back(lockstep::make_sampler<S>(data.size(), Group{r}, {.seed = sizes.seed, .pad = false}));
  double sum = 0;
  for (std::size_t epoch = 0; epoch < 3; ++epoch) {
    for (auto& sampler : ranks) {
      sampler.set_epoch(epoch);
      sampler.reset();
    }
    sum = 0;
    std::size_t seen = 0;
    while (true) {
      std::vector<std::size_t> joined;
      for (auto& sampler : ranks)
        for (std::int64_t micro = 0; micro < sizes.accumulate; ++micro)
          if (const auto indices = sampler.next(static_cast<std::size_t>(sizes.batch)))
            joined.insert(joined.end(), indices->begin(), indices->end());
      if (joined.empty()) break;
      sum += step_alone(net, optimizer, data, joined) * static_cast<double>(joined.size());
      seen += joined.size();
    }
    CHECK(seen == data.size());
  }
  return sum / static_cast<double>(data.size());
}

template <class S, class Loss>
void check_like_one_process(const Sizes& sizes, Loss&& loss) {
  CAPTURE(sizes.length, sizes.batch, sizes.accumulate, sizes.depth, sizes.width, sizes.seed);
  const auto start = tanh_network(sizes.depth, sizes.width, sizes.seed);
  auto together = copy_of(start), alone = copy_of(start);
  const double mean = train_together<S>(together, sizes, loss);
  const double expected = train_alone<S>(alone, sizes);
  REQUIRE(distance(alone, start) > 1e-3);
  CHECK(distance(together, alone) < 1e-6);
  CHECK(std::abs(mean - expected) <= 1e-6 * std::abs(expected));
}
template <class S>
void check_like_one_process(const Sizes& sizes) {
  check_like_one_process<S>(sizes, squared_error);
}

}  // namespace

TEST_CASE("random networks train on all ranks as in one process") {
  std::mt19937 random(20);
  const auto draw = [&](int low, int high) {
    return static_cast<int>(random() % static_cast<unsigned>(high - low + 1)) + low;
  };
  for (int trial = 0; trial < 16; ++trial)
    check_like_one_process<lockstep::DistributedSampler>({.length = draw(1, 40),
                                                          .batch = draw(1, 7),
                                                          .accumulate = draw(1, 4),
                                                          .depth = draw(1, 3),
                                                          .width = draw(2, 6),
                                                          .seed = random()});
}

TEST_CASE("a batch of 30 with a short tail, ranks without data, and samplers of every kind") {
  using lockstep::DistributedSampler;
  check_like_one_process<DistributedSampler>({.length = 100, .batch = 30, .accumulate = 1});
  check_like_one_process<DistributedSampler>({.length = 100, .batch = 10, .accumulate = 1});
  check_like_one_process<DistributedSampler>({.length = 100, .batch = 10, .accumulate = 3});
  check_like_one_process<DistributedSampler>({.length = 101, .batch = 30, .accumulate = 2});
  // The last step is rank 0's alone; and a dataset of one sample, of which the others see nothing at all.
  check_like_one_process<DistributedSampler>(
      {.length = 4 * test_world().size() + 1, .batch = 2, .accumulate = 1});
  check_like_one_process<DistributedSampler>(
      {.length = 4 * test_world().size() + 1, .batch = 2, .accumulate = 2});
  check_like_one_process<DistributedSampler>({.length = 1, .batch = 3, .accumulate = 2});
  check_like_one_process<lockstep::EvaluationSampler>({.length = 23, .batch = 4, .accumulate = 1});
}

TEST_CASE("sums and counts that only the data tells train as in one process as well") {
  for (const Sizes& sizes : {Sizes{100, 30, 1, 2}, Sizes{37, 4, 3, 2},
                             Sizes{4 * test_world().size() + 1, 2, 2, 2}, Sizes{1, 3, 2, 2}})
    check_like_one_process<lockstep::DistributedSampler>(sizes, summed_squared_error);
}

}  // namespace exact_weights_test
