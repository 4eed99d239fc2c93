#pragma once

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <array>
#include <cstddef>

namespace lockstep::detail {

/// Enables autocast to `dtype` on this thread in a scope, on the CPU and the GPU, if there is one. Cached
/// casts of parameters live until the outermost of nested scopes ends, or a scope of another dtype begins or
/// ends: LibTorch would reuse casts to the wrong dtype. Counterpart: torch.autocast.
class AutocastScope {
 public:
  explicit AutocastScope(at::ScalarType dtype) {
    for (std::size_t i = 0; i < before_.size(); ++i) {
      before_[i] = {at::autocast::is_autocast_enabled(devices[i]),
                    at::autocast::get_autocast_dtype(devices[i])};
      if (!reaches(devices[i])) continue;
      other_dtype_ = other_dtype_ || (before_[i].enabled && before_[i].dtype != dtype);
      at::autocast::set_autocast_enabled(devices[i], true);
      at::autocast::set_autocast_dtype(devices[i], dtype);
    }
    at::autocast::increment_nesting();
    if (other_dtype_) at::autocast::clear_cache();
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;
  ~AutocastScope() {
    if (at::autocast::decrement_nesting() == 0 || other_dtype_) at::autocast::clear_cache();
    for (std::size_t i = 0; i < before_.size(); ++i) {
      if (!reaches(devices[i])) continue;
      at::autocast::set_autocast_enabled(devices[i], before_[i].enabled);
      at::autocast::set_autocast_dtype(devices[i], before_[i].dtype);
    }
  }

 private:
  static constexpr std::array devices{at::kCPU, at::kCUDA};
  static bool reaches(at::DeviceType device) { return device == at::kCPU || at::hasCUDA(); }

  struct Before {
    bool enabled;
    at::ScalarType dtype;
  };
  std::array<Before, devices.size()> before_{};
  bool other_dtype_ = false;  // the enclosing scope has another dtype
};

}  // namespace lockstep::detail
