// Lists of tensors, each of them one operation: mixed dtypes, odd strides, empty tensors and empty lists.
#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/tested_comm.hpp"

namespace gloo_lists_test {

using lockstep::ReduceOp;
using lockstep_test::TestedComm;
using Tensors = std::vector<at::Tensor>;

namespace {

// What rank r brings as tensor `i` of a list: no two elements of all ranks and tensors are alike in kLong.
at::Tensor brought(int rank, int i, at::IntArrayRef sizes, at::ScalarType type = at::kLong) {
  const auto count = c10::multiply_integers(sizes);
  return (at::arange(count, at::kLong) + 1000 * i + 10000 * rank)
      .view(sizes)
      .remainder(type == at::kLong ? 1 << 30 : 97)
      .to(type);
}

// One that is not contiguous, with the same sizes and values.
at::Tensor strided(const at::Tensor& tensor) {
  auto wide = at::zeros({tensor.numel(), 3}, tensor.options());
  auto column = wide.select(1, 1);
  column.copy_(tensor.reshape({-1}));
  std::vector<std::int64_t> strides(static_cast<std::size_t>(tensor.dim()), 3);
  for (auto d = tensor.dim() - 2; d >= 0; --d)
    strides[static_cast<std::size_t>(d)] = strides[static_cast<std::size_t>(d) + 1] * tensor.size(d + 1);
  return wide.as_strided(tensor.sizes(), strides, 1);
}

// Of a rank, with `rows` in front of the sizes of each tensor where there are any.
Tensors list_of(int rank, std::int64_t rows = 0) {
  const auto sizes = [&](std::vector<std::int64_t> own) {
    if (rows > 0) own.insert(own.begin(), rows);
    return own;
  };
  return {brought(rank, 0, sizes({2, 3}), at::kFloat),
          brought(rank, 1, sizes({4})),
          brought(rank, 2, sizes({0, 5}), at::kFloat),
          strided(brought(rank, 3, sizes({3, 2}), at::kFloat)),
          strided(brought(rank, 4, sizes({5}), at::kDouble)),
          brought(rank, 5, sizes({1}))};
}

// Of the same shapes and dtypes, for what arrives.
Tensors room_for(const Tensors& list) {
  Tensors room;
  for (const at::Tensor& tensor : list)
    room.push_back(tensor.is_contiguous() ? at::full_like(tensor, 77) : strided(at::full_like(tensor, 77)));
  return room;
}

void check_equal(const Tensors& got, const Tensors& expected) {
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    CHECK(at::equal(got[i], expected[i]));
  }
}

}  // namespace

TEST_CASE("a list is reduced to its root") {
  TestedComm comm{test_world()};
  for (int root = 0; root < comm.size(); ++root) {
    const auto list = list_of(comm.rank());
    comm.reduce(list, root).synchronize();
    if (comm.rank() != root) continue;
    auto sums = list_of(0);
    for (int rank = 1; rank < comm.size(); ++rank)
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = sums[i] + list_of(rank)[i];
    check_equal(list, sums);
  }
  const Tensors floats{at::full({3}, comm.rank() + 1.0), at::full({2}, comm.rank() + 1.0, at::kDouble),
                       strided(at::full({2, 2}, comm.rank() + 1.0))};
  comm.reduce(floats, 0, ReduceOp::avg).synchronize();
  if (comm.rank() == 0)
    for (const auto& tensor : floats)
      CHECK(at::equal(tensor, at::full_like(tensor, (comm.size() + 1) / 2.0)));
  comm.reduce(Tensors{}).synchronize();
}

TEST_CASE("a list is averaged in every place, whatever its strides") {
  TestedComm comm{test_world()};
  for (int round = 0; round < 50; ++round) {
    const Tensors list{strided(at::full({3, 2}, comm.rank() + 1.0)), at::full({4}, comm.rank() + 1.0)};
    comm.all_reduce(list, ReduceOp::avg).synchronize();
    for (const auto& tensor : list)
      REQUIRE(at::equal(tensor, at::full_like(tensor, (comm.size() + 1) / 2.0)));
  }
}

