#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace lockstep::inline v0_1::detail {

/// Returns the first element of `tensor` like at::Tensor::const_data_ptr<T>, and throws c10::Error if its
/// dtype is not T's. A program built with clang 18 or newer cannot link that function from a LibTorch built
/// with gcc, since the two mangle the constraint of its template differently.
template <class T>
const T* const_data(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == c10::CppTypeToScalarType<T>::value, "expected a tensor of ",
              c10::CppTypeToScalarType<T>::value, ", found one of ", tensor.scalar_type());
  return static_cast<const T*>(tensor.const_data_ptr());
}

}  // namespace lockstep::inline v0_1::detail
