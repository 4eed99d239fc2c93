#include "lockstep/data/weighted_random_sampler.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <vector>

#include "lockstep/data/sampler.hpp"
#include "support/archive.hpp"
#include "support/catch.hpp"

namespace weighted_random_sampler_test {

using lockstep::WeightedRandomSampler;

static_assert(lockstep::ResumableSampler<WeightedRandomSampler>);
static_assert(lockstep::CountingSampler<WeightedRandomSampler>);

namespace {

struct Weighted : lockstep::TensorDataset {
  Weighted(at::Tensor weights, std::int64_t samples)
      : TensorDataset(torch::arange(samples), torch::arange(samples)), weights(std::move(weights)) {}
  [[nodiscard]] at::Tensor sample_weights() const { return weights; }
  at::Tensor weights;
};
struct Group {
  int own_rank, ranks;
  [[nodiscard]] int rank() const { return own_rank; }
  [[nodiscard]] int size() const { return ranks; }
};

std::vector<std::size_t> rest(WeightedRandomSampler& sampler) {
  std::vector<std::size_t> all;
  while (const auto some = sampler.next(3)) all.insert(all.end(), some->begin(), some->end());
  return all;
}

}  // namespace

TEST_CASE("the ranks have the parts of one draw, which differs in each epoch and leaves out weights of 0") {
  const auto weights = torch::tensor({1.0, 0.0, 2.0, 5.0, 0.0, 0.5}, torch::kDouble);
  std::vector<std::vector<std::size_t>> epochs;
  for (std::size_t epoch = 0; epoch < 2; ++epoch) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7 + epoch);
    const auto order = torch::multinomial(weights, 11, true, generator);
    auto& seen = epochs.emplace_back(12);
    for (int rank = 0; rank < 3; ++rank) {
      WeightedRandomSampler sampler{weights, 11, Group{rank, 3}, {.seed = 7}};
      sampler.set_epoch(epoch);
      sampler.reset();
      CHECK(sampler.size() == 4);
      for (std::size_t i = static_cast<std::size_t>(rank); const std::size_t index : rest(sampler)) {
        seen[i] = index;
        i += 3;
      }
    }
    for (std::size_t i = 0; i < 12; ++i)
      CHECK(static_cast<std::int64_t>(seen[i]) ==
            order[static_cast<std::int64_t>(i % 11)].item<std::int64_t>());
    CHECK(std::none_of(seen.begin(), seen.end(), [](std::size_t index) { return index == 1 || index == 4; }));
  }
  CHECK(epochs[0] != epochs[1]);
  WeightedRandomSampler each{weights, 4, 0, 1, {}, /*replacement=*/false};
  each.reset();
  auto once = rest(each);
  std::sort(once.begin(), once.end());
  CHECK(once == std::vector<std::size_t>{0, 2, 3, 5});
}

TEST_CASE("a dataset brings its weights, a pass resumes, and wrong weights are refused") {
  Weighted data{torch::arange(10).to(torch::kFloat), 10};
  WeightedRandomSampler sampler{data, Group{1, 2}, {.seed = 3}}, other{data, Group{1, 2}, {.seed = 3}};
  sampler.set_epoch(2);
  sampler.reset();
  sampler.next(2);
  const std::string bytes = saved(sampler);
  load(other, bytes);
  other.reset();
  CHECK(rest(other) == rest(sampler));
  WeightedRandomSampler unlike{torch::ones(10), 10, Group{1, 2}, {.seed = 3}};
  CHECK_THROWS_AS(load(unlike, bytes), lockstep::CheckpointError);

  Weighted short_of{torch::ones(9), 10};
  CHECK_THROWS_AS((WeightedRandomSampler{short_of, Group{0, 1}}), lockstep::DataError);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const auto& weights : {torch::tensor({1.0, -1.0}), torch::tensor({nan, 1.0}), torch::zeros(3),
                              torch::ones({2, 2}), torch::zeros(0)})
    CHECK_THROWS_AS((WeightedRandomSampler{weights, 2, 0, 1}), lockstep::DataError);
  CHECK_THROWS_AS((WeightedRandomSampler{torch::tensor({1.0, 0.0, 3.0}), 3, 0, 1, {}, false}),
                  lockstep::DataError);
  CHECK_THROWS_AS((WeightedRandomSampler{torch::ones(3), 3, 2, 2}), lockstep::UsageError);
}

}  // namespace weighted_random_sampler_test
