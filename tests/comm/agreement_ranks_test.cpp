#include "lockstep/comm/agreement.hpp"

#include <stdexcept>

#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/tested_comm.hpp"
#include "support/text_of.hpp"

namespace agreement_ranks_test {

TEST_CASE("every rank gets all results, or throws the same error") {
  const lockstep::World& world = test_world();
  lockstep_test::TestedComm comm{world};
  const int last = world.size() - 1;
  const auto results = lockstep::agree(comm, [&] { return std::to_string(10 * world.rank()); });
  REQUIRE(static_cast<int>(results.size()) == world.size());
  for (int rank = 0; rank < world.size(); ++rank)
    CHECK(results[static_cast<std::size_t>(rank)] == std::to_string(10 * rank));

  const std::string failed = text_of<lockstep::DataError>([&] {
    lockstep::agree<lockstep::DataError>(comm, [&] {
      if (world.rank() == last) throw std::runtime_error("no such file");
    });
  });
  CHECK(failed == (last == 0 ? "no such file" : "rank " + std::to_string(last) + ": no such file"));

  CHECK(lockstep::agree_with_rank_zero(comm, [&] { return std::to_string(world.rank()); }) == "0");
  CHECK(text_of<lockstep::CheckpointError>([&] {
          lockstep::agree_with_rank_zero<lockstep::CheckpointError>(
              comm, [] { throw std::runtime_error("disk full"); });
        }) == "disk full");

  CHECK(!lockstep::any_rank(comm, false));
  CHECK(lockstep::any_rank(comm, world.rank() == last));
  comm.shutdown();
}

}  // namespace agreement_ranks_test
