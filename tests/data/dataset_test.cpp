#include "lockstep/data/dataset.hpp"

#include "lockstep/comm/local_comm.hpp"
#include "support/catch.hpp"

namespace dataset_test {

using lockstep::Example;
using lockstep::TensorDataset;

namespace {

// One sample at a time, and of any type.
template <class E>
struct Single {
  [[nodiscard]] std::size_t size() const { return 10; }
  [[nodiscard]] E get(std::size_t i) const;
};
template <>
Example Single<Example>::get(std::size_t i) const {
  return {torch::full({2}, static_cast<double>(i)), torch::tensor(static_cast<std::int64_t>(i))};
}
template <>
int Single<int>::get(std::size_t i) const {
  return static_cast<int>(i);
}

using Torch = torch::data::datasets::TensorDataset;

}  // namespace

static_assert(lockstep::Dataset<TensorDataset> && lockstep::BatchedDataset<TensorDataset>);
static_assert(lockstep::Dataset<Single<int>> && !lockstep::BatchedDataset<Single<int>>);
static_assert(lockstep::Dataset<Torch>);
static_assert(std::same_as<lockstep::BatchOf<TensorDataset>, Example>);
static_assert(std::same_as<lockstep::BatchOf<Single<Example>>, Example>);
static_assert(std::same_as<lockstep::BatchOf<Single<int>>, std::vector<int>>);
static_assert(std::same_as<lockstep::BatchOf<Torch>, torch::data::TensorExample>);
static_assert(!lockstep::Dataset<std::vector<int>>);

TEST_CASE("a tensor dataset gathers a batch as stacking its samples would") {
  const TensorDataset dataset{torch::rand({10, 3, 4}), torch::arange(10)};
  const std::vector<std::size_t> indices{7, 0, 7, 3};
  const Example batch = lockstep::make_batch(dataset, indices);
  std::vector<Example> examples;
  for (const std::size_t i : indices) examples.push_back(dataset.get(i));
  const Example stacked = lockstep::collate(examples);
  CHECK(torch::equal(batch.data, stacked.data));
  CHECK(torch::equal(batch.target, stacked.target));
  CHECK(batch.data.sizes() == at::IntArrayRef({4, 3, 4}));
}

TEST_CASE("a batch is a copy: changing it leaves the dataset as it was") {
  const TensorDataset dataset{torch::ones({4, 2}), torch::zeros(4)};
  const Example batch = dataset.get_batch(std::vector<std::size_t>{0, 1, 2, 3});
  batch.data.zero_();
  CHECK(dataset.data().sum().item<float>() == 8);
}

TEST_CASE("a tensor dataset keeps dtypes and takes tensors that are not contiguous") {
  const TensorDataset dataset{torch::arange(12).to(torch::kByte).view({3, 4}).t(), torch::rand({4, 5})};
  const Example batch = dataset.get_batch(std::vector<std::size_t>{3, 1});
  CHECK(batch.data.scalar_type() == torch::kByte);
  CHECK(batch.data[0][2].item<int>() == 11);
  CHECK(batch.target.sizes() == at::IntArrayRef({2, 5}));
}

TEST_CASE("samples of any kind are batched") {
  Single<Example> examples;
  CHECK(lockstep::make_batch(examples, std::vector<std::size_t>{4, 5}).data[1][0].item<float>() == 5);
  Single<int> numbers;
  CHECK(lockstep::make_batch(numbers, std::vector<std::size_t>{4, 5}) == std::vector<int>{4, 5});
  Torch tensors(torch::arange(10));
  CHECK(lockstep::make_batch(tensors, std::vector<std::size_t>{4, 5}).data.sum().item<int>() == 9);
  CHECK(lockstep::dataset_size(tensors) == 10);
}

TEST_CASE("tensors that do not belong together are refused") {
  CHECK_THROWS_AS((TensorDataset{torch::zeros({3, 2}), torch::zeros(4)}), lockstep::DataError);
  CHECK_THROWS_AS((TensorDataset{torch::tensor(1.0), torch::zeros(1)}), lockstep::DataError);
  CHECK_THROWS_AS((TensorDataset{{}, torch::zeros(1)}), lockstep::DataError);
}

using lockstep::fingerprint;

TEST_CASE("a fingerprint tells datasets apart and is the same in every run") {
  const at::Tensor data = torch::arange(1000).view({100, 10}), target = torch::arange(100);
  TensorDataset dataset{data, target};
  CHECK(fingerprint(dataset) == fingerprint(dataset));
  TensorDataset copy{data.clone(), target.clone()};
  CHECK(fingerprint(copy) == fingerprint(dataset));
  TensorDataset shorter{data.slice(0, 0, 99), target.slice(0, 0, 99)};
  TensorDataset other_type{data.to(torch::kFloat), target}, other_shape{data.view({100, 5, 2}), target};
  TensorDataset reversed{data.flip(0), target}, other_targets{data, target + 1};
  for (TensorDataset* other : {&shorter, &other_type, &other_shape, &reversed, &other_targets})
    CHECK(fingerprint(*other) != fingerprint(dataset));
  TensorDataset empty{torch::empty({0, 3}), torch::empty({0})}, one{torch::ones({1, 3}), torch::ones({1})};
  CHECK(fingerprint(empty) != fingerprint(one));
}

TEST_CASE("a process that is alone has the same dataset as all") {
  lockstep::LocalComm comm{lockstep::World::from_environment()};
  TensorDataset dataset{torch::ones({3, 2}), torch::ones({3})};
  CHECK_NOTHROW(lockstep::check_same_dataset(comm, dataset));
  CHECK_NOTHROW(lockstep::check_same_dataset(comm, 3));
}

}  // namespace dataset_test
