#pragma once

#include <string_view>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {
LOCKSTEP_PROCESS_WIDE inline thread_local int rank_zero_scope_depth = 0;

}  // namespace lockstep::detail

namespace lockstep {

/// Makes collectives on this thread throw CommunicationError during its lifetime, since the other ranks are
/// not in the scope and would not join.
class RankZeroScope {
 public:
  RankZeroScope() { ++detail::rank_zero_scope_depth; }
  ~RankZeroScope() { --detail::rank_zero_scope_depth; }
  RankZeroScope(const RankZeroScope&) = delete;
  RankZeroScope& operator=(const RankZeroScope&) = delete;
};

/// Throws CommunicationError if `collective` is called inside a rank-zero scope. Each collective calls it
/// first.
inline void forbid_in_rank_zero_scope(std::string_view collective) {
  if (detail::rank_zero_scope_depth > 0)
    throw CommunicationError(detail::formatted(
        "{} called inside a rank-zero scope: the other ranks are not in it and would never answer. "
        "Call it outside, on every rank",
        collective));
}

}  // namespace lockstep
