#include "lockstep/data/subset.hpp"

#include <torch/torch.h>

#include <vector>

#include "lockstep/error.hpp"
#include "support/catch.hpp"

namespace subset_test {

using lockstep::Subset;
using lockstep::TensorDataset;

namespace {

struct Numbers {
  [[nodiscard]] std::size_t size() { return 10; }  // not const
  [[nodiscard]] int get(std::size_t index) { return static_cast<int>(index) * 2; }
};

}  // namespace

TEST_CASE("a subset has the samples at its indices, of datasets of both kinds") {
  Subset subset{TensorDataset(torch::arange(10), torch::arange(10) * 3), {7, 1, 7}};
  CHECK(lockstep::dataset_size(subset) == 3);
  const auto batch = lockstep::make_batch(subset, std::vector<std::size_t>{0, 2, 1});
  CHECK(batch.data.equal(torch::tensor({7, 7, 1})));
  CHECK(batch.target.equal(torch::tensor({21, 21, 3})));
  CHECK(subset.get(1).target.item<int>() == 3);

  Subset numbers{Numbers(), {9, 4}};
  CHECK(lockstep::make_batch(numbers, std::vector<std::size_t>{1, 0}) == std::vector<int>{8, 18});
  Subset inner{std::move(numbers), {1}};
  CHECK(inner.get(0) == 8);
  CHECK(Subset(Numbers(), {}).size() == 0);
  CHECK_THROWS_AS(Subset(Numbers(), {3, 10}), lockstep::DataError);
}

}  // namespace subset_test
