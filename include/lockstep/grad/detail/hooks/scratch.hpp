#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstddef>
#include <vector>

namespace lockstep::detail {

/// A tensor for each bucket that keeps its memory from step to step, as the buckets keep theirs.
class Scratch {
 public:
  /// One of this size for the bucket `index`: the same as before, unless the bucket has become another.
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
