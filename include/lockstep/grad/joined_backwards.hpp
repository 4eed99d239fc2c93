#pragma once

#include <atomic>
#include <exception>
#include <vector>

namespace lockstep::detail {

/// How many `ddp.backward` calls are running in this process.
inline std::atomic<int> open_backwards{0};

/// A reduction of another model, which the running `ddp.backward` has reached and will end.
struct JoinedReduction {
  void* reducer;
  void (*close)(void* reducer, const std::exception_ptr& failure);
};
inline std::vector<JoinedReduction> joined_reductions;

}  // namespace lockstep::detail
