#pragma once

#include <functional>

#include <torch/optim/optimizer.h>

namespace lockstep::inline v0_1::detail {

/// An optimizer whose state is sharded over the ranks, independent of the communicator's type. `consolidate`
/// gathers the state on rank `to` for saving. Collective.
class ShardedState {
 public:
  using Access = std::function<void(torch::optim::Optimizer&)>;

  virtual void consolidate(int to) = 0;
  /// Calls `read` with the inner optimizer, which has all groups and states meanwhile. Not collective. Throws
  /// CheckpointError unless `consolidate` has gathered the states on this rank since the last step.
  virtual void read_full_state(const Access& read) const = 0;
  /// Calls `write` with the inner optimizer, which has all groups meanwhile, and then keeps the states of
  /// this rank's shard. Not collective.
  virtual void write_full_state(const Access& write) = 0;
  /// Returns a function that restores the options and the states of this rank's shard. Not collective.
  virtual std::function<void()> snapshot() = 0;

 protected:
  ~ShardedState() = default;
};

}  // namespace lockstep::inline v0_1::detail
