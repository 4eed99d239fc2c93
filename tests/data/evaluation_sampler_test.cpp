#include "lockstep/data/sampler.hpp"

#include "data/passes.hpp"
#include "support/catch.hpp"

namespace evaluation_sampler_test {

using lockstep::EvaluationSampler;
using lockstep_test::carry;

static_assert(lockstep::Sampler<EvaluationSampler>);

TEST_CASE("all ranks together see every sample once, in the dataset's order") {
  for (const std::size_t length : {0, 1, 2, 5, 10, 97}) {
    for (const int world : {1, 2, 3, 4, 7}) {
      std::vector<std::size_t> seen;
      std::size_t smallest = length, largest = 0;
      for (int rank = 0; rank < world; ++rank) {
        EvaluationSampler sampler{length, rank, world};
        std::size_t own = 0;
        sampler.set_epoch(3);
        sampler.reset();
        while (const auto batch = sampler.next(4)) {
          own += batch->size();
          seen.insert(seen.end(), batch->begin(), batch->end());
        }
        CHECK(own == sampler.size());
        smallest = std::min(smallest, own);
        largest = std::max(largest, own);
      }
      REQUIRE(seen.size() == length);
      for (std::size_t i = 0; i < length; ++i) CHECK(seen[i] == i);
      CHECK(largest - smallest <= 1);
    }
  }
}

TEST_CASE("an evaluation goes on where it was saved") {
  EvaluationSampler sampler{20, 1, 2}, resumed{20, 1, 2}, other{20, 1, 4};
  (void)sampler.next(3);
  carry(sampler, resumed);
  CHECK(resumed.size() == 7);  // of the coming pass
  CHECK(resumed.size_of(0) == 7);
  resumed.reset();
  CHECK(resumed.next(100) == sampler.next(100));
  resumed.reset();
  CHECK(resumed.size() == 10);
  CHECK_THROWS_AS(carry(sampler, other), lockstep::CheckpointError);
}

TEST_CASE("an evaluation by a rank that cannot be is refused") {
  CHECK_THROWS_AS(EvaluationSampler(10, 3, 3), lockstep::UsageError);
}

}  // namespace evaluation_sampler_test
