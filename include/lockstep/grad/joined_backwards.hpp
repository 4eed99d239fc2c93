#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <vector>

namespace lockstep::detail {

/// How many `ddp.backward` calls are running in this process.
inline std::atomic<int> open_backwards{0};

/// How many of them are of a sum with a count: no other model can join those, whose gradients would be
/// divided by the world size instead.
inline std::atomic<int> counting_backwards{0};

/// A reduction of another model, which the running `ddp.backward` has reached and will end.
struct JoinedReduction {
  void* reducer;
  std::size_t made;  // the how-manieth reducer of this process: the same order on every rank
  void (*close)(void* reducer, const std::exception_ptr& failure);
  void (*abandon)(void* reducer);
};
inline std::atomic<std::size_t> reducers_made{0};

inline std::vector<JoinedReduction> joined_reductions;

}  // namespace lockstep::detail
