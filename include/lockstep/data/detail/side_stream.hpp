#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <concepts>

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
