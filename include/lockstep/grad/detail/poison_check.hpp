#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "lockstep/detail/const_data.hpp"
#include "lockstep/detail/linkage.hpp"

namespace lockstep::inline v0_1::detail {

/// Tensors of one device and dtype.
using TensorGroup = std::vector<at::Tensor>;

/// Whether the host reads the checks of bucket views on the CPU late, too, and defers copies, as on a GPU. For
/// tests: they set it on every rank before they construct a model.
LOCKSTEP_PROCESS_WIDE inline bool checks_cpu_late = false;

/// A check for NaN that runs on a device, stream-ordered, while the host goes on: the result is copied to
/// pinned memory and followed by an event. On the CPU it runs in launch().
class LateNanCheck {
 public:
  /// Checks tensors of one element each, after all prior work on the current streams. Does not block the host
  /// for a device. The tensors may change once later work on those streams runs.
  void launch(const std::vector<TensorGroup>& groups) {
    results_.clear();
    for (const TensorGroup& group : groups) {
      const at::Device device = group.at(0).device();
      const at::Tensor found = at::stack(group).isnan().any();
      if (device.is_cpu()) {
        results_.push_back({found, std::nullopt});
        continue;
      }
      Result result{at::empty({}, at::TensorOptions(at::kBool)).pin_memory(), c10::Event(device.type())};
      result.found.copy_(found, /*non_blocking=*/true);
      result.copied->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
      results_.push_back(std::move(result));
    }
  }
  /// Blocks the host until the launched check is complete. Returns whether an element was NaN.
  [[nodiscard]] bool read() {
    for (const Result& result : results_)
      if (result.copied) result.copied->synchronize();
    return std::any_of(results_.begin(), results_.end(),
                       [](const Result& result) { return *const_data<bool>(result.found); });
  }

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
  void add(const at::Tensor& view) {
    if (view.numel() == 0) return;
    // Created by `set_`, as bucket views are: it must not be a view to autograd.
    const at::Tensor first =
        at::empty({0}, view.options()).set_(view.storage(), view.storage_offset(), at::IntArrayRef{});
    if (view.is_cpu() && !checks_cpu_late) return now_.push_back(first);
    const auto alike = std::find_if(late_.begin(), late_.end(), [&](const TensorGroup& group) {
      return group[0].scalar_type() == first.scalar_type() && group[0].device() == first.device();
    });
    (alike == late_.end() ? late_.emplace_back() : *alike).push_back(first);
  }

  /// Returns whether a bucket view that the host reads now may be poisoned; a gradient may also be NaN by
  /// itself. Allocates nothing for real dtypes.
  [[nodiscard]] bool any_now() const { return std::any_of(now_.begin(), now_.end(), is_nan); }

  /// Returns the first elements that a LateNanCheck reads: those on devices.
  [[nodiscard]] const std::vector<TensorGroup>& read_late() const { return late_; }

 private:
  static bool is_nan(const at::Tensor& first) {
    switch (first.scalar_type()) {
      case at::kFloat:
        return std::isnan(*const_data<float>(first));
      case at::kDouble:
        return std::isnan(*const_data<double>(first));
      case at::kBFloat16:
        return std::isnan(static_cast<float>(*const_data<at::BFloat16>(first)));
      case at::kHalf:
        return std::isnan(static_cast<float>(*const_data<at::Half>(first)));
      default:
        return first.isnan().item<bool>();
    }
  }

  TensorGroup now_;
  std::vector<TensorGroup> late_;
};

}  // namespace lockstep::inline v0_1::detail
