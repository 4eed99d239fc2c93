#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include <fmt/format.h>

#include "lockstep/comm/detail/dtype_name.hpp"

namespace lockstep::detail {

/// "[4, 3] float32", as the error messages name a tensor.
inline std::string describe(const at::Tensor& tensor) {
  std::string text = "[";
  for (std::int64_t size : tensor.sizes()) text += fmt::format("{}{}", text.size() > 1 ? ", " : "", size);
  return text + "] " + dtype_name(tensor.scalar_type());
}

}  // namespace lockstep::detail
