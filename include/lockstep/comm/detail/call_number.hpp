#pragma once

#include <cstdint>
#include <string_view>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/detail/format.hpp"
#include "lockstep/world/detail/store_keys.hpp"

namespace lockstep::detail {

/// Returns how many times rank `rank` has asked for a number of `what`, from 0. The number is equal on every
/// rank if all ranks ask in the same order. The counter is in the store, so every World and every shared
/// object of the process counts together. Throws what the store throws. Thread-safe.
inline std::int64_t next_number(c10d::Store& store, int rank, std::string_view what) {
  return store.add(store_keys::calls_of_rank(what, rank), 1) - 1;
}

}  // namespace lockstep::detail
