#include <random>

#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/tested_comm.hpp"

namespace gloo_reduce_test {

using lockstep::ReduceOp;
using lockstep_test::TestedComm;

namespace {

// What rank r brings: small numbers, so that every order of adding them gives the same, in every dtype.
at::Tensor brought(int rank, std::int64_t size, at::ScalarType type) {
  auto values = (at::arange(size, at::kLong) * 7 + rank * 3).remainder(5) + 1;
  return type == at::kBool ? values.remainder(2).to(type) : values.to(type);
}

at::Tensor expected(int ranks, std::int64_t size, at::ScalarType type, ReduceOp op) {
  auto result = brought(0, size, type);
  for (int rank = 1; rank < ranks; ++rank) {
    const auto next = brought(rank, size, type);
    if (op == ReduceOp::min)
      result = at::minimum(result, next);
    else if (op == ReduceOp::max || (op == ReduceOp::sum && type == at::kBool))
      result = at::maximum(result, next);
    else if (op == ReduceOp::product)
      result = (result * next).to(type);
    else
      result = result + next;
  }
  return op == ReduceOp::avg ? result / ranks : result;
}

}  // namespace

TEST_CASE("all_reduce, reduce and reduce_scatter of every dtype by every operation") {
  TestedComm comm{test_world()};
  const int size = comm.size(), rank = comm.rank();
  for (auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kChar,
                    at::kByte, at::kBool})
    for (auto op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::product}) {
      CAPTURE(static_cast<int>(type), static_cast<int>(op), size, rank);
      if (op == ReduceOp::avg && !at::isFloatingType(type)) {
        CHECK_THROWS_AS(comm.all_reduce(at::zeros({2}, type), op), lockstep::CommunicationError);
        continue;
      }
      const auto wanted = expected(size, 37, type, op);
      auto tensor = brought(rank, 37, type);
      comm.all_reduce(tensor, op).synchronize();
      CHECK(at::equal(tensor, wanted));

      const int root = size - 1;
      auto reduced = brought(rank, 37, type);
      comm.reduce(reduced, root, op).synchronize();
      if (rank == root) CHECK(at::equal(reduced, wanted));

      // Row r of the whole is what rank r gets.
      auto output = at::zeros({5}, type);
      comm.reduce_scatter(output, brought(rank, 5 * size, type).view({size, 5}), op).synchronize();
      CHECK(at::equal(output, expected(size, 5 * size, type, op).view({size, 5})[rank]));
    }
}

TEST_CASE("all_reduce of random sizes") {
  TestedComm comm{test_world()};
  std::mt19937 draw(7);
  for (int i = 0; i < 40; ++i) {
    const std::int64_t size = 1 + static_cast<std::int64_t>(draw() % (i % 4 == 0 ? 100000 : 300));
    CAPTURE(size);
    auto tensor = brought(comm.rank(), size, at::kFloat);
    comm.all_reduce(tensor).synchronize();
    REQUIRE(at::equal(tensor, expected(comm.size(), size, at::kFloat, ReduceOp::sum)));
  }
}

TEST_CASE("a list travels as one buffer for each dtype, whatever its strides") {
  TestedComm comm{test_world()};
  const int size = comm.size(), rank = comm.rank();
  auto whole = brought(rank, 24, at::kFloat).view({4, 6});
  std::vector<at::Tensor> list{whole.t(),
                               brought(rank, 3, at::kLong),
                               at::zeros({0, 3}),
                               brought(rank, 10, at::kDouble).slice(0, 0, 10, 2),
                               at::full({}, rank + 1.0),
                               brought(rank, 4, at::kLong)};
  comm.all_reduce(list).synchronize();
  CHECK(at::equal(whole, expected(size, 24, at::kFloat, ReduceOp::sum).view({4, 6})));
  CHECK(at::equal(list[1], expected(size, 3, at::kLong, ReduceOp::sum)));
  CHECK(at::equal(list[3], expected(size, 10, at::kDouble, ReduceOp::sum).slice(0, 0, 10, 2)));
  CHECK(list[4].item<double>() == size * (size + 1) / 2.0);
  CHECK(at::equal(list[5], expected(size, 4, at::kLong, ReduceOp::sum)));
  comm.all_reduce(std::vector<at::Tensor>{}).synchronize();
  comm.all_reduce(at::zeros({0})).synchronize();

  auto strided = brought(rank, 12, at::kFloat).view({3, 4});
  comm.all_reduce(strided.t(), ReduceOp::avg).synchronize();
  CHECK(at::equal(strided, expected(size, 12, at::kFloat, ReduceOp::avg).view({3, 4})));
}

TEST_CASE("broadcast of any dtype, alone and as a list") {
  TestedComm comm{test_world()};
  const int rank = comm.rank();
  for (int root = 0; root < comm.size(); ++root) {
    std::vector<at::Tensor> list;
    for (auto type : {at::kFloat, at::kShort, at::kComplexDouble, at::kBool, at::kFloat})
      list.push_back(brought(rank + 1, 6, at::kLong).to(type));
    auto matrix = brought(rank, 6, at::kShort).view({2, 3});
    comm.broadcast(list, root).synchronize();
    comm.broadcast(matrix.t(), root).synchronize();
    for (const auto& tensor : list)
      CHECK(at::equal(tensor, brought(root + 1, 6, at::kLong).to(tensor.scalar_type())));
    CHECK(at::equal(matrix, brought(root, 6, at::kShort).view({2, 3})));
  }
}

TEST_CASE("a parameter that asks for gradients can be reduced and broadcast") {
  TestedComm comm{test_world()};
  auto parameter = torch::full({3}, comm.rank() + 1.0, torch::requires_grad());
  comm.all_reduce(parameter, ReduceOp::avg).synchronize();
  CHECK(parameter.detach()[0].item<double>() == (comm.size() + 1) / 2.0);
  comm.broadcast({parameter, parameter.detach()[0]}).synchronize();
}

TEST_CASE("several collectives are under way at once") {
  TestedComm comm{test_world()};
  std::vector<at::Tensor> tensors;
  std::vector<TestedComm::Work> works;
  for (int i = 0; i < 20; ++i) {
    tensors.push_back(at::full({1000 * (i + 1)}, comm.rank() + i));
    works.push_back(comm.all_reduce(tensors.back(), ReduceOp::sum));
  }
  for (int i = 19; i >= 0; --i) {
    works[static_cast<std::size_t>(i)].synchronize();
    CHECK(works[static_cast<std::size_t>(i)].error() == nullptr);
    works[static_cast<std::size_t>(i)].synchronize();  // again: nothing happens
    const int sum = comm.size() * (comm.size() - 1) / 2 + comm.size() * i;
    CHECK(at::equal(tensors[static_cast<std::size_t>(i)], at::full({1000 * (i + 1)}, sum)));
  }
}

TEST_CASE("a Work that nobody waits for is finished all the same") {
  TestedComm comm{test_world()};
  auto tensor = at::full({50}, comm.rank() + 1.0);
  static_cast<void>(comm.all_reduce(tensor, ReduceOp::avg));
  comm.barrier();
  CHECK(at::equal(tensor, at::full({50}, (comm.size() + 1) / 2.0)));
  static_cast<void>(comm.all_reduce(at::ones({1 << 20})));  // dropped, and the communicator after it
}

}  // namespace gloo_reduce_test
