#pragma once

#include <chrono>
#include <string>
#include <thread>

#include <fmt/format.h>

#include "support/ranks.hpp"

namespace lockstep_test {

inline std::string late_rank_key(const std::string& what, int rank) {
  return fmt::format("late rank/{}/{}", what, rank);
}

/// Called by rank 1, which comes late to `what`: blocks until every other rank has called saw_it_late(what).
inline void come_late(const std::string& what) {
  for (int rank = 0; rank < test_world().size(); ++rank)
    while (rank != 1 && !test_world().store()->check({late_rank_key(what, rank)}))
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

/// Called by every other rank once it has seen that rank 1 is missing.
inline void saw_it_late(const std::string& what) {
  test_world().store()->set(late_rank_key(what, test_world().rank()), std::string("yes"));
}

}  // namespace lockstep_test
