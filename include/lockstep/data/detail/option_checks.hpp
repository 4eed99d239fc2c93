#pragma once

#include <cstdint>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

/// Checks of options that several public structs have. Each throws UsageError.
namespace lockstep::inline v0_1::detail {

inline void check_batch_size(std::int64_t batch_size) {
  if (batch_size < 1)
    throw UsageError(formatted("batch_size is {}: give 1 or more samples per rank", batch_size));
}
inline void check_workers(std::int64_t num_workers) {
  if (num_workers < 0 || num_workers > 1024)
    throw UsageError(
        formatted("num_workers is {}: give a number of threads per rank, 0 to 1024", num_workers));
}
inline void check_tail(bool drop_last, bool pad) {
  if (drop_last && !pad)
    throw UsageError(
        "drop_last is true and pad is false: of the samples that do not fill all ranks, drop the last "
        "(drop_last = true), or give each to one rank (pad = false)");
}

}  // namespace lockstep::inline v0_1::detail
