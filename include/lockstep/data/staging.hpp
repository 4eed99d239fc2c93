#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <deque>
#include <exception>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/data/dataset.hpp"
#include "lockstep/data/detail/side_stream.hpp"

namespace lockstep {

/// A pass over a loader's batches that brings each to a device while the caller still computes on the one
/// before: from page-locked memory, on a stream of its own, without blocking the host. Without a stream it
/// hands out the loader's batches as they are, none ahead of the caller.
///
/// A batch is drawn from the loader one ahead of the caller; what that throws, the step to that batch throws.
/// Tensors that are on the device already stay as they are. Used from one thread; the loader and the stream
/// outlive it.
template <class Loader, detail::CopyStream Stream = detail::SideStream>
class StagedPass {
 public:
  using Batch = typename Loader::Batch;
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;
  using iterator_concept = std::input_iterator_tag;

  /// Begins a pass of `loader`; `stream` may be null.
  StagedPass(Loader& loader, Stream* stream) : stream_(stream), host_(loader.begin()) {
    if (!stream_) return;
    stage();
    advance();
  }
  StagedPass(StagedPass&& other) = default;
  StagedPass& operator=(StagedPass&&) = delete;
  /// Waits for the copies under way, whose memory it holds.
  ~StagedPass() {
    try {
      while (!copying_.empty()) release_first();
    } catch (...) {  // the device has failed, and whoever computes on it hears of it
    }
  }

  Batch& operator*() const { return stream_ ? *batch_ : *host_; }
  Batch* operator->() const { return &**this; }
  StagedPass& operator++() {
    if (stream_)
      advance();
    else
      ++host_;
    return *this;
  }
  void operator++(int) { ++*this; }
  bool operator==(std::default_sentinel_t end) const { return stream_ ? !batch_ : host_ == end; }

 private:
  struct Copying {
    typename Stream::Event event;
    std::vector<at::Tensor> pinned;
  };

  // Copies from pinned memory under way at most: the one for the next batch, and one that is about to end.
  static constexpr std::size_t most_copying = 2;

  void advance() {
    batch_.reset();  // its memory serves another
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    if (!next_) return;
    if (!arrived_.empty()) stream_->join(copying_.back().event);
    for (const at::Tensor& tensor : arrived_) stream_->hand_over(tensor);
    arrived_.clear();
    batch_ = std::exchange(next_, std::nullopt);
    stage();
  }

  // Draws the next batch and begins its copies.
  void stage() {
    try {
      if (drawn_) ++host_;
      drawn_ = true;
      if (host_ == std::default_sentinel) return;
      next_.emplace(std::move(*host_));
      if constexpr (TensorBatch<Batch>) begin_copies(*next_);
    } catch (...) {
      arrived_.clear();
      next_.reset();
      error_ = std::current_exception();
    }
  }

  void begin_copies(Batch& batch) {
    while (!copying_.empty() && (copying_.size() >= most_copying || stream_->done(copying_.front().event)))
      release_first();
    std::vector<at::Tensor> pinned;
    const auto keep = [&] {
      if (!pinned.empty()) copying_.push_back({stream_->record(), std::move(pinned)});
    };
    try {
      for_each_tensor(batch, [&](at::Tensor& tensor) {
        if (!tensor.is_cpu()) return;
        pinned.push_back(stream_->pinned(tensor));
        tensor = stream_->copy(pinned.back());
        arrived_.push_back(tensor);
      });
    } catch (...) {
      keep();  // of the copies that were begun
      throw;
    }
    keep();
  }

  void release_first() {
    stream_->wait(copying_.front().event);
    copying_.pop_front();
  }

  Stream* stream_;
  typename Loader::Iterator host_;
  bool drawn_ = false;
  std::optional<Batch> next_;
  mutable std::optional<Batch> batch_;
  std::vector<at::Tensor> arrived_;  // tensors of `next_`, whose copies the last of `copying_` is behind
  std::deque<Copying> copying_;
  std::exception_ptr error_;
};

/// A loader's batches on a device: `for (auto& batch : StagedBatches{loader, device})`. On a GPU each comes
/// over while the caller computes on the one before (StagedPass); otherwise they are as the loader gives
/// them. Batches whose tensors cannot be found (TensorBatch) stay as they are, too. One pass at a time; the
/// loader outlives it.
template <class Loader>
class StagedBatches {
 public:
  StagedBatches(Loader& loader, const c10::Device& device) : loader_(loader) {
    if (device.is_cuda()) stream_.emplace(device);
  }

  [[nodiscard]] StagedPass<Loader> begin() {
    return StagedPass<Loader>(loader_, stream_ ? &*stream_ : nullptr);
  }
  static std::default_sentinel_t end() { return {}; }

 private:
  Loader& loader_;
  std::optional<detail::SideStream> stream_;
};

}  // namespace lockstep
