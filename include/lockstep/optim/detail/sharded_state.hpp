#pragma once

namespace lockstep::detail {

/// An optimizer whose state is spread over the ranks, whatever their communicator: `consolidate`, which is
/// collective, brings it to the rank that is to save it.
class ShardedState {
 public:
  virtual void consolidate(int to) = 0;

 protected:
  ~ShardedState() = default;
};

}  // namespace lockstep::detail
