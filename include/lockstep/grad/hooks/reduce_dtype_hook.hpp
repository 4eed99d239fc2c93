#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string_view>

#include "lockstep/grad/float_types.hpp"
#include "lockstep/grad/hooks/cast_hook.hpp"

namespace lockstep {

/// Gradients are added in a type of one's own, and the sum is divided there: reduce_dtype of Python's
/// _MixedPrecision, which goes with DdpOptions::param_dtype. A sum of float16 overflows where the mean would
/// not: Fp16Hook divides first.
class ReduceDtypeHook {
 public:
  static constexpr bool divides_first = false;
  static constexpr bool spreads_nan = true;
  /// A graph can hold it; see CapturedStep.
  static constexpr bool capturable = true;

  /// Throws UsageError for a type in which one cannot add.
  explicit ReduceDtypeHook(at::ScalarType type) : type_(type) {
    detail::require_float_type("the type of a ReduceDtypeHook", type);
  }

  template <Reducing Comm>
  auto start(Comm& comm, const GradientBucket& bucket) {
    return detail::start_cast(comm, bucket, type_, scratch_, wire_bytes_, detail::Division::after_sum);
  }

  [[nodiscard]] std::string_view name() const { return "reduce_dtype"; }
  [[nodiscard]] HookSettings settings() const { return {{"dtype", c10::toString(type_)}}; }
  /// The bytes of the type for each element of each bucket.
  [[nodiscard]] std::uint64_t wire_bytes() const { return wire_bytes_; }

 private:
  at::ScalarType type_;
  detail::Scratch scratch_;
  std::uint64_t wire_bytes_ = 0;
};

}  // namespace lockstep
