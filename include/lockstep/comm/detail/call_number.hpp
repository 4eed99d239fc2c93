#pragma once

#include <cstdint>
#include <string_view>

#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::detail {

/// How often rank `rank` has asked for a number of `what`, from 0: the same on every rank where all ask in
/// the same order. Counted in the store, so that it does not matter which World of the process, and which of
/// its shared objects, asks. Throws what the store throws. Thread-safe.
inline std::int64_t next_number(c10d::Store& store, int rank, std::string_view what) {
  return store.add(fmt::format("lockstep/{}/calls of rank {}", what, rank), 1) - 1;
}

}  // namespace lockstep::detail
