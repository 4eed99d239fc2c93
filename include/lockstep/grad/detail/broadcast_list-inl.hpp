#pragma once

#include <cstdint>
#include <utility>

#include <ATen/ops/empty.h>

#include "lockstep/detail/linkage.hpp"
#include "lockstep/grad/detail/broadcast_list.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE at::Tensor bytes_alias(const at::Tensor& tensor) {
  const auto size = static_cast<std::int64_t>(tensor.element_size());
  return at::empty({0}, tensor.options().dtype(at::kByte))
      .set_(tensor.storage(), tensor.storage_offset() * size, {tensor.numel() * size}, {1});
}

LOCKSTEP_INLINE bool BroadcastList::up_to_date() const {
  if (places_.size() != tensors_.size() || !copies_.empty()) return false;
  for (std::size_t i = 0; i < tensors_.size(); ++i)
    if (places_[i] != tensors_[i].const_data_ptr()) return false;
  return true;
}

LOCKSTEP_INLINE void BroadcastList::rebuild() {
  places_.clear();
  chunks_.clear();
  copies_.clear();
  std::int64_t bytes = 0;
  for (at::Tensor& tensor : tensors_) {
    places_.push_back(tensor.const_data_ptr());
    if (tensor.numel() == 0) continue;
    at::Tensor flat;
    if (tensor.is_non_overlapping_and_dense()) {
      flat = bytes_alias(tensor);
    } else {
      copies_.emplace_back(tensor, tensor.contiguous());
      flat = bytes_alias(copies_.back().second);
    }
    const std::int64_t size = flat.numel();
    const bool joins =
        !chunks_.empty() && bytes + size <= chunk_bytes && chunks_.back()[0].device() == flat.device();
    if (!joins) {
      chunks_.emplace_back();
      bytes = 0;
    }
    chunks_.back().push_back(std::move(flat));
    bytes += size;
  }
}

}  // namespace lockstep::detail
