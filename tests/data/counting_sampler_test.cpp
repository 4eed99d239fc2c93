// Samplers that know what every rank is given, and those that pad nothing.
#include <algorithm>
#include <numeric>

#include "data/passes.hpp"
#include "lockstep/data/sampler.hpp"
#include "support/catch.hpp"

namespace counting_sampler_test {

using lockstep::DistributedSampler;
using lockstep::EvaluationSampler;
using lockstep::SamplerOptions;
using lockstep_test::carry;

static_assert(lockstep::CountingSampler<DistributedSampler>);
static_assert(lockstep::CountingSampler<EvaluationSampler>);
static_assert(!lockstep::CountingSampler<lockstep::RandomSampler>);

namespace {

// What each rank sees in an epoch, in batches.
template <class S>
std::vector<std::vector<std::size_t>> seen_by_ranks(std::vector<S>& ranks, std::size_t epoch,
                                                    std::size_t batch = 3) {
  std::vector<std::vector<std::size_t>> seen(ranks.size());
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    ranks[r].set_epoch(epoch);
    ranks[r].reset();
    while (const auto indices = ranks[r].next(batch)) {
      CHECK(!indices->empty());
      seen[r].insert(seen[r].end(), indices->begin(), indices->end());
    }
  }
  return seen;
}

template <class S, class... Options>
void check_counts(std::size_t length, int world, const Options&... options) {
  CAPTURE(length, world);
  std::vector<S> ranks;
  for (int r = 0; r < world; ++r) ranks.emplace_back(length, r, world, options...);
  const auto seen = seen_by_ranks(ranks, 2);
  for (int asked = 0; asked < world; ++asked) {
    CHECK(ranks[static_cast<std::size_t>(asked)].size() == seen[static_cast<std::size_t>(asked)].size());
    for (const S& any : ranks) CHECK(any.size_of(asked) == seen[static_cast<std::size_t>(asked)].size());
  }
}

}  // namespace

TEST_CASE("every rank knows what each rank is given") {
  for (const int world : {1, 2, 3, 4, 7})
    for (const std::size_t length : {0, 1, 2, 3, 6, 7, 20, 101}) {
      for (const bool shuffle : {false, true}) {
        for (const auto& [drop_last, pad] : {std::pair(false, true), {false, false}, {true, true}}) {
          const SamplerOptions options{.seed = 3, .shuffle = shuffle, .drop_last = drop_last, .pad = pad};
          check_counts<DistributedSampler>(length, world, options);
        }
      }
      check_counts<EvaluationSampler>(length, world);
    }
}

TEST_CASE("without padding each sample is seen exactly once, by ranks in turn") {
  for (const int world : {1, 2, 3, 5})
    for (const std::size_t length : {1, 4, 5, 17}) {
      CAPTURE(world, length);
      std::vector<DistributedSampler> ranks;
      for (int r = 0; r < world; ++r)
        ranks.emplace_back(length, r, world, SamplerOptions{.seed = 9, .pad = false});
      const auto seen = seen_by_ranks(ranks, 1);
      std::vector<std::size_t> all;
      for (const auto& own : seen) all.insert(all.end(), own.begin(), own.end());
      std::sort(all.begin(), all.end());
      std::vector<std::size_t> expected(length);
      std::iota(expected.begin(), expected.end(), 0);
      CHECK(all == expected);
      for (const auto& own : seen) CHECK(seen[0].size() - own.size() <= 1);
      // The order is that of the padded sampler, whose repetitions come at the end.
      DistributedSampler padded(length, world - 1, world, SamplerOptions{.seed = 9});
      padded.set_epoch(1);
      padded.reset();
      if (const auto first = padded.next(1); length >= static_cast<std::size_t>(world)) {
        CHECK(first->at(0) == seen.back().at(0));
      }
    }
}

TEST_CASE("dropping the tail leaves nothing to pad, and giving it to the first ranks is refused") {
  CHECK(DistributedSampler(17, 1, 5, {.drop_last = true}).size() == 3);
  CHECK_THROWS_AS(DistributedSampler(17, 1, 5, {.drop_last = true, .pad = false}), lockstep::UsageError);
}

TEST_CASE("a sampler that pads does not take up the pass of one that does not") {
  DistributedSampler padded(10, 0, 3, {.seed = 1}), bare(10, 0, 3, {.seed = 1, .pad = false});
  CHECK_THROWS_AS(carry(bare, padded), lockstep::CheckpointError);
}

}  // namespace counting_sampler_test
