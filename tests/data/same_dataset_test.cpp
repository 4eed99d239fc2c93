#include "lockstep/data/same_dataset.hpp"

#include "lockstep/comm/local_comm.hpp"
#include "support/catch.hpp"

namespace same_dataset_test {

using lockstep::fingerprint;
using lockstep::TensorDataset;

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

}  // namespace same_dataset_test
