#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"

namespace lockstep::detail {

/// Returns a one-dimensional byte tensor that aliases the memory of a dense tensor, not an autograd view.
at::Tensor bytes_alias(const at::Tensor& tensor);

/// Broadcasts a list of tensors as bytes, so that several dtypes share a broadcast, in chunks of one device
/// and at most 250 MiB; a larger tensor is a chunk of its own. Keeps the chunks between runs, and rebuilds
/// them if a tensor has moved to other memory.
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

  [[nodiscard]] bool up_to_date() const;
  void rebuild();

  std::vector<at::Tensor> tensors_;
  std::vector<const void*> places_;
  std::vector<std::vector<at::Tensor>> chunks_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

}  // namespace lockstep::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/grad/detail/broadcast_list-inl.hpp"
#endif
