#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/tested_comm.hpp"

namespace gloo_gather_test {

using lockstep_test::TestedComm;

TEST_CASE("all_gather stacks the inputs by rank, in any dtype") {
  TestedComm comm{test_world()};
  const int size = comm.size(), rank = comm.rank();
  for (auto type : {at::kFloat, at::kLong, at::kShort, at::kComplexFloat, at::kBool, at::kBFloat16}) {
    CAPTURE(static_cast<int>(type));
    const auto of = [&](int r) { return (at::arange(6, at::kLong) + r).remainder(4).to(type).view({2, 3}); };
    auto output = at::zeros({size, 2, 3}, type);
    comm.all_gather(output, of(rank)).synchronize();
    for (int r = 0; r < size; ++r) CHECK(at::equal(output[r], of(r)));

    auto strided = at::zeros({3, 2, size}, type).permute({2, 1, 0});
    comm.all_gather(strided, of(rank).t().contiguous().t()).synchronize();
    for (int r = 0; r < size; ++r) CHECK(at::equal(strided[r], of(r)));

    auto flat = at::zeros({6 * size}, type);
    comm.all_gather(flat, of(rank).t()).synchronize();
    for (int r = 0; r < size; ++r) CHECK(at::equal(flat.view({size, 6})[r], of(r).t().reshape({6})));
  }
  auto none = at::zeros({size, 0});
  comm.all_gather(none, at::zeros({0})).synchronize();
}

TEST_CASE("all_to_all sends row r to rank r") {
  TestedComm comm{test_world()};
  const int size = comm.size(), rank = comm.rank();
  for (auto type : {at::kFloat, at::kLong, at::kShort, at::kDouble}) {
    CAPTURE(static_cast<int>(type));
    auto input = at::zeros({size, 3}, type);
    for (int r = 0; r < size; ++r) input[r].fill_(10 * rank + r);
    auto output = at::zeros({size, 3}, type), strided = at::zeros({3, size}, type);
    comm.all_to_all(output, input).synchronize();
    comm.all_to_all(strided.t(), input).synchronize();
    for (int r = 0; r < size; ++r) CHECK(at::equal(output[r], at::full({3}, 10 * r + rank).to(type)));
    CHECK(at::equal(strided.t(), output));
  }
}

TEST_CASE("outputs of the wrong size are refused before anything is sent") {
  TestedComm comm{test_world()};
  const int size = comm.size();
  CHECK_THROWS_AS(comm.all_gather(at::zeros({size, 3}), at::zeros({2})), lockstep::CommunicationError);
  CHECK_THROWS_AS(comm.all_gather(at::zeros({size, 2}, at::kLong), at::zeros({2})),
                  lockstep::CommunicationError);
  CHECK_THROWS_AS(comm.reduce_scatter(at::zeros({3}), at::zeros({size, 2})), lockstep::CommunicationError);
  CHECK_THROWS_AS(comm.all_to_all(at::zeros({size + 1, 2}), at::zeros({size + 1, 2})),
                  lockstep::CommunicationError);
  comm.barrier();
}

}  // namespace gloo_gather_test
