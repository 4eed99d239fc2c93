#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/store_keys.hpp"

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

/// Returns how often all ranks of `group` threw together, after adding `more`. The count is per process and
/// equal on every rank.
LOCKSTEP_PROCESS_WIDE inline int times_thrown(const std::string& group, int more = 0) {
  static auto& mutex = *new std::mutex();
  static auto& times = *new std::map<std::string, int>();
  const std::lock_guard lock(mutex);
  return times[group] += more;
}

/// Returns whether every rank of the group calls this within two seconds because each of them throws: then no
/// rank waits for another. The ranks exchange this through the store, since a rank that does not throw may be
/// in any collective.
template <class C>
bool every_rank_throws(C& comm) noexcept try {
  const RankNames name_of(comm);
  std::string group;
  for (int rank = 0; rank < comm.size(); ++rank)
    group += detail::formatted("{}{}", rank == 0 ? "" : ",", name_of(static_cast<std::size_t>(rank)));
  std::vector<std::string> keys;
  for (int rank = 0; rank < comm.size(); ++rank)
    keys.push_back(store_keys::thrown(group, times_thrown(group), rank));
  const std::string& own = keys[static_cast<std::size_t>(comm.rank())];
  // A separate connection: a store that does not answer must not delay the error report.
  const auto store = comm.world().connect_again(std::chrono::seconds(2));
  store->set(own, std::vector<std::uint8_t>{1});
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (!store->check(keys)) {
    if (std::chrono::steady_clock::now() > until) {
      store->deleteKey(own);
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  times_thrown(group, 1);
  return true;
} catch (...) {  // the store is gone; the abort reports the failure
  return false;
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
