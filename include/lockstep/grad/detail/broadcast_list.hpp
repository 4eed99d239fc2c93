#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"

namespace lockstep::inline v0_1::detail {

/// Returns a one-dimensional byte tensor that aliases the memory of a dense tensor, not an autograd view.
inline at::Tensor bytes_alias(const at::Tensor& tensor) {
  const auto size = static_cast<std::int64_t>(tensor.element_size());
  return at::empty({0}, tensor.options().dtype(at::kByte))
      .set_(tensor.storage(), tensor.storage_offset() * size, {tensor.numel() * size}, {1});
}

/// Broadcasts a list of tensors as bytes, so that several dtypes share a broadcast, in chunks of one device
/// and at most 250 MiB; a larger tensor is a chunk of its own. Keeps the chunks between runs, and rebuilds
/// them if a tensor's memory has moved or changed its size.
class BroadcastList {
 public:
  explicit BroadcastList(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}

  [[nodiscard]] bool empty() const { return tensors_.empty(); }

  /// Copies the tensors of `root` to every rank. Collective; stream-ordered.
  template <Communicator Comm>
  void run(Comm& comm, int root) {
    const c10::NoGradGuard no_grad;
    if (!up_to_date()) rebuild();
    if (chunks_.size() == 1) {  // the common case: needs no list of works
      comm.broadcast(chunks_[0], root).wait();
    } else {
      std::vector<typename Comm::Work> works;
      works.reserve(chunks_.size());
      for (const auto& chunk : chunks_) works.push_back(comm.broadcast(chunk, root));
      for (auto& work : works) work.wait();
    }
    for (auto& [tensor, copy] : copies_) tensor.copy_(copy);
  }

 private:
  static constexpr std::int64_t chunk_bytes = std::int64_t{250} << 20;

  struct Place {
    const void* data;
    std::size_t bytes;
    bool dense;
    bool operator==(const Place&) const = default;
  };
  static Place place_of(const at::Tensor& tensor) {
    return {tensor.const_data_ptr(), tensor.nbytes(), tensor.is_non_overlapping_and_dense()};
  }

  [[nodiscard]] bool up_to_date() const {
    return copies_.empty() &&
           std::equal(places_.begin(), places_.end(), tensors_.begin(), tensors_.end(),
                      [](const Place& place, const at::Tensor& tensor) { return place == place_of(tensor); });
  }

  void rebuild() {
    places_.clear();
    chunks_.clear();
    copies_.clear();
    std::int64_t bytes = 0;
    for (at::Tensor& tensor : tensors_) {
      places_.push_back(place_of(tensor));
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

  std::vector<at::Tensor> tensors_;
  std::vector<Place> places_;
  std::vector<std::vector<at::Tensor>> chunks_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

}  // namespace lockstep::inline v0_1::detail
