#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/comm/detail/nccl/handle.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

/// Owns the memory of a communicator's buffers, registered with NCCL. NCCL or LibTorch allocates it.
///
/// The group and the tensors share ownership. When the last tensor over a buffer is destroyed, on any thread,
/// only events are recorded, on the streams that may still use its memory. The registration ends later, on
/// the thread that issues the next collective, or when the group closes: before its memory is freed, before
/// the communicator is destroyed, and never while the memory is in use. A buffer that outlives the
/// communicator is deregistered but stays valid memory until its last tensor is destroyed. An abort ends the
/// registrations with the communicator.
///
/// Thread safety: any thread may destroy tensors; one thread at a time may call the functions.
template <NcclDevice D>
class Buffers : public std::enable_shared_from_this<Buffers<D>> {
 public:
  using Stream = typename D::Stream;
  using Event = typename D::Event;

  /// Creates the buffers that the options ask for, null if none. `stream` is the communicator's stream.
  /// open_together has checked that this NCCL supports them.
  static std::shared_ptr<Buffers> wanted(const NcclOptions& options, const D& device, NcclHandle<D>& handle,
                                         Stream stream) {
    if (options.buffers == NcclBuffers::torch) return nullptr;
    return std::make_shared<Buffers>(options.buffers, device, handle, stream);
  }
  Buffers(NcclBuffers kind, const D& device, NcclHandle<D>& handle, Stream stream)
      : kind_(kind), device_(device), handle_(&handle), stream_(stream) {}
  ~Buffers() {
    give_back(std::chrono::seconds(10));
    // Leak memory that is still in use: a device that hangs may still access it.
    for (auto& block : dropped_) static_cast<void>(block.release());
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  /// Returns an uninitialized tensor [length] with the dtype and device of `like`, over a registered buffer.
  /// The memory is LibTorch's if NCCL could not send it, and during a graph capture. Throws the device's
  /// exceptions, and std::runtime_error if the registration fails: NCCL's results are undefined if one rank
  /// sends from unregistered memory while the others send from registered memory.
  [[nodiscard]] at::Tensor make(std::int64_t length, const at::Tensor& like) {
    if (length == 0 || !handle_ || handle_->gone() || !device_.holds(like) ||
        device_.capturing(device_.current_stream()))
      return at::empty({length}, like.options());
    sweep();
    const std::size_t bytes = static_cast<std::size_t>(length) * like.element_size();
    auto block = std::make_unique<Block>();
    block->stream = device_.current_stream();
    std::size_t registered = bytes;
    void* begin = nullptr;
    if (kind_ == NcclBuffers::nccl) {
      begin = block->memory = device_.allocate_buffer(bytes);
    } else {
      // NCCL registers whole pages. No other tensor may lie on them: it would be a different one on each
      // rank.
      registered = (bytes + page - 1) / page * page;
      block->torch =
          at::empty({static_cast<std::int64_t>(registered + page)}, like.options().dtype(at::kByte));
      const auto first = reinterpret_cast<std::uintptr_t>(block->torch.mutable_data_ptr());
      begin = reinterpret_cast<void*>((first + page - 1) / page * page);
    }
    const NcclResult result = handle_->call(
        [&](auto comm) { return device_.register_buffer(comm, begin, registered, block->registration); });
    if (result != NcclResult::success) {
      if (block->memory) device_.free_buffer(block->memory);
      throw std::runtime_error(detail::formatted("a buffer of {} bytes cannot be registered: {}", bytes,
                                                 nccl_error_text(result, handle_->last_error())));
    }
    block->registered = true;
    Block* const raw = block.get();
    {
      std::lock_guard lock(mutex_);
      live_.push_back(std::move(block));
    }
    return at::from_blob(
        begin, {length}, [self = this->shared_from_this(), raw](void*) { self->drop(raw); }, like.options(),
        like.device());
  }

  /// Frees the buffers that no tensor and no stream uses any more. Does not block.
  void sweep() noexcept {
    std::lock_guard lock(mutex_);
    if (!dropped_.empty()) give_back_ended();
  }

  /// Ends all registrations. Call it once no collective is in flight, before the communicator is destroyed.
  /// Frees the buffers without tensors once their streams are done; waits at most 1 s for that.
  void close() noexcept {
    {
      std::lock_guard lock(mutex_);
      if (!handle_) return;
      for (const auto* blocks : {&live_, &dropped_})
        for (const auto& block : *blocks) end_registration(*block);
    }
    give_back(std::chrono::seconds(1));
    std::lock_guard lock(mutex_);
    handle_ = nullptr;
    stream_.reset();
  }

 private:
  static constexpr std::size_t page = 1 << 16;  // the largest common page size

  struct Block {
    Stream stream{};         // for which the buffer was made
    void* memory = nullptr;  // allocated by NCCL
    at::Tensor torch;        // or by LibTorch
    void* registration = nullptr;
    bool registered = false;
    std::vector<Event> events;  // follow all uses of the memory, once no tensor is left
    bool marked = false;        // the events are recorded
  };

  // The last tensor over the block was destroyed.
  void drop(Block* raw) noexcept {
    std::lock_guard lock(mutex_);
    const auto found =
        std::find_if(live_.begin(), live_.end(), [&](const auto& block) { return block.get() == raw; });
    dropped_.push_back(std::move(*found));
    live_.erase(found);
    mark(*dropped_.back());
    if (!handle_) give_back_ended();
  }

  // Records the events on the block's stream, this thread's current stream and the communicator's stream.
  // Postponed during a graph capture, which would make them events of the graph.
  void mark(Block& block) noexcept {
    try {
      std::vector<Stream> streams{block.stream, device_.current_stream()};
      if (stream_) streams.push_back(*stream_);
      for (const Stream& stream : streams)
        if (device_.capturing(stream)) return;
      for (const Stream& stream : streams) {
        block.events.push_back(device_.make_event());
        device_.record(block.events.back(), stream);
      }
      block.marked = true;
    } catch (const std::exception&) {
      lost_ = true;
    }
  }
  [[nodiscard]] bool ended(Block& block) noexcept {
    if (!block.marked) mark(block);
    if (!block.marked) return false;
    try {
      return std::all_of(block.events.begin(), block.events.end(),
                         [&](Event event) { return device_.done(event); });
    } catch (const std::exception&) {
      lost_ = true;
      return false;
    }
  }

  void give_back_ended() noexcept {
    std::erase_if(dropped_, [&](const auto& block) {
      if (lost_ || !ended(*block)) return false;
      end_registration(*block);
      for (const Event event : block->events) device_.destroy_event(event);
      if (block->memory) device_.free_buffer(block->memory);
      return true;
    });
  }
  // give_back_ended() until nothing is left, the device has failed, or `timeout` has passed.
  void give_back(std::chrono::milliseconds timeout) noexcept {
    const auto end = std::chrono::steady_clock::now() + timeout;
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
      std::lock_guard lock(mutex_);
      give_back_ended();
      if (dropped_.empty() || lost_ || std::chrono::steady_clock::now() >= end) return;
    }
  }

  // No-op once the communicator is gone: its registrations ended with it.
  void end_registration(Block& block) noexcept {
    if (!std::exchange(block.registered, false) || !handle_) return;
    handle_->call([&](auto comm) { return device_.deregister_buffer(comm, block.registration); });
  }

  NcclBuffers kind_;
  D device_;
  NcclHandle<D>* handle_;         // null after close()
  std::optional<Stream> stream_;  // the communicator's, null after close()
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> live_, dropped_;
  bool lost_ = false;  // the device has failed; its memory cannot be freed
};

}  // namespace lockstep::detail
