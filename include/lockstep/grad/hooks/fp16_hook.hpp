#pragma once

#include <cstdint>
#include <string_view>

#include "lockstep/grad/hooks/cast_hook.hpp"

namespace lockstep {

/// Gradients travel as float16, with the arithmetic of Python's fp16_compress_hook: cast, divided by the
/// number of ranks, summed, cast back. Half the bytes of float32. What is above 65504 becomes infinite, and
/// what is below 6e-8 zero: scale the loss, or take Bf16Hook.
class Fp16Hook {
 public:
  static constexpr bool divides_first = false;
  static constexpr bool spreads_nan = true;
  /// A graph can hold it; see CapturedStep.
  static constexpr bool capturable = true;

  template <Reducing Comm>
  auto start(Comm& comm, const GradientBucket& bucket) {
    return detail::start_cast(comm, bucket, at::kHalf, scratch_, wire_bytes_);
  }

  [[nodiscard]] std::string_view name() const { return "fp16"; }
  /// 2 n for each bucket of n elements.
  [[nodiscard]] std::uint64_t wire_bytes() const { return wire_bytes_; }

 private:
  detail::Scratch scratch_;
  std::uint64_t wire_bytes_ = 0;
};

}  // namespace lockstep
