#include "lockstep/comm/communicator.hpp"
#include "support/catch.hpp"

TEST_CASE("a lone process is rank 0 of 1") {
  const auto world = lockstep::World::from_environment();
  CHECK(world.rank() == 0);
  CHECK(world.size() == 1);
}
