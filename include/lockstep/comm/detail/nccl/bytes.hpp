#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/nccl/calls.hpp"

namespace lockstep::detail {

/// Moves host bytes through GPU memory. Blocks.
template <NcclDevice D>
class NcclBytes {
 public:
  NcclBytes(const NcclGroupPtr<D>& group, const Call& call) : group_(group), call_(call) {}

  /// Returns every rank's bytes, by rank.
  [[nodiscard]] std::vector<std::string> gather(const std::string& own) const {
    const int size = group_->size();
    const at::Tensor lengths = gather_rows(number(own.size()));
    const auto* length = lengths.template const_data_ptr<std::int64_t>();
    const std::int64_t longest = *std::max_element(length, length + size);
    std::vector<std::string> all(static_cast<std::size_t>(size));
    if (longest == 0) return all;
    const std::int64_t total = std::accumulate(length, length + size, std::int64_t{0});
    if (longest * size <= std::max<std::int64_t>(2 * total, 1 << 16)) {
      const at::Tensor rows = gather_rows(bytes_of(own, longest));
      for (int r = 0; r < size; ++r) all[static_cast<std::size_t>(r)] = text_in(rows[r], length[r]);
      return all;
    }
    // Padding unequal lengths to the longest would multiply the traffic.
    for (int r = 0; r < size; ++r)
      if (length[r] > 0) all[static_cast<std::size_t>(r)] = send_from(own, length[r], r);
    return all;
  }

  /// Returns `root`'s bytes.
  [[nodiscard]] std::string broadcast(const std::string& own, int root) const {
    const at::Tensor length = broadcast(number(own.size()), root);
    const std::int64_t count = *length.template const_data_ptr<std::int64_t>();
    return count == 0 ? std::string() : send_from(own, count, root);
  }

 private:
  static at::Tensor number(std::size_t value) {
    auto tensor = at::zeros({1}, at::kLong);
    *tensor.template mutable_data_ptr<std::int64_t>() = static_cast<std::int64_t>(value);
    return tensor;
  }
  // Converts bytes to a tensor [length], padded with zeros, and back.
  static at::Tensor bytes_of(const std::string& text, std::int64_t length) {
    auto tensor = at::zeros({length}, at::kByte);
    if (!text.empty()) std::memcpy(tensor.mutable_data_ptr(), text.data(), text.size());
    return tensor;
  }
  static std::string text_in(const at::Tensor& tensor, std::int64_t length) {
    return {static_cast<const char*>(tensor.const_data_ptr()), static_cast<std::size_t>(length)};
  }

  [[nodiscard]] std::string send_from(const std::string& own, std::int64_t length, int root) const {
    const at::Tensor sent = group_->rank() == root ? bytes_of(own, length) : at::zeros({length}, at::kByte);
    return text_in(broadcast(sent, root), length);
  }
  [[nodiscard]] at::Tensor gather_rows(const at::Tensor& row) const {
    const at::Tensor rows = upload(at::empty({group_->size(), row.numel()}, row.options()));
    return arrive(start_all_gather<D>(group_, call_, {rows}, {upload(row)}), rows);
  }
  [[nodiscard]] at::Tensor broadcast(const at::Tensor& tensor, int root) const {
    const at::Tensor there = upload(tensor);
    return arrive(start_broadcast<D>(group_, call_, {there}, root), there);
  }
  [[nodiscard]] at::Tensor upload(const at::Tensor& tensor) const {
    return group_->guarded(call_, [&] { return group_->device().upload(tensor); });
  }
  [[nodiscard]] at::Tensor arrive(NcclWork<D> work, const at::Tensor& there) const {
    work.synchronize();  // has a timeout; the device's own synchronization does not
    work.wait();
    return group_->guarded(call_, [&] { return group_->device().download(there); });
  }

  const NcclGroupPtr<D>& group_;
  const Call& call_;
};

}  // namespace lockstep::detail
