#pragma once

#include <utility>

#include "lockstep/precision/detail/autocast.hpp"
#include "lockstep/precision/fp32.hpp"

namespace lockstep {

/// Forward in bfloat16 where autocast knows how, parameters, gradients and step in their own format:
/// `torch.autocast(dtype=torch.bfloat16)`. Its range is that of float32, so that nothing needs a scale.
struct Bf16 : Fp32 {
  template <class Forward>
  decltype(auto) forward(Forward&& forward) const {
    const detail::AutocastScope scope(at::kBFloat16);
    return std::forward<Forward>(forward)();
  }
};

}  // namespace lockstep
