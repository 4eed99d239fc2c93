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

#include <fmt/format.h>

#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/comm/detail/nccl/error_text.hpp"
#include "lockstep/comm/detail/nccl/handle.hpp"
#include "lockstep/comm/nccl_options.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// The memory of a communicator's buffers, registered with NCCL: NCCL's own, or LibTorch's.
///
/// The group and the tensors share it. When the last tensor over a buffer goes, on whatever thread, events
/// are recorded on the streams that may still use its memory, and no more: NCCL is told by the thread that
/// issues the next collective, or at the group's end. So a registration ends before its memory is given back
/// and before the communicator is destroyed, and neither happens while something is in flight. What outlives
/// the communicator is no longer registered, but stays memory until its last tensor goes. An abort ends the
/// registrations with the communicator.
///
/// Thread safety: tensors may go on any thread; one thread at a time calls the functions.
template <NcclDevice D>
class Buffers : public std::enable_shared_from_this<Buffers<D>> {
 public:
  using Stream = typename D::Stream;
  using Event = typename D::Event;

  /// Those that the options want, if any; `stream` is the communicator's. open_together has checked that this
  /// NCCL has them.
  static std::shared_ptr<Buffers> wanted(const NcclOptions& options, const D& device, NcclHandle<D>& handle,
                                         Stream stream) {
    if (options.buffers == NcclBuffers::torch) return nullptr;
    return std::make_shared<Buffers>(options.buffers, device, handle, stream);
  }
  Buffers(NcclBuffers kind, const D& device, NcclHandle<D>& handle, Stream stream)
      : kind_(kind), device_(device), handle_(&handle), stream_(stream) {}
  ~Buffers() {
    give_back(std::chrono::seconds(10));
    // What has not ended by now is lost: nobody knows what a device that hangs still does with it.
    for (auto& block : dropped_) static_cast<void>(block.release());
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  /// A tensor [length], uninitialised, with the dtype and device of `like`, over memory of its own; over
  /// LibTorch's where NCCL could not send it, and while a graph is captured. Throws what the device throws,
  /// and std::runtime_error where NCCL does not register it: nothing is defined where a rank sends from other
  /// memory than the others, so it cannot go on without.
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
      // NCCL registers whole pages, on which no other tensor may lie: each rank would have another there.
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
      throw std::runtime_error(fmt::format("a buffer of {} bytes cannot be registered: {}", bytes,
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

  /// Gives back what no tensor and no stream uses any more. Does not block.
  void sweep() noexcept {
    std::lock_guard lock(mutex_);
    if (!dropped_.empty()) give_back_ended();
  }

  /// Ends all registrations: when no collective is in flight any more, and before the communicator is
  /// destroyed. What no tensor uses is given back, as soon as no stream does, but for a second at most.
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
  static constexpr std::size_t page = 1 << 16;  // the largest that is usual

  struct Block {
    Stream stream{};         // for which it was made
    void* memory = nullptr;  // NCCL's own
    at::Tensor torch;        // or LibTorch's
    void* registration = nullptr;
    bool registered = false;
    std::vector<Event> events;  // behind all that may use it, once no tensor does
    bool marked = false;        // by them
  };

  // No tensor uses it any more.
  void drop(Block* raw) noexcept {
    std::lock_guard lock(mutex_);
    const auto found =
        std::find_if(live_.begin(), live_.end(), [&](const auto& block) { return block.get() == raw; });
    dropped_.push_back(std::move(*found));
    live_.erase(found);
    mark(*dropped_.back());
    if (!handle_) give_back_ended();
  }

  // Records the events: on the stream it was made for, on this thread's and on the communicator's. Where a
  // graph is being captured, that is left for later, for they would become events of the graph.
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
  // The same until nothing is left, or the device has failed, or so much time has passed.
  void give_back(std::chrono::milliseconds timeout) noexcept {
    const auto end = std::chrono::steady_clock::now() + timeout;
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
      std::lock_guard lock(mutex_);
      give_back_ended();
      if (dropped_.empty() || lost_ || std::chrono::steady_clock::now() >= end) return;
    }
  }

  // Nothing where the communicator is gone: its registrations went with it.
  void end_registration(Block& block) noexcept {
    if (!std::exchange(block.registered, false) || !handle_) return;
    handle_->call([&](auto comm) { return device_.deregister_buffer(comm, block.registration); });
  }

  NcclBuffers kind_;
  D device_;
  NcclHandle<D>* handle_;         // null once closed
  std::optional<Stream> stream_;  // of the communicator, while it is open
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> live_, dropped_;
  bool lost_ = false;  // the device has failed, and its memory with it
};

}  // namespace lockstep::detail
