#pragma once

#include <concepts>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

namespace lockstep::detail {

/// Tensors of one device and dtype.
using TensorGroup = std::vector<at::Tensor>;

/// A check for NaN that runs on a device, stream-ordered, while the host goes on.
///
/// 1. `on_device(tensor)` returns whether the check reads the tensor. The host reads the other tensors.
/// 2. `launch(groups)` checks tensors of one element each, after all prior work on the current streams. Does not
///    block the host. The tensors may change once later work on those streams runs.
/// 3. `read()` blocks the host until the launched check is complete, and returns whether an element was NaN.
template <class C>
concept NanCheck = std::movable<C> && std::default_initializable<C> &&
    requires(C& check, const at::Tensor& tensor, const std::vector<TensorGroup>& groups) {
  { C::on_device(tensor) } -> std::same_as<bool>;
  check.launch(groups);
  { check.read() } -> std::same_as<bool>;
};

/// The NanCheck of LibTorch's devices: the result is copied to pinned memory and followed by an event. Uses
/// LibTorch's device-generic interface, so it compiles without CUDA headers.
class DeviceNanCheck {
 public:
  [[nodiscard]] static bool on_device(const at::Tensor& tensor) { return !tensor.is_cpu(); }
  void launch(const std::vector<TensorGroup>& groups);
  [[nodiscard]] bool read();

 private:
  struct Result {
    at::Tensor pinned;
    c10::Event copied;
  };
  std::vector<Result> results_;
};

static_assert(NanCheck<DeviceNanCheck>);

template <class Comm>
struct NanCheckOf {
  using type = DeviceNanCheck;
};
/// A communicator over a simulated device brings its own check.
template <class Comm>
requires NanCheck<typename Comm::NanCheck>
struct NanCheckOf<Comm> {
  using type = typename Comm::NanCheck;
};

/// The first elements of the bucket views, which tell whether a view is poisoned with NaN.
class PoisonCheck {
 public:
  /// Adds a bucket view, whose memory must not move. `on_device`: see NanCheck.
  void add(const at::Tensor& view, bool on_device);

  /// Returns whether a bucket view that the host reads may be poisoned; a gradient may also be NaN by itself.
  /// Allocates nothing.
  [[nodiscard]] bool any_on_host() const;

  /// Returns the first elements that a NanCheck reads.
  [[nodiscard]] const std::vector<TensorGroup>& on_device() const { return on_device_; }

 private:
  static bool is_nan(const at::Tensor& first);

  TensorGroup on_host_;
  std::vector<TensorGroup> on_device_;
};

}  // namespace lockstep::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/grad/detail/poison_check-inl.hpp"
#endif
