#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <concepts>

namespace lockstep::detail {

/// What bringing batches to a device beside the computation asks of it. A side stream does the copies; the
/// current stream is the one on which the caller computes. Calls come from one thread.
///
/// 1. `pinned(tensor)` is the tensor in memory from which the device copies by itself: the same, or a copy.
/// 2. `copy(tensor)` begins the copy of a pinned tensor on the side stream, and returns the tensor on the
///    device. The pinned one must live until that copy is done.
/// 3. `record()` is an Event behind all that the side stream was given so far.
/// 4. `join(event)` lets what the current stream is given from now on begin after the event. It does not
///    block the host.
/// 5. `hand_over(tensor)` says that the current stream uses a tensor of the side stream's: once it is
///    destroyed, its memory is not given to another before what that stream has been given is done.
/// 6. `done(event)` tells without blocking whether it is reached, `wait(event)` blocks the host until it is.
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

/// A stream of a device's own for copies to it, from LibTorch's pool; by LibTorch's interface for all devices
/// with streams, so that nothing of CUDA is needed to compile it.
class SideStream {
 public:
  using Event = c10::Event;

  /// Throws c10::Error for a device that this LibTorch has no support for.
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
