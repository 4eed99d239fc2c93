#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// Runs `part`, for which the other ranks may have to wait. If `part` throws an error of this rank alone,
/// calls `tell()` inside the handler and rethrows. `ranks` is the number of ranks that may wait. A
/// CollectiveError of fewer ranks, which a sub-group has thrown together, also calls `tell()`.
template <class Part, class Tell>
decltype(auto) telling_own_error(int ranks, Part&& part, Tell&& tell) {
  try {
    return std::forward<Part>(part)();
  } catch (const CommunicationError&) {
    throw;  // the other ranks know, or cannot be reached
  } catch (const ThrownByAll& error) {
    if (error.ranks < ranks) tell();
    throw;
  } catch (...) {
    tell();
    throw;
  }
}

/// Aborts `comm` with the exception that is being handled, so that the other ranks learn of it.
template <class C>
void abort_for_others(C& comm, const std::string& where = "") {
  if (comm.size() > 1) comm.abort(where + first_line(std::current_exception()));
}

/// Returns whether every one of `ranks` of the world calls this within two seconds because each of them throws: then no
/// rank waits for another. The ranks learn this from the store, since a rank that does not throw may be in any collective.
bool every_rank_throws(const World& world, const std::vector<int>& ranks) noexcept;
template <class C>
bool every_rank_throws(C& comm) noexcept {
  const RankNames name_of(comm);
  std::vector<int> ranks;
  for (int rank = 0; rank < comm.size(); ++rank) ranks.push_back(name_of(static_cast<std::size_t>(rank)));
  return every_rank_throws(comm.world(), ranks);
}

/// Runs `part`. If it throws on this rank but not on every rank, aborts `comm`: the other ranks may wait for
/// this rank in any collective.
template <class C, class Part>
decltype(auto) aborting(C& comm, Part&& part) {
  return telling_own_error(comm.size(), std::forward<Part>(part), [&] {
    if (comm.size() > 1 && !every_rank_throws(comm)) abort_for_others(comm);
  });
}

}  // namespace lockstep::detail
