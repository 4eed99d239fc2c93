#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <array>
#include <charconv>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/hooks/hook.hpp"

namespace lockstep::detail {

/// A double-buffered tensor that also keeps its value from before the last reduction. A new value is written
/// into `next`, becomes current with `turn`, and is undone by `turn_back`.
class TwoTensors {
 public:
  [[nodiscard]] const at::Tensor& now() const { return tensors_[now_]; }
  /// Returns memory of these sizes for the next value. Its contents are unspecified.
  at::Tensor& next(at::IntArrayRef sizes, const at::TensorOptions& options) {
    at::Tensor& tensor = tensors_[1 - now_];
    if (!tensor.defined() || tensor.sizes() != sizes || tensor.dtype() != options.dtype() ||
        tensor.device() != options.device())
      tensor = at::empty(sizes, options);
    return tensor;
  }
  void turn() {
    now_ = 1 - now_;
    turned_ = true;
  }
  /// Makes the current value final: `turn_back` no longer undoes it.
  void settle() { turned_ = false; }
  /// Restores the previous value. A no-op unless `turn` was called since the last `settle`.
  void turn_back() {
    if (!turned_) return;
    now_ = 1 - now_;
    turned_ = false;
  }
  void load(at::Tensor tensor) {
    tensors_ = {std::move(tensor), at::Tensor()};
    now_ = 0;
    turned_ = false;
  }
  /// Returns the current value, cast to the dtype and device of `options`; undefined if there is none. Throws
  /// CheckpointError if its sizes differ. `what` and `parameter` name it in the error.
  at::Tensor& checked(std::string_view what, std::size_t parameter, at::IntArrayRef sizes,
                      const at::TensorOptions& options) {
    at::Tensor& tensor = tensors_[now_];
    if (!tensor.defined()) return tensor;
    if (tensor.sizes() != sizes)
      throw CheckpointError(detail::formatted(
          "the saved state of the PowerSGD hook is of another model or rank: its {} for parameter {} has {} "
          "elements, and {} are needed; load what was saved with the same model and options",
          what, parameter, tensor.numel(), c10::multiply_integers(sizes)));
    if (tensor.dtype() != options.dtype() || tensor.device() != options.device()) tensor = tensor.to(options);
    return tensor;
  }

 private:
  std::array<at::Tensor, 2> tensors_;
  std::size_t now_ = 0;
  bool turned_ = false;
};

/// PowerSGD's state of a compressed parameter, viewed as n x m.
struct LowRankMemory {
  TwoTensors error;  ///< [n, m]: this rank's compression error, added to its next gradient
  TwoTensors q;      ///< [m, r]: the right factor, equal on every rank
};

/// PowerSGD's state, indexed by parameter so that it outlives the buckets.
class PowerSgdMemory {
 public:
  LowRankMemory& of(std::size_t parameter) { return memory_[parameter]; }

  void settle() {
    for (auto& [parameter, memory] : memory_) {
      memory.error.settle();
      memory.q.settle();
    }
  }
  void turn_back() {
    for (auto& [parameter, memory] : memory_) {
      memory.error.turn_back();
      memory.q.turn_back();
    }
  }

  void save(HookState& state) const {
    for (const auto& [parameter, memory] : memory_) {
      if (memory.error.now().defined())
        state.emplace_back(detail::formatted("error.{}", parameter), memory.error.now().clone());
      if (memory.q.now().defined())
        state.emplace_back(detail::formatted("q.{}", parameter), memory.q.now().clone());
    }
  }
  /// Restores one entry of `save`. Throws CheckpointError for an unknown name.
  void load(std::string_view name, const at::Tensor& tensor) {
    const std::size_t dot = name.find('.');
    const std::string_view kind = name.substr(0, dot);
    std::size_t parameter = 0;
    const char* end = name.data() + name.size();
    const bool numbered = dot != std::string_view::npos && dot + 1 < name.size() &&
                          std::from_chars(name.data() + dot + 1, end, parameter).ptr == end;
    if (!numbered || (kind != "error" && kind != "q"))
      throw CheckpointError(detail::formatted(
          "the state of a PowerSGD hook has no entry '{}': it was saved by another hook", name));
    LowRankMemory& memory = memory_[parameter];
    (kind == "q" ? memory.q : memory.error).load(tensor.clone());
  }

 private:
  std::map<std::size_t, LowRankMemory> memory_;
};

}  // namespace lockstep::detail
