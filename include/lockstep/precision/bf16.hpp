#pragma once

#include <utility>

#include "lockstep/precision/detail/autocast.hpp"
#include "lockstep/precision/fp32.hpp"

namespace lockstep {

/// Runs the forward in bfloat16 where autocast supports it; parameters, gradients and the optimizer step keep
/// their own dtype. Needs no loss scaling: bfloat16 has the range of float32. Counterpart:
/// torch.autocast(dtype=torch.bfloat16).
struct Bf16 : Fp32 {
  template <class Forward>
  decltype(auto) forward(Forward&& forward) const {
    const detail::AutocastScope scope(at::kBFloat16);
    return std::forward<Forward>(forward)();
  }
};

}  // namespace lockstep
