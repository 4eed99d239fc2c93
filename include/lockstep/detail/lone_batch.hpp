#pragma once

#include <cstddef>

#include "lockstep/detail/linkage.hpp"

namespace lockstep::detail {

/// A batch of a pass in which the last of `ranks` ranks has fewer batches than this rank.
struct LoneBatch {
  std::size_t number = 0;  // from 1; 0 if every rank has this batch
  std::size_t fewest = 0;  // the number of batches of the last rank
  int ranks = 0;
};

/// The batch that this thread took last from a DataLoader, outside of lockstep's own calls.
LOCKSTEP_PROCESS_WIDE inline constinit thread_local LoneBatch lone_batch{};

}  // namespace lockstep::detail
