#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "lockstep/comm/detail/dtype_name.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

/// Returns a tensor's shape and dtype for error messages: "[4, 3] float32".
inline std::string describe(const at::Tensor& tensor) {
  std::string text = "[";
  for (std::int64_t size : tensor.sizes())
    text += detail::formatted("{}{}", text.size() > 1 ? ", " : "", size);
  return text + "] " + dtype_name(tensor.scalar_type());
}

}  // namespace lockstep::detail
