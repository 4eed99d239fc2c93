#pragma once

#include <c10/core/ScalarType.h>

#include <string_view>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// Throws UsageError unless `type` supports arithmetic; one-byte floating-point dtypes are for storage only.
inline void require_float_type(std::string_view what, at::ScalarType type) {
  if (type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble) return;
  throw UsageError(
      detail::formatted("{} is {}: give float16, bfloat16, float32 or float64", what, c10::toString(type)));
}

}  // namespace lockstep::detail
