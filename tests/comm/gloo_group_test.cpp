#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/tested_comm.hpp"

namespace gloo_group_test {

using lockstep_test::TestedComm;

TEST_CASE("several communicators of one world do not disturb each other") {
  TestedComm first{test_world()}, second{test_world()};
  auto a = at::ones({100}), b = at::full({100}, 2.0);
  auto work_a = first.all_reduce(a), work_b = second.all_reduce(b);
  work_b.synchronize();
  work_a.synchronize();
  CHECK(a[0].item<double>() == first.size());
  CHECK(b[0].item<double>() == 2 * first.size());
  TestedComm moved = std::move(first);
  moved.barrier();
  second = std::move(moved);
  second.barrier();
}

TEST_CASE("sub-groups have ranks of their own") {
  TestedComm comm{test_world()};
  const int size = comm.size(), rank = comm.rank();
  std::vector<int> even, odd;
  for (int r = 0; r < size; ++r) (r % 2 == 0 ? even : odd).push_back(r);
  auto evens = comm.new_group(even);
  auto odds = comm.new_group(odd);
  CHECK(evens.has_value() == (rank % 2 == 0));
  CHECK(odds.has_value() == (rank % 2 == 1));
  auto& own = rank % 2 == 0 ? *evens : *odds;
  CHECK(own.rank() == rank / 2);
  CHECK(own.size() == static_cast<int>((rank % 2 == 0 ? even : odd).size()));
  CHECK(own.world().rank() == rank);
  auto tensor = at::full({5}, static_cast<double>(rank));
  own.all_reduce(tensor).synchronize();
  double sum = 0;
  for (int r : rank % 2 == 0 ? even : odd) sum += r;
  CHECK(at::equal(tensor, at::full({5}, sum)));

  auto inner = own.new_group({0});
  CHECK(inner.has_value() == (own.rank() == 0));
  if (inner) inner->barrier();
  CHECK_FALSE(comm.new_group({}).has_value());
  comm.barrier();
}

TEST_CASE("a communicator that was moved from says so") {
  lockstep_test::TestedComm first(test_world());
  lockstep_test::TestedComm second(std::move(first));
  CHECK_THROWS_AS(first.size(),
                  lockstep::UsageError);  // NOLINT(bugprone-use-after-move): that is what it tests
  CHECK_THROWS_WITH(first.all_reduce(torch::ones({2})),
                    "this communicator was moved from, into a Trainer for instance: use the communicator "
                    "that now holds the group, such as trainer.comm()");
  CHECK_NOTHROW(second.barrier());
}

TEST_CASE("a sub-group of ranks that are none is refused") {
  TestedComm comm{test_world()};
  CHECK_THROWS_AS(comm.new_group({comm.size()}), lockstep::CommunicationError);
  CHECK_THROWS_AS(comm.new_group({0, 0}), lockstep::CommunicationError);
}

TEST_CASE("after shutdown a call says so") {
  TestedComm comm{test_world()};
  comm.barrier();
  comm.shutdown();
  comm.shutdown();
  CHECK_THROWS_WITH(comm.barrier(), "barrier called after shutdown(): make a new communicator");
}

}  // namespace gloo_group_test
