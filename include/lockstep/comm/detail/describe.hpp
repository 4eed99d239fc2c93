#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

namespace lockstep::detail {

/// Returns Python's name of a dtype, such as "float32".
inline std::string dtype_name(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kByte:
      return "uint8";
    case at::kChar:
      return "int8";
    case at::kShort:
      return "int16";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kBool:
      return "bool";
    case at::kComplexFloat:
      return "complex64";
    case at::kComplexDouble:
      return "complex128";
    default:
      return c10::toString(type);
  }
}

/// Returns a shape or strides as Python prints them: "[4, 3]".
inline std::string shape_text(c10::IntArrayRef sizes) {
  std::string text = "[";
  for (const std::int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

/// Returns a tensor's shape and dtype: "[4, 3] float32".
inline std::string describe(const at::Tensor& tensor) {
  return shape_text(tensor.sizes()) + " " + dtype_name(tensor.scalar_type());
}

}  // namespace lockstep::detail
