#pragma once

#include <cstdint>
#include <string_view>

#include <fmt/format.h>

#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// How often this rank has called this with `what` in its world, from 0: the same number on every rank where
/// all call it in the same order. Counted in the store, so that it does not matter which World of the
/// process, and which of its shared objects, makes the call. 0 in a world of one rank, whose processes share
/// no store. Throws what the store throws. Thread-safe.
inline std::int64_t next_number(const World& world, std::string_view what) {
  if (world.size() == 1) return 0;
  return world.store()->add(fmt::format("lockstep/{}/calls of rank {}", what, world.rank()), 1) - 1;
}

}  // namespace lockstep::detail
