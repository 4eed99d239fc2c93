#include "lockstep/data/sampler.hpp"
#include "lockstep/detail/const_data.hpp"

#include <cmath>
#include <sstream>

#include "data/counted_memory.hpp"
#include "data/passes.hpp"
#include "support/allocations.hpp"
#include "support/catch.hpp"

namespace random_sampler_test {

using lockstep::RandomSampler;
using lockstep_test::all;
using lockstep_test::carry;
using lockstep_test::pass;

namespace {

std::vector<std::size_t> numbers(const at::Tensor& tensor) {
  const auto* from = lockstep::detail::const_data<std::int64_t>(tensor);
  return {from, from + tensor.numel()};
}

}  // namespace

static_assert(lockstep::Sampler<RandomSampler>);

// Equality with the real Python package is tested by sampler_parity.py.

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

TEST_CASE("a saved position outside of the pass, or a state that is none, is refused and changes nothing") {
  const auto forged = [&](std::int64_t position, const at::Tensor& state) {
    torch::serialize::OutputArchive archive;
    archive.write("length", c10::IValue(std::int64_t{8}));
    archive.write("position", c10::IValue(position));
    archive.write("drawn", c10::IValue(std::int64_t{1}));
    archive.write("state", state, /*is_buffer=*/true);
    std::stringstream stream;
    archive.save_to(stream);
    return stream.str();
  };
  const at::Tensor state = at::detail::createCPUGenerator(3).get_state();
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

using lockstep::KeyedPermutation;
using lockstep::PermutationSampler;
using lockstep_test::allocated_bytes;

namespace {

// The sum of (seen - expected)^2 / expected over equally likely cells.
double chi_square(const std::vector<double>& cells, double draws) {
  const double expected = draws / static_cast<double>(cells.size());
  double sum = 0;
  for (const double seen : cells) sum += (seen - expected) * (seen - expected) / expected;
  return sum;
}

// A bound that a fair shuffle passes in all but one of about 30,000 keys; the tests' keys are fixed.
double bound(std::size_t cells) {
  const double freedom = static_cast<double>(cells) - 1;
  return freedom + 4 * std::sqrt(2 * freedom) + 8;
}

}  // namespace

static_assert(lockstep::Sampler<PermutationSampler>);

TEST_CASE("a keyed permutation hits every value once") {
  for (std::size_t length = 1; length <= 300; ++length) {
    for (const std::uint64_t key : {0u, 1u, 77u}) {
      const KeyedPermutation order(length, key);
      std::vector<bool> hit(length, false);
      for (std::size_t i = 0; i < length; ++i) {
        const std::size_t value = order(i);
        REQUIRE(value < length);
        REQUIRE_FALSE(hit[value]);
        hit[value] = true;
      }
    }
  }
  for (const std::size_t length : {4096u, 4097u, 65535u, 100003u}) {
    const KeyedPermutation order(length, 5);
    std::vector<bool> hit(length, false);
    std::size_t hits = 0;
    for (std::size_t i = 0; i < length; ++i) {
      const std::size_t value = order(i);
      REQUIRE(value < length);
      hits += hit[value] ? 0 : 1;
      hit[value] = true;
    }
    CHECK(hits == length);
  }
}

TEST_CASE("every value is as likely at every place as at any other") {
  for (const std::size_t length : {2u, 3u, 5u, 10u, 16u, 33u}) {
    std::vector<double> cells(length * length, 0);
    const std::size_t keys = 20000;
    for (std::uint64_t key = 0; key < keys; ++key) {
      const KeyedPermutation order(length, lockstep::seed_of({.seed = 3, .epoch = key}));
      for (std::size_t i = 0; i < length; ++i) ++cells[i * length + order(i)];
    }
    INFO("length " << length);
    CHECK(chi_square(cells, static_cast<double>(keys * length)) < bound(cells.size()));
  }
}

TEST_CASE("large permutations look shuffled") {
  const std::size_t length = 100000;
  const double n = static_cast<double>(length);
  double fixed = 0;
  for (std::uint64_t epoch = 0; epoch < 20; ++epoch) {
    const KeyedPermutation order(length, lockstep::seed_of({.seed = 1, .epoch = epoch}));
    const KeyedPermutation following(length, lockstep::seed_of({.seed = 1, .epoch = epoch + 1}));
    double with_place = 0, with_next = 0, with_epoch = 0, rising = 0;
    for (std::size_t i = 0; i + 1 < length; ++i) {
      const auto value = static_cast<double>(order(i)) / n - 0.5;
      const auto next = static_cast<double>(order(i + 1)) / n - 0.5;
      with_place += value * (static_cast<double>(i) / n - 0.5);
      with_next += value * next;
      with_epoch += value * (static_cast<double>(following(i)) / n - 0.5);
      rising += next > value ? 1 : 0;
      fixed += order(i) == i ? 1 : 0;
    }
    // Each product has a variance of 1/144, so that a correlation is within 5 / sqrt(n) of 0.
    const double limit = 5 / std::sqrt(n);
    CHECK(std::abs(12 * with_place / n) < limit);
    CHECK(std::abs(12 * with_next / n) < limit);
    CHECK(std::abs(12 * with_epoch / n) < limit);
    CHECK(std::abs(rising / n - 0.5) < limit);
  }
  CHECK(fixed > 5);  // 20 expected, one a permutation
  CHECK(fixed < 45);
}

TEST_CASE("the ranks of a permutation sampler share all samples") {
  for (const bool drop_last : {false, true}) {
    std::vector<std::size_t> seen;
    for (int rank = 0; rank < 4; ++rank) {
      PermutationSampler sampler{103, rank, 4, {.seed = 2, .drop_last = drop_last}};
      const auto own = pass(sampler);
      CHECK(own.size() == (drop_last ? 25 : 26));
      CHECK(own.size() == sampler.size());
      seen.insert(seen.end(), own.begin(), own.end());
    }
    std::sort(seen.begin(), seen.end());
    seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
    CHECK(seen.size() == (drop_last ? 100 : 103));
  }
}

TEST_CASE("epochs and seeds have permutations of their own, the same in every run") {
  PermutationSampler sampler{1000, 0, 1, {.seed = 2}}, again{1000, 0, 1, {.seed = 2}};
  PermutationSampler other{1000, 0, 1, {.seed = 3}};
  const auto first = pass(sampler);
  CHECK(first == pass(again));
  CHECK(first != pass(other));
  sampler.set_epoch(1);
  CHECK(first != pass(sampler));
  sampler.set_epoch(0);
  CHECK(first == pass(sampler));
}

TEST_CASE("without shuffle the order is the dataset's") {
  PermutationSampler sampler{5, 1, 2, {.shuffle = false}};
  CHECK(pass(sampler) == std::vector<std::size_t>{1, 3, 0});
}

TEST_CASE("a sampler of an empty dataset gives an empty pass") {
  PermutationSampler sampler{0, 1, 2};
  CHECK(pass(sampler).empty());
}

TEST_CASE(
    "a place anywhere in an enormous dataset takes no memory, and a sampler of it no more than of a small "
    "one") {
  constexpr std::size_t enormous = std::size_t{1} << 50;
  const lockstep_test::CountedTensors tensors;
  const std::size_t before = allocated_bytes;
  const KeyedPermutation order(enormous, 3);
  std::size_t wrong = 0;
  for (const std::size_t place : {std::size_t{0}, enormous / 2 + 1, enormous - 1})
    wrong += order(place) < enormous ? 0 : 1;
  const std::size_t taken = allocated_bytes - before;
  CHECK(wrong == 0);
  CHECK(taken == 0);

  const auto taken_by = [](std::size_t length) {
    const std::size_t start = allocated_bytes;
    PermutationSampler sampler{length, 0, 2, {.seed = 1}};
    sampler.set_epoch(1);
    std::size_t given = 0;
    for (int batch = 0; batch < 3; ++batch) given += sampler.next(4)->size();
    const std::size_t bytes = allocated_bytes - start;
    CHECK(given == 12);
    return bytes;
  };
  const std::size_t small = taken_by(40), large = taken_by(enormous);
  CHECK(small > 0);
  CHECK(large == small);
  CHECK(tensors.asked() == 0);
}

}  // namespace random_sampler_test
