#pragma once

#include <chrono>
#include <string>

#include <fmt/format.h>

#include "lockstep/world/world.hpp"

namespace lockstep_test {

/// Returns when every rank has come to `where`, without a communicator. Processes begin seconds apart, which
/// a test's short timeout does not allow for.
inline void meet(const lockstep::World& world, const std::string& where = "the start") {
  const auto store = world.store();
  const auto key = [&](int rank) { return fmt::format("program/{}/{}", where, rank); };
  store->set(key(world.rank()), std::string("here"));
  for (int rank = 0; rank < world.size(); ++rank) store->wait({key(rank)}, std::chrono::seconds(60));
}

}  // namespace lockstep_test
