#pragma once

#include <cstddef>
#include <cstdint>

#include "lockstep/detail/linkage.hpp"

namespace lockstep::inline v0_1::detail {

/// A batch of a pass of a DataLoader, and how many the last of `ranks` ranks has.
struct DrawnBatch {
  std::size_t number = 0;  // from 1
  std::size_t fewest = 0;
  int ranks = 0;            // 0 if that is unknown, or a call of lockstep's own reads the batches
  std::uint64_t first = 0;  // a hash of the pass's first batch; 0 if it has no tensors on the CPU
  std::size_t pass = 0;     // of a sampler that another loader reads from
};

/// The batch that this thread took last from a DataLoader whose pass goes on, or that another loader has drawn.
LOCKSTEP_PROCESS_WIDE inline constinit thread_local DrawnBatch drawn_batch{};

}  // namespace lockstep::inline v0_1::detail
