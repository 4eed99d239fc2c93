#pragma once

#include <optional>

#include "lockstep/world/world.hpp"
#include "support/catch.hpp"

namespace lockstep_test {
inline std::optional<lockstep::World>& world_of_tests() {
  static std::optional<lockstep::World> world;
  return world;
}
}  // namespace lockstep_test

/// The world of a test program that runs on several ranks (lockstep_ranks_test): every rank runs every
/// TEST_CASE, in the same order.
inline const lockstep::World& test_world() {
  return lockstep_test::world_of_tests().value();
}
