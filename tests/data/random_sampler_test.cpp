#include "lockstep/data/random_sampler.hpp"

#include "data/passes.hpp"
#include "support/catch.hpp"

namespace random_sampler_test {

using lockstep::RandomSampler;
using lockstep_test::all;
using lockstep_test::carry;
using lockstep_test::pass;

namespace {

std::vector<std::size_t> numbers(const at::Tensor& tensor) {
  const auto* from = tensor.const_data_ptr<std::int64_t>();
  return {from, from + tensor.numel()};
}

}  // namespace

static_assert(lockstep::Sampler<RandomSampler>);

// Equality with the real Python package is tested by sampler_parity.py.

TEST_CASE("a pass draws base seed, sampler seed and permutation, in that order") {
  torch::manual_seed(11);
  RandomSampler sampler{50};
  std::vector<std::vector<std::size_t>> passes;
  for (int epoch = 0; epoch < 3; ++epoch) {
    passes.push_back(pass(sampler));
  }
  torch::manual_seed(11);
  for (const auto& seen : passes) {
    torch::empty({}, torch::kLong).random_();
    const auto seed = torch::empty({}, torch::kLong).random_().item<std::int64_t>();
    const auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
    CHECK(seen == numbers(torch::randperm(50, generator, torch::kLong)));
  }
}

TEST_CASE("a generator given draws one more permutation when a pass is read to its end") {
  RandomSampler sampler{50, {.generator = at::detail::createCPUGenerator(3)}};
  at::Generator twin = at::detail::createCPUGenerator(3);
  for (const std::size_t batch_size : {7, 10, 50, 64}) {
    sampler.reset();
    const auto seen = all(sampler, batch_size);
    torch::empty({}, torch::kLong).random_(twin);
    CHECK(seen == numbers(torch::randperm(50, twin, torch::kLong)));
    torch::randperm(50, twin, torch::kLong);
  }
  sampler.reset();
  (void)sampler.next(10);  // left early
  sampler.reset();
  torch::empty({}, torch::kLong).random_(twin);
  torch::randperm(50, twin, torch::kLong);
  torch::empty({}, torch::kLong).random_(twin);
  CHECK(all(sampler) == numbers(torch::randperm(50, twin, torch::kLong)));
}

TEST_CASE("a pass of a random sampler goes on where it was saved, and so does the next") {
  for (const bool own : {false, true}) {
    torch::manual_seed(5);
    auto make = [own](std::uint64_t seed) {
      return own ? RandomSampler{33, {.generator = at::detail::createCPUGenerator(seed)}} : RandomSampler{33};
    };
    RandomSampler sampler = make(1), resumed = make(2);
    sampler.reset();
    (void)sampler.next(10);
    carry(sampler, resumed);
    const at::Tensor default_state = at::detail::getDefaultCPUGenerator().get_state();
    const auto rest = all(sampler);
    const auto following = pass(sampler);
    at::Generator default_generator = at::detail::getDefaultCPUGenerator();
    default_generator.set_state(default_state);
    CHECK(resumed.size() == 23);  // of the coming pass
    CHECK(pass(resumed) == rest);
    CHECK(pass(resumed) == following);
  }
}

TEST_CASE("an empty dataset cannot be shuffled") {
  CHECK_THROWS_AS(RandomSampler(0), lockstep::DataError);
}

}  // namespace random_sampler_test
