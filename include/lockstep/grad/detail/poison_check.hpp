#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include "lockstep/detail/linkage.hpp"

namespace lockstep::detail {

/// Tensors of one device and dtype.
using TensorGroup = std::vector<at::Tensor>;

/// Whether the host reads the checks of bucket views on the CPU late, too, as those on a GPU. For tests: they
/// set it on every rank before they construct a model.
LOCKSTEP_PROCESS_WIDE inline bool checks_cpu_late = false;

/// A check for NaN that runs on a device, stream-ordered, while the host goes on: the result is copied to
/// pinned memory and followed by an event. On the CPU it runs in launch().
class LateNanCheck {
 public:
  /// Checks tensors of one element each, after all prior work on the current streams. Does not block the host
  /// for a device. The tensors may change once later work on those streams runs.
  void launch(const std::vector<TensorGroup>& groups);
  /// Blocks the host until the launched check is complete. Returns whether an element was NaN.
  [[nodiscard]] bool read();

 private:
  struct Result {
    at::Tensor found;                  // pinned
    std::optional<c10::Event> copied;  // none on the CPU
  };
  std::vector<Result> results_;
};

/// The first elements of the bucket views, which tell whether a view is poisoned with NaN.
class PoisonCheck {
 public:
  /// Adds a bucket view, whose memory must not move.
  void add(const at::Tensor& view);

  /// Returns whether a bucket view that the host reads now may be poisoned; a gradient may also be NaN by
  /// itself. Allocates nothing.
  [[nodiscard]] bool any_now() const;

  /// Returns the first elements that a LateNanCheck reads: those on devices.
  [[nodiscard]] const std::vector<TensorGroup>& read_late() const { return late_; }

 private:
  static bool is_nan(const at::Tensor& first);

  TensorGroup now_;
  std::vector<TensorGroup> late_;
};

}  // namespace lockstep::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/grad/detail/poison_check-inl.hpp"
#endif
