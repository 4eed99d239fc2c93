#pragma once

#include <atomic>
#include <cstddef>

#include "lockstep/detail/linkage.hpp"

namespace lockstep::detail {

/// The shuffled passes that this process has started as the last rank, with fewer batches than rank 0.
LOCKSTEP_PROCESS_WIDE inline std::atomic<std::size_t> short_passes{0};

}  // namespace lockstep::detail
