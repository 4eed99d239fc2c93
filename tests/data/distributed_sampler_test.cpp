#include "lockstep/data/sampler.hpp"

#include "data/counted_memory.hpp"
#include "data/passes.hpp"
#include "lockstep/data/loader.hpp"
#include "support/catch.hpp"
#include "support/written.hpp"

namespace distributed_sampler_test {

using lockstep::DistributedSampler;
using lockstep::SamplerOptions;
using lockstep_test::all;
using lockstep_test::carry;
using lockstep_test::pass;

namespace {

// The indices of a pass; sampler_parity.py compares them with Python's.
std::vector<std::size_t> expected(std::size_t length, int rank, int world, std::size_t epoch,
                                  const SamplerOptions& options) {
  DistributedSampler sampler{length, rank, world, options};
  sampler.set_epoch(epoch);
  return pass(sampler);
}

struct Group {
  int own_rank, ranks;
  [[nodiscard]] int rank() const { return own_rank; }
  [[nodiscard]] int size() const { return ranks; }
};

}  // namespace

static_assert(lockstep::Sampler<DistributedSampler>);

TEST_CASE("the size of a batch does not change the order") {
  DistributedSampler sampler{103, 1, 4, {.seed = 9}};
  const auto whole = pass(sampler);
  sampler.reset();
  CHECK(all(sampler, 1) == whole);
  sampler.reset();
  CHECK(all(sampler, 1000) == whole);
  CHECK_FALSE(sampler.next(1).has_value());
}

TEST_CASE("set_epoch starts the epoch, and reset repeats it") {
  DistributedSampler sampler{50, 0, 2, {}};
  const auto first = all(sampler);
  sampler.set_epoch(1);
  const auto second = all(sampler);
  CHECK(first != second);
  CHECK(pass(sampler) == second);
  sampler.set_epoch(0);
  CHECK(all(sampler) == first);
}

TEST_CASE("set_epoch on one copy holds for the others from their next pass on") {
  DistributedSampler kept{40, 0, 1, {}};
  DistributedSampler copy = kept;
  DistributedSampler reference{40, 0, 1, {}};
  const auto begun = copy.next(10);
  kept.set_epoch(3);
  CHECK(copy.next(10)->size() == 10);  // the pass that runs goes on
  reference.set_epoch(3);
  CHECK(pass(copy) == pass(reference));
}

TEST_CASE("torch's own loader repeats the order without set_epoch, with one warning, or advances the epoch") {
  const auto passes = [](const lockstep::SamplerOptions& options) {
    DistributedSampler sampler{20, 1, 2, options};
    auto loader =
        torch::data::make_data_loader(torch::data::datasets::TensorDataset(torch::arange(20))
                                          .map(torch::data::transforms::Stack<torch::data::TensorExample>()),
                                      sampler, torch::data::DataLoaderOptions(2));
    std::vector<std::vector<std::size_t>> seen(4);
    for (std::size_t pass = 0; pass < seen.size(); ++pass) {
      if (pass == 3) sampler.set_epoch(7);
      for (auto& batch : *loader)
        for (std::int64_t i = 0; i < batch.data.size(0); ++i)
          seen[pass].push_back(static_cast<std::size_t>(batch.data[i].item<std::int64_t>()));
    }
    return seen;
  };
  const auto python = [](std::size_t epoch) { return expected(20, 1, 2, epoch, {.seed = 5}); };
  const std::string warning = written(2, [&] {
    CHECK(passes({.seed = 5}) == std::vector{python(0), python(0), python(0), python(7)});
  });
  CHECK_THAT(warning, ContainsSubstring("for a further pass over epoch 0 without set_epoch"));
  CHECK(std::count(warning.begin(), warning.end(), '\n') == 1);
  const std::string nothing = written(2, [&] {
    CHECK(passes({.seed = 5, .advance_epoch_on_reset = true}) ==
          std::vector{python(0), python(1), python(2), python(7)});
    CHECK(passes({.shuffle = false})[1] == expected(20, 1, 2, 0, {.shuffle = false}));
    // lockstep's loader sets the epoch, also one that shall not advance.
    for (const bool advances : {true, false}) {
      lockstep::TensorDataset data{torch::arange(20), torch::arange(20)};
      lockstep::DataLoader loader{data, DistributedSampler{20, 1, 2, {}}, {.advance_epoch = advances}};
      for (int pass = 0; pass < 3; ++pass)
        for (const auto& batch : loader) CHECK(batch.data.defined());
      CHECK(loader.epoch() == (advances ? 2 : 0));
    }
  });
  CHECK(nothing.empty());
}

TEST_CASE("a pass that was saved goes on where it stood") {
  for (const bool shuffle : {false, true}) {
    DistributedSampler sampler{101, 2, 4, {.seed = 1, .shuffle = shuffle}};
    sampler.set_epoch(6);
    sampler.reset();
    (void)sampler.next(10);
    DistributedSampler resumed{101, 2, 4, {.seed = 1, .shuffle = shuffle}};
    carry(sampler, resumed);
    const auto rest = all(sampler);
    CHECK(resumed.epoch() == 6);
    CHECK(resumed.position() == 10);
    CHECK(resumed.size() == rest.size());
    SECTION("read at once") {
      CHECK(all(resumed) == rest);
    }
    SECTION("by a loader, which resets first") {
      CHECK(pass(resumed) == rest);
    }
    SECTION("by a trainer, which sets the same epoch and a loader resets") {
      resumed.set_epoch(6);
      CHECK(pass(resumed) == rest);
    }
    SECTION("saved again before anything was read") {
      DistributedSampler again{101, 2, 4, {.seed = 1, .shuffle = shuffle}};
      carry(resumed, again);
      CHECK(pass(again) == rest);
    }
    SECTION("another epoch is whole") {
      resumed.set_epoch(7);
      CHECK(pass(resumed).size() == 26);
    }
    SECTION("the pass after it is whole") {
      (void)pass(resumed);
      CHECK(pass(resumed).size() == 26);
    }
  }
}

TEST_CASE("a pass saved by 4 ranks goes on with 3, each sample once") {
  std::vector<std::size_t> seen;
  std::vector<DistributedSampler> before, after;
  for (int rank = 0; rank < 4; ++rank) before.emplace_back(96, rank, 4, SamplerOptions{.seed = 8});
  for (auto& sampler : before) {
    const auto indices = sampler.next(15);
    seen.insert(seen.end(), indices->begin(), indices->end());
  }
  for (int rank = 0; rank < 3; ++rank) {
    after.emplace_back(96, rank, 3, SamplerOptions{.seed = 8});
    carry(before[static_cast<std::size_t>(rank)], after.back());
    CHECK(after.back().size() == 12);
    const auto indices = pass(after.back());
    seen.insert(seen.end(), indices.begin(), indices.end());
  }
  std::sort(seen.begin(), seen.end());
  CHECK(seen.size() == 96);
  CHECK(std::adjacent_find(seen.begin(), seen.end()) == seen.end());
}

TEST_CASE("a sampler does not take up what another was saved from") {
  const DistributedSampler saved{100, 0, 2, {.seed = 1}};
  DistributedSampler other_length{99, 0, 2, {.seed = 1}}, other_seed{100, 0, 2, {.seed = 2}};
  CHECK_THROWS_AS(carry(saved, other_length), lockstep::CheckpointError);
  CHECK_THROWS_AS(carry(saved, other_seed), lockstep::CheckpointError);
}

TEST_CASE("a sampler is made from anything that knows a rank") {
  DistributedSampler from_group{10, Group{1, 3}, {.seed = 4}}, from_numbers{10, 1, 3, {.seed = 4}};
  CHECK(pass(from_group) == pass(from_numbers));
  auto made = lockstep::make_sampler<DistributedSampler>(10, Group{1, 3}, {.seed = 4});
  CHECK(pass(made) == pass(from_numbers));
}

TEST_CASE("reset takes a new length") {
  DistributedSampler sampler{10, 0, 2, {.seed = 4}};
  sampler.reset(31);
  CHECK(all(sampler) == expected(31, 0, 2, 0, {.seed = 4}));
}

TEST_CASE("ranks that cannot be are refused") {
  CHECK_THROWS_AS(DistributedSampler(10, 2, 2), lockstep::UsageError);
  CHECK_THROWS_AS(DistributedSampler(10, -1, 2), lockstep::UsageError);
  CHECK_THROWS_AS(DistributedSampler(10, 0, 0), lockstep::UsageError);
  DistributedSampler sampler{10, 0, 1};
  CHECK_THROWS_AS(sampler.next(0), lockstep::UsageError);
}

TEST_CASE("making one takes no memory however many samples there are") {
  const lockstep_test::CountedTensors memory;
  const DistributedSampler sampler{100'000'000, 0, 2, {.seed = 1}};
  CHECK(sampler.size() == 50'000'000);
  CHECK(memory.asked() == 0);
}

TEST_CASE("a sampler keeps its rank's share of the order alone, of one epoch") {
  constexpr std::size_t length = 1'000'000;
  for (const int ranks : {1, 2, 3, 8}) {
    const lockstep_test::CountedTensors memory;
    DistributedSampler sampler{length, ranks - 1, ranks, {.seed = 1}};
    CHECK(memory.asked() == 0);
    const auto share = static_cast<std::int64_t>((length + ranks - 1) / ranks);
    for (const std::size_t epoch : {0, 1, 2}) {
      CAPTURE(ranks, epoch);
      sampler.set_epoch(epoch);
      (void)sampler.next(10);
      CHECK(memory.asked() > 0);
      CHECK(memory.held() <= 8 * share);
      CHECK(memory.held() >= 4 * share);
    }
    const DistributedSampler copy = sampler;
    CHECK(memory.held() <= 8 * share);
  }
  const lockstep_test::CountedTensors memory;
  DistributedSampler in_order{length, 0, 2, {.shuffle = false}};
  (void)in_order.next(10);
  CHECK(memory.asked() == 0);
}

}  // namespace distributed_sampler_test
