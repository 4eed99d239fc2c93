#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <ATen/core/Tensor.h>

#include "lockstep/detail/served_call.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"

namespace lockstep::detail {

/// Warns once, on rank 0, of an optimizer that steps inside `no_sync` in a loop by hand, by which the ranks'
/// parameters become different without an error.
class LocalStepCheck {
 public:
  /// Call it at the start of a guard of `no_sync`.
  template <class Comm>
  void begin(const Comm& comm, std::span<const ParameterEntry> parameters) {
    watches_ = comm.size() > 1 && comm.rank() == 0 && !served_call.name && !warned_;
    if (watches_) before_ = fingerprint(parameters);
  }
  template <class Comm>
  void end(const Comm& comm, std::span<const ParameterEntry> parameters) noexcept try {
    if (!watches_ || fingerprint(parameters) == before_) return;
    warned_ = true;
    comm.world().log.all().warning(
        "parameters changed inside no_sync, where each rank has the gradients of its own samples: unless the "
        "ranks average them, call optimizer.step() after the first backward outside of no_sync");
  } catch (...) {  // the destructor of a guard must not throw
  }

 private:
  /// Returns a hash of the first element of each parameter on the CPU. A device is not read: that would block the
  /// host.
  static std::uint64_t fingerprint(std::span<const ParameterEntry> parameters) {
    std::uint64_t hash = 0;
    for (const ParameterEntry& parameter : parameters) {
      const std::size_t bytes = parameter.tensor.nbytes();
      if (!parameter.tensor.is_cpu() || bytes == 0) continue;
      std::uint32_t first = 0;
      std::memcpy(&first, parameter.tensor.const_data_ptr(), std::min(sizeof first, bytes));
      hash = hash * 31 + first;
    }
    return hash;
  }

  bool watches_ = false, warned_ = false;
  std::uint64_t before_ = 0;
};

}  // namespace lockstep::detail
