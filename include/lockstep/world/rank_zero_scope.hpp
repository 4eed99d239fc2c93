#pragma once

#include <string_view>

#include <fmt/format.h>

#include "lockstep/detail/process_wide.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {
LOCKSTEP_PROCESS_WIDE inline thread_local int rank_zero_scope_depth = 0;

}  // namespace lockstep::detail

namespace lockstep {

/// While one lives, collectives on this thread throw: the other ranks are not there to answer.
class RankZeroScope {
 public:
  RankZeroScope() { ++detail::rank_zero_scope_depth; }
  ~RankZeroScope() { --detail::rank_zero_scope_depth; }
  RankZeroScope(const RankZeroScope&) = delete;
  RankZeroScope& operator=(const RankZeroScope&) = delete;
};

/// Throws CommunicationError if `collective` is called inside a rank-zero scope. Communicators call it first
/// thing.
inline void forbid_in_rank_zero_scope(std::string_view collective) {
  if (detail::rank_zero_scope_depth > 0)
    throw CommunicationError(fmt::format(
        "{} called inside a rank-zero scope: the other ranks are not in it and would never answer. "
        "Call it outside, on every rank",
        collective));
}

}  // namespace lockstep
