#include "lockstep/train/detail/epoch_partition.hpp"

#include "lockstep/data/sampler.hpp"
#include "support/catch.hpp"

namespace epoch_partition_test {

using lockstep::detail::EpochPartition;

TEST_CASE("equal batches are divided by nothing, equal micro-batches by their number") {
  const EpochPartition plain({24, 24, 24}, 8, 1);
  CHECK(plain.divisor(8, 0) == 1);
  const EpochPartition huge({24, 24}, std::numeric_limits<std::int64_t>::max(), 1);
  CHECK(huge.steps() == 1);
  CHECK(huge.micro_batches(24, 0) == 1);
  CHECK(huge.samples_in_step(0) == 48);
  const EpochPartition accumulated({56, 56, 56}, 8, 3);  // 3, 3 and 1 micro-batches
  CHECK(accumulated.divisor(8, 1) == 3);
  CHECK(accumulated.divisor(8, 2) == 1);  // the tail is a step of its own
}

TEST_CASE("the weights of a step sum up to one over its samples") {
  for (const std::int64_t batch : {1, 2, 3, 7})
    for (const std::int64_t accumulate : {1, 2, 3})
      for (const std::size_t length : {0, 1, 5, 13, 30}) {
        const std::vector<std::size_t> samples = {length, length / 2, (length + 1) / 3};
        const EpochPartition shares(samples, batch, accumulate);
        CAPTURE(batch, accumulate, length);
        std::int64_t seen = 0;
        for (std::int64_t step = 0; step < shares.steps(); ++step) {
          double weight = 0;
          for (const std::size_t size : samples) {
            const auto own = static_cast<std::int64_t>(size);
            for (std::int64_t micro = 0; micro < shares.micro_batches(own, step); ++micro) {
              const std::int64_t count = shares.micro_size(own, step, micro);
              CHECK(count > 0);
              seen += count;
              weight += 1 / shares.divisor(count, step) / 3;
            }
          }
          CHECK(std::abs(weight - 1) < 1e-12);
        }
        CHECK(seen == static_cast<std::int64_t>(length + length / 2 + (length + 1) / 3));
      }
}

TEST_CASE("what ranks see comes from the sampler, or is as much as this one sees") {
  struct Group {
    [[nodiscard]] int rank() const { return 1; }
    [[nodiscard]] int size() const { return 3; }
  };
  const lockstep::DistributedSampler uneven(11, Group{}, {.pad = false});
  CHECK(lockstep::detail::samples_of_ranks(uneven, Group{}) == std::vector<std::size_t>{4, 4, 3});
  const lockstep::RandomSampler each_all(11);
  CHECK(lockstep::detail::samples_of_ranks(each_all, Group{}) == std::vector<std::size_t>{11, 11, 11});
}

}  // namespace epoch_partition_test
