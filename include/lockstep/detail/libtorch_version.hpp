#pragma once

// All code that depends on the version of LibTorch. The rest of lockstep is written so that
// each version compiles and computes the same: it divides sums where Gloo has averages only since 2.13
// (native() in comm/detail/tensor_lists.hpp), sets the options of an optimizer's groups where 2.15 replaces
// them by defaults (keep_options() in optim/detail/optimizer.hpp), and reads elements by const_data()
// (const_data.hpp). packaging/torch_matrix.py builds and runs a program with each version.

#include "lockstep/detail/libtorch_required.hpp"

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::detail {

/// c10d::Store with `clone`, which LibTorch declares since 2.8: subclasses can write `override` for any
/// version.
class ClonableStore : public c10d::Store {
 public:
  virtual c10::intrusive_ptr<c10d::Store> clone() = 0;
};

}  // namespace lockstep::detail
