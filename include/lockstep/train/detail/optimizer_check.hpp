#pragma once

#include <torch/optim/optimizer.h>

namespace lockstep::inline v0_1::detail {

/// Throws an Error if an option or a state does not fit. LibTorch's own SGD, Adam and AdamW load any.
void check_states(torch::optim::Optimizer& optimizer);

}  // namespace lockstep::inline v0_1::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/train/detail/optimizer_check-inl.hpp"
#endif
