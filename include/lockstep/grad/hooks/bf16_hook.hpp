#pragma once

#include <cstdint>
#include <string_view>

#include "lockstep/grad/hooks/cast_hook.hpp"

namespace lockstep {

/// Gradients travel as bfloat16, with the arithmetic of Python's bf16_compress_hook: cast, divided by the
/// number of ranks, summed, cast back. Half the bytes of float32 and all of its range, with 8 bits of
/// precision. Each addition of the sum rounds to these 8 bits: at many ranks, take Bf16Fp32Hook.
class Bf16Hook {
 public:
  static constexpr bool divides_first = false;
  static constexpr bool spreads_nan = true;
  /// A graph can hold it; see CapturedStep.
  static constexpr bool capturable = true;

  template <Reducing Comm>
  auto start(Comm& comm, const GradientBucket& bucket) {
    return detail::start_cast(comm, bucket, at::kBFloat16, scratch_, wire_bytes_);
  }

  [[nodiscard]] std::string_view name() const { return "bf16"; }
  /// 2 n for each bucket of n elements.
  [[nodiscard]] std::uint64_t wire_bytes() const { return wire_bytes_; }

 private:
  detail::Scratch scratch_;
  std::uint64_t wire_bytes_ = 0;
};

}  // namespace lockstep
