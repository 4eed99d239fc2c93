#include "lockstep/comm/local_comm.hpp"

#include "support/catch.hpp"

namespace local_comm_test {

using lockstep::LocalComm;
using lockstep::World;

namespace {
lockstep::World world_of(int size) {
  return size == 1 ? World() : World::join("tcp://127.0.0.1:1", 0, size);
}
}  // namespace

TEST_CASE("LocalComm leaves what is reduced or broadcast as it is") {
  LocalComm comm{world_of(1)};
  auto tensor = at::arange(4, at::kFloat);
  for (auto op : {lockstep::ReduceOp::sum, lockstep::ReduceOp::avg, lockstep::ReduceOp::product}) {
    comm.all_reduce(tensor, op).synchronize();
    comm.reduce(tensor, 0, op).synchronize();
  }
  comm.all_reduce(std::vector<at::Tensor>{tensor, tensor}).wait();
  comm.broadcast(tensor).synchronize(std::chrono::milliseconds(1));
  CHECK(at::equal(tensor, at::arange(4, at::kFloat)));
  CHECK(comm.rank() == 0);
  CHECK(comm.size() == 1);
  CHECK(comm.all_reduce(tensor).error() == nullptr);
}

TEST_CASE("LocalComm copies where there is an output") {
  LocalComm comm{world_of(1)};
  const auto input = at::arange(4, at::kFloat);
  auto gathered = at::zeros({1, 4});
  comm.all_gather(gathered, input).synchronize();
  CHECK(at::equal(gathered[0], input));
  auto scattered = at::zeros({4});
  comm.reduce_scatter(scattered, gathered).synchronize();
  CHECK(at::equal(scattered, input));
  auto exchanged = at::zeros({1, 4});
  comm.all_to_all(exchanged, gathered).synchronize();
  CHECK(at::equal(exchanged, gathered));
  // As over Gloo: any strides, any shape of so many elements, and views of the input's memory.
  auto strided = at::zeros({2, 2, 1}).permute({2, 1, 0});
  comm.all_gather(strided, input.view({2, 2})).synchronize();
  CHECK(at::equal(strided[0], input.view({2, 2})));
  auto flat = at::zeros({4});
  comm.all_gather(flat, input.view({2, 2}).t()).synchronize();
  CHECK(at::equal(flat, input.view({2, 2}).t().reshape({4})));
  auto own = at::arange(4, at::kFloat).view({2, 2});
  comm.all_gather(own.t(), own).synchronize();
  CHECK(at::equal(own.t(), at::arange(4, at::kFloat).view({2, 2})));
  CHECK_THROWS_AS(comm.all_gather(at::zeros({1, 3}), input), lockstep::CommunicationError);
  CHECK_THROWS_AS(comm.all_gather(at::Tensor(), input), lockstep::CommunicationError);
  CHECK_THROWS_AS(comm.all_gather(at::zeros({4}).to_sparse(), input), lockstep::CommunicationError);
  CHECK_THROWS_AS(comm.all_to_all(input, input), lockstep::CommunicationError);
}

TEST_CASE("LocalComm takes lists as others do") {
  LocalComm comm{world_of(1)};
  const std::vector<at::Tensor> inputs{at::arange(4, at::kFloat), at::arange(6, at::kLong).view({2, 3})};
  const auto room = [&] {
    return std::vector<at::Tensor>{at::zeros({1, 4}), at::zeros({1, 2, 3}, at::kLong)};
  };
  auto gathered = room(), exchanged = room();
  std::vector<at::Tensor> scattered{at::zeros({4}), at::zeros({2, 3}, at::kLong)};
  comm.reduce(inputs).synchronize();
  comm.all_gather(gathered, inputs).synchronize();
  comm.all_to_all(exchanged, gathered).synchronize();
  comm.reduce_scatter(scattered, exchanged, lockstep::ReduceOp::max).synchronize();
  for (std::size_t i = 0; i < inputs.size(); ++i) CHECK(at::equal(scattered[i], inputs[i]));
  CHECK_THROWS_AS(comm.all_gather(gathered, {inputs[0]}), lockstep::CommunicationError);
  comm.all_gather(std::vector<at::Tensor>{}, std::vector<at::Tensor>{}).synchronize();
}

TEST_CASE("LocalComm carries bytes and forms groups of one") {
  LocalComm comm{world_of(1)};
  CHECK(comm.all_gather_bytes("abc") == std::vector<std::string>{"abc"});
  CHECK(comm.broadcast_bytes("abc") == "abc");
  CHECK(comm.new_group({0})->size() == 1);
  CHECK(!comm.new_group({}));
  CHECK_THROWS_AS(comm.new_group({1}), lockstep::CommunicationError);
}

TEST_CASE("LocalComm is refused to a world of several") {
  CHECK_THROWS_AS(LocalComm{world_of(2)}, lockstep::UsageError);
}

TEST_CASE("LocalComm keeps the rule of the rank-zero scope") {
  const auto world = world_of(1);
  LocalComm comm{world};
  auto tensor = at::zeros({1});
  world.rank_zero([&] {
    CHECK_THROWS_AS(comm.all_reduce(tensor), lockstep::CommunicationError);
    CHECK_THROWS_AS(comm.barrier(), lockstep::CommunicationError);
    CHECK_THROWS_AS(comm.barrier_async(), lockstep::CommunicationError);
    CHECK_THROWS_AS(comm.all_gather({tensor, tensor}, {tensor, tensor}), lockstep::CommunicationError);
    CHECK_THROWS_AS(comm.broadcast_bytes(""), lockstep::CommunicationError);
  });
  comm.barrier();
}

}  // namespace local_comm_test
