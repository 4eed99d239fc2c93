#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstddef>
#include <vector>

namespace lockstep::detail {

/// Scratch tensors, one for each bucket, whose memory is kept from step to step.
class Scratch {
 public:
  /// Returns the tensor of bucket `index`. Reallocates it only if sizes, dtype or device have changed.
  at::Tensor& get(std::size_t index, at::IntArrayRef sizes, const at::TensorOptions& options) {
    if (index >= tensors_.size()) tensors_.resize(index + 1);
    at::Tensor& tensor = tensors_[index];
    if (!tensor.defined() || tensor.sizes() != sizes || tensor.scalar_type() != options.dtype() ||
        tensor.device() != options.device())
      tensor = at::empty(sizes, options);
    return tensor;
  }

 private:
  std::vector<at::Tensor> tensors_;
};

}  // namespace lockstep::detail
