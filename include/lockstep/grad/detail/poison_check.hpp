#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/stack.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace lockstep::detail {

/// Detects NaN-poisoned bucket views by their first elements. Allocates nothing on CPUs. On a device it
/// stacks the first elements of each dtype in one operation and synchronizes.
class PoisonCheck {
 public:
  /// Adds a bucket view, whose memory must not move.
  void add(const at::Tensor& view) {
    if (view.numel() == 0) return;
    // Created by `set_`, as bucket views are: it must not be a view to autograd.
    const at::Tensor first =
        at::empty({0}, view.options()).set_(view.storage(), view.storage_offset(), at::IntArrayRef{});
    if (view.is_cpu()) return here_.push_back(first);
    const auto alike = std::find_if(elsewhere_.begin(), elsewhere_.end(), [&](const auto& group) {
      return group[0].scalar_type() == first.scalar_type() && group[0].device() == first.device();
    });
    (alike == elsewhere_.end() ? elsewhere_.emplace_back() : *alike).push_back(first);
  }

  /// Returns whether any bucket view may be poisoned; a gradient may also be NaN by itself.
  [[nodiscard]] bool any() const {
    return std::any_of(here_.begin(), here_.end(), is_nan) ||
           std::any_of(elsewhere_.begin(), elsewhere_.end(), [](const auto& group) {
             return at::stack(group).isnan().any().template item<bool>();
           });
  }

 private:
  static bool is_nan(const at::Tensor& first) {
    switch (first.scalar_type()) {
      case at::kFloat:
        return std::isnan(*first.const_data_ptr<float>());
      case at::kDouble:
        return std::isnan(*first.const_data_ptr<double>());
      case at::kBFloat16:
        return std::isnan(static_cast<float>(*first.const_data_ptr<at::BFloat16>()));
      case at::kHalf:
        return std::isnan(static_cast<float>(*first.const_data_ptr<at::Half>()));
      case at::kComplexFloat:
        return std::isnan(first.const_data_ptr<c10::complex<float>>()->real());
      case at::kComplexDouble:
        return std::isnan(first.const_data_ptr<c10::complex<double>>()->real());
      default:
        return first.isnan().item<bool>();
    }
  }

  std::vector<at::Tensor> here_;                    // in host memory
  std::vector<std::vector<at::Tensor>> elsewhere_;  // by dtype and device
};

}  // namespace lockstep::detail
