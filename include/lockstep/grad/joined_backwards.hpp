#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <utility>
#include <vector>

namespace lockstep::detail {

/// How many `ddp.backward` calls are running in this process.
inline std::atomic<int> open_backwards{0};

/// How many of them are of a sum with a count: no other model can join those, whose gradients would be
/// divided by the world size instead.
inline std::atomic<int> counting_backwards{0};

/// Marks a `ddp.backward` as running while it lives, in `running`, which is of its model.
class InsideBackward {
 public:
  InsideBackward(bool& running, bool counts)
      : nested(std::exchange(running, true)),
        outermost(open_backwards++ == 0),
        running_(running),
        counts_(counts) {
    counting_backwards += counts_;
  }
  InsideBackward(const InsideBackward&) = delete;
  InsideBackward& operator=(const InsideBackward&) = delete;
  ~InsideBackward() {
    counting_backwards -= counts_;
    --open_backwards;
    running_ = nested;
  }

  const bool nested;     ///< inside another one of the same model
  const bool outermost;  ///< inside none of any model

 private:
  bool& running_;
  bool counts_;
};

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
