#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <exception>
#include <string>

#include "lockstep/detail/lists.hpp"

namespace lockstep::inline v0_1::detail {

/// Returns Python's name of a dtype, such as "float32".
inline std::string dtype_name(at::ScalarType type) try {
  return std::string(c10::getDtypeNames(type).first);
} catch (const std::exception&) {  // a dtype that Python has no name for yet
  return c10::toString(type);
}

/// Returns a shape or strides as Python prints them: "[4, 3]".
inline std::string shape_text(c10::IntArrayRef sizes) {
  return "[" + joined(sizes, ", ") + "]";
}

/// Returns a tensor's shape and dtype: "[4, 3] float32".
inline std::string describe(const at::Tensor& tensor) {
  return shape_text(tensor.sizes()) + " " + dtype_name(tensor.scalar_type());
}

}  // namespace lockstep::inline v0_1::detail