TEST_CASE("lists are gathered by rank") {
  TestedComm comm{test_world()};
  const auto outputs = room_for(list_of(0, comm.size()));
  comm.all_gather(outputs, list_of(comm.rank())).synchronize();
  for (int rank = 0; rank < comm.size(); ++rank) {
    Tensors row;
    for (const auto& output : outputs) row.push_back(output[rank]);
    check_equal(row, list_of(rank));
  }
  comm.all_gather(Tensors{}, Tensors{}).synchronize();
}

TEST_CASE("lists are reduced and scattered by row") {
  TestedComm comm{test_world()};
  const auto outputs = room_for(list_of(0));
  comm.reduce_scatter(outputs, list_of(comm.rank(), comm.size())).synchronize();
  Tensors expected;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    auto sum = list_of(0, comm.size())[i];
    for (int rank = 1; rank < comm.size(); ++rank) sum = sum + list_of(rank, comm.size())[i];
    expected.push_back(sum[comm.rank()]);
  }
  check_equal(outputs, expected);
  const Tensors averages{strided(at::zeros({3})), at::zeros({2})};
  comm.reduce_scatter(averages,
                      Tensors{at::full({comm.size(), 3}, comm.rank() + 1.0),
                              at::full({comm.size(), 2}, comm.rank() + 1.0)},
                      ReduceOp::avg)
      .synchronize();
  for (const auto& tensor : averages)
    CHECK(at::equal(tensor, at::full_like(tensor, (comm.size() + 1) / 2.0)));
  comm.reduce_scatter(Tensors{}, Tensors{}).synchronize();
}

TEST_CASE("lists are exchanged row by row") {
  TestedComm comm{test_world()};
  const auto outputs = room_for(list_of(0, comm.size()));
  comm.all_to_all(outputs, list_of(comm.rank(), comm.size())).synchronize();
  for (int rank = 0; rank < comm.size(); ++rank) {
    Tensors got, expected;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      got.push_back(outputs[i][rank]);
      expected.push_back(list_of(rank, comm.size())[i][comm.rank()]);
    }
    check_equal(got, expected);
  }
  comm.all_to_all(Tensors{}, Tensors{}).synchronize();
}

TEST_CASE("lists are sent round a ring", "[2+]") {
  TestedComm comm{test_world()};
  const int next = (comm.rank() + 1) % comm.size(), previous = (comm.rank() + comm.size() - 1) % comm.size();
  const auto room = room_for(list_of(0));
  auto sent = comm.send(list_of(comm.rank()), next, 3);
  auto nothing = comm.send(Tensors{}, next, 3);
  comm.recv(room, previous, 3).synchronize();
  comm.recv(Tensors{}, previous, 3).synchronize();
  sent.synchronize();
  nothing.synchronize();
  check_equal(room, list_of(previous));
}

TEST_CASE("lists that do not go together are refused before anything is sent") {
  TestedComm comm{test_world()};
  const Tensors one{at::zeros({2})}, whole{at::zeros({comm.size(), 2})};
  const Tensors two{at::zeros({2}), at::zeros({2})};
  CHECK_THROWS_WITH(comm.all_gather(whole, two),
                    "all_gather: as many outputs as inputs are needed, not 1 and 2");
  CHECK_THROWS_AS(comm.reduce_scatter(two, whole), lockstep::CommunicationError);
  CHECK_THROWS_AS(comm.all_to_all(Tensors{}, whole), lockstep::CommunicationError);
  if (comm.size() > 1)
    CHECK_THROWS_WITH(comm.all_gather(two, two),
                      ContainsSubstring("[2] float32 is not " + std::to_string(comm.size()) + " times"));
  CHECK_THROWS_AS(comm.reduce(Tensors{at::zeros({2}), at::zeros({2}, at::kShort)}),
                  lockstep::CommunicationError);
  comm.barrier();
}

}  // namespace gloo_lists_test
