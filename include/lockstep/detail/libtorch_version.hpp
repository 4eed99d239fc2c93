#pragma once

// A declaration that only some versions of LibTorch have. Other differences are met where they occur, by code
// that is right with each version: sums are divided, since Gloo has averages only since 2.13 (native() in
// comm/detail/tensor_lists.hpp); the options of an optimizer's groups are set again, since 2.15 replaces them
// by defaults (keep_options() in optim/detail/optimizer.hpp); elements are read by const_data()
// (const_data.hpp). libtorch_required.hpp refuses versions before 2.6. packaging/torch_matrix.py builds and
// runs a program with each version.

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
