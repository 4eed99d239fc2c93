#include "lockstep/data/sampler.hpp"

#include <sstream>

#include "data/passes.hpp"
#include "support/catch.hpp"

namespace random_sampler_test {

using lockstep::RandomSampler;
using lockstep_test::all;
using lockstep_test::carry;
using lockstep_test::pass;

namespace {

at::Generator plain(std::uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

std::vector<std::size_t> numbers(const at::Tensor& tensor) {
  const auto* from = tensor.data_ptr<std::int64_t>();
  return {from, from + tensor.numel()};
}

}  // namespace

static_assert(lockstep::Sampler<RandomSampler>);

// Equality with the real Python package is tested by sampler_parity.py.

TEST_CASE("a generator given draws one more permutation when a pass is read to its end") {
  RandomSampler sampler{50, {.generator = plain(3)}};
  at::Generator twin = plain(3);
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
      return own ? RandomSampler{33, {.generator = plain(seed)}} : RandomSampler{33};
    };
    RandomSampler sampler = make(1), resumed = make(2);
    sampler.reset();
    (void)sampler.next(10);
    carry(sampler, resumed);
    const at::Tensor default_state = at::globalContext().defaultGenerator(at::kCPU).get_state();
    const auto rest = all(sampler);
    const auto following = pass(sampler);
    at::Generator default_generator = at::globalContext().defaultGenerator(at::kCPU);
    default_generator.set_state(default_state);
    CHECK(resumed.size() == 23);  // of the coming pass
    CHECK(pass(resumed) == rest);
    CHECK(pass(resumed) == following);
  }
}

TEST_CASE("a saved position outside of the pass, or a state that is none, is refused and changes nothing") {
  const auto forged = [&](std::int64_t position, const at::Tensor& state) {
    torch::serialize::OutputArchive archive;
    archive.write("length", c10::IValue(std::int64_t{8}));
    for (const char* none : {"epoch", "ended"}) archive.write(none, c10::IValue(std::int64_t{0}));
    archive.write("position", c10::IValue(position));
    archive.write("drawn", c10::IValue(std::int64_t{1}));
    archive.write("state", state, /*is_buffer=*/true);
    std::stringstream stream;
    archive.save_to(stream);
    return stream.str();
  };
  const at::Tensor state = plain(3).get_state();
  RandomSampler sampler(8);
  sampler.reset();
  CHECK(sampler.next(3)->size() == 3);
  for (const auto& [position, saved_state] : std::vector<std::pair<std::int64_t, at::Tensor>>{
           {-4, state}, {9, state}, {std::int64_t{1} << 62, state}, {2, at::ones({3}, at::kByte)}}) {
    CHECK_THROWS_AS(load(sampler, forged(position, saved_state)), lockstep::CheckpointError);
  }
  CHECK(sampler.position() == 3);
  CHECK(all(sampler).size() == 5);
  load(sampler, forged(8, state));
  CHECK(pass(sampler).empty());
}

TEST_CASE("an empty dataset cannot be shuffled") {
  CHECK_THROWS_AS(RandomSampler(0), lockstep::DataError);
}

}  // namespace random_sampler_test
