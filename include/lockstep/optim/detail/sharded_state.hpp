#pragma once

namespace lockstep::detail {

/// An optimizer whose state is sharded over the ranks, independent of the communicator's type. `consolidate`
/// gathers the state on rank `to` for saving. Collective.
class ShardedState {
 public:
  virtual void consolidate(int to) = 0;

 protected:
  ~ShardedState() = default;
};

}  // namespace lockstep::detail
