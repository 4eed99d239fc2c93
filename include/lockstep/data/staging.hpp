#pragma once

#include <concepts>
#include <cstddef>
#include <deque>
#include <exception>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/data/dataset.hpp"

namespace lockstep::detail {

/// Copies batches to a device concurrently with the computation. A side stream runs the copies; the current
/// stream is the one on which the caller computes. Not thread-safe: one thread makes all calls.
///
/// 1. `pinned(tensor)` returns the tensor in pinned memory: `tensor` itself, or a copy.
/// 2. `copy(tensor)` launches the copy of a pinned tensor on the side stream, and returns the device tensor.
///    The pinned tensor must live until the copy is complete.
/// 3. `record()` returns an Event after all work submitted to the side stream so far.
/// 4. `join(event)` makes all later work on the current stream wait for the event. Does not block the host.
/// 5. `hand_over(tensor)` records that the current stream uses a tensor of the side stream. After the tensor
///    is destroyed, its memory is not reused until the work submitted to the current stream is complete.
/// 6. `done(event)` returns without blocking whether the event is complete. `wait(event)` blocks the host
///    until it is.
template <class S>
concept CopyStream = requires(S& stream, const at::Tensor& tensor, typename S::Event& event) {
  requires std::movable<typename S::Event>;
  { stream.pinned(tensor) } -> std::same_as<at::Tensor>;
  { stream.copy(tensor) } -> std::same_as<at::Tensor>;
  { stream.record() } -> std::same_as<typename S::Event>;
  stream.join(event);
  stream.hand_over(tensor);
  { stream.done(event) } -> std::same_as<bool>;
  stream.wait(event);
};

/// A CopyStream from LibTorch's pool of a device. Uses LibTorch's device-generic interface, so it compiles
/// without CUDA headers.
class SideStream {
 public:
  using Event = c10::Event;

  /// Throws c10::Error for a device that this build of LibTorch does not support.
  explicit SideStream(const c10::Device& device)
      : device_(device), guard_(device.type()), side_(guard_.getStreamFromGlobalPool(device)) {}

  [[nodiscard]] at::Tensor pinned(const at::Tensor& tensor) const {
    return tensor.is_cpu() && !tensor.is_pinned() ? tensor.pin_memory() : tensor;
  }
  [[nodiscard]] at::Tensor copy(const at::Tensor& tensor) const {
    const c10::StreamGuard on_side(side_);
    return tensor.to(device_, tensor.scalar_type(), /*non_blocking=*/true);
  }
  [[nodiscard]] Event record() const {
    Event event(device_.type());
    event.record(side_);
    return event;
  }
  void join(const Event& event) const { event.block(guard_.getStream(device_)); }
  void hand_over(const at::Tensor& tensor) const { tensor.record_stream(guard_.getStream(device_)); }
  [[nodiscard]] bool done(const Event& event) const { return event.query(); }
  void wait(const Event& event) const { event.synchronize(); }

 private:
  c10::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream side_;
};

static_assert(CopyStream<SideStream>);

}  // namespace lockstep::detail

namespace lockstep {

/// A pass over a loader's batches that copies each to a device while the caller computes on the previous one:
/// from pinned memory, on a separate stream, without blocking the host. Without a stream it yields the
/// loader's batches unchanged and does not read ahead.
///
/// With a stream it reads one batch ahead of the caller. An exception from reading a batch is thrown by the
/// increment that reaches this batch. Tensors that are not on the CPU stay where they are. Not thread-safe;
/// loader and stream must outlive it.
template <class Loader, detail::CopyStream Stream = detail::SideStream>
class StagedPass {
 public:
  using Batch = typename Loader::Batch;
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;
  using iterator_concept = std::input_iterator_tag;

  /// Starts a pass of `loader`. `stream` may be null.
  StagedPass(Loader& loader, Stream* stream) : stream_(stream), host_(loader.begin()) {
    if (!stream_) return;
    stage();
    advance();
  }
  StagedPass(StagedPass&& other) = default;
  StagedPass& operator=(StagedPass&&) = delete;
  /// Blocks until the copies in flight, whose memory it owns, are complete.
  ~StagedPass() {
    try {
      while (!copying_.empty()) release_first();
    } catch (...) {  // the device has failed; the next operation on it reports that
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

  // Maximum number of copies in flight: the next batch's, and one that is about to complete.
  static constexpr std::size_t most_copying = 2;

  void advance() {
    batch_.reset();  // frees its memory for another batch
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    if (!next_) return;
    if (!arrived_.empty()) stream_->join(copying_.back().event);
    for (const at::Tensor& tensor : arrived_) stream_->hand_over(tensor);
    arrived_.clear();
    batch_ = std::exchange(next_, std::nullopt);
    stage();
  }

  // Reads the next batch and launches its copies.
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
      keep();  // keeps the memory of the copies already launched
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
  std::vector<at::Tensor> arrived_;  // tensors of `next_`, which the last event of `copying_` covers
  std::deque<Copying> copying_;
  std::exception_ptr error_;
};

/// Iterates over a loader's batches on a device: `for (auto& batch : StagedBatches{loader, device})`. On a
/// GPU, copies of the next batch overlap the caller's work (StagedPass). On another device, and for batches
/// that do not model TensorBatch, yields the loader's batches unchanged. Supports one pass at a time; the
/// loader must outlive it.
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
