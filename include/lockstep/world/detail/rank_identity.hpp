#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/store_protocol.hpp"

namespace lockstep::detail {

/// What each rank says about itself when it joins a run.
struct RankIdentity {
  std::string process = {};        ///< "nodeA pid 811"
  std::string host = {};           ///< equal on all ranks of a host, see host_identity
  std::string address = {};        ///< at which other hosts reach the rank, or empty
  std::string threads = {};        ///< the number of its threads
  std::string thread_source = {};  ///< what determines that number
  /// The place on the host that a launcher has assigned, and the variable that holds it; or empty. Without
  /// `local_size`, `local_rank` is a place that the ranks which join must confirm.
  std::string local_rank = {}, local_size = {}, local_variable = {};

  [[nodiscard]] std::string host_text() const { return process.substr(0, process.find(' ')); }
};
template <>
inline constexpr auto fields_of<RankIdentity> =
    std::tuple{&RankIdentity::process,    &RankIdentity::host,          &RankIdentity::address,
               &RankIdentity::threads,    &RankIdentity::thread_source, &RankIdentity::local_rank,
               &RankIdentity::local_size, &RankIdentity::local_variable};

/// What the store knows of a rank.
struct KnownRank {
  std::optional<RankIdentity> identity{};  // once it has joined
  bool lost = false;                       // its connection has closed before it made a communicator
  std::optional<int> exit_code{};          // once it has ended; -1 if it is unknown

  [[nodiscard]] bool is(const RankIdentity& other) const {
    return identity && identity->process == other.process && identity->host == other.host;
  }
};
template <>
inline constexpr auto fields_of<KnownRank> =
    std::tuple{&KnownRank::identity, &KnownRank::lost, &KnownRank::exit_code};

/// What the store says to a process that joins: whose the rank is, and who has said first how many ranks there are.
struct JoinAnswer {
  KnownRank rank{};
  int size = 0, sized_by = -1;
};
template <>
inline constexpr auto fields_of<JoinAnswer> =
    std::tuple{&JoinAnswer::rank, &JoinAnswer::size, &JoinAnswer::sized_by};

/// What the store knows of a run.
struct RunSummary {
  std::optional<Failure> failure{};    // the first
  std::size_t ended = 0, missing = 0;  // how many ranks have ended, and have not joined
  std::vector<int> first_missing{};
  std::string stranger = {};  // why the last process that could not connect was refused

  /// Returns "rank 2 of 3", "ranks 1 and 2 of 3", or "ranks 1, 2, 3, 4 and 60 more of 65".
  [[nodiscard]] std::string missing_text(int size) const {
    if (missing == 0) return "the last rank";
    const std::size_t shown = missing > first_missing.size() ? 4 : first_missing.size();
    return formatted("{} {} of {}", missing == 1 ? "rank" : "ranks",
                     joined(first_missing, ", ", " and ", shown, missing), size);
  }
};
template <>
inline constexpr auto fields_of<RunSummary> =
    std::tuple{&RunSummary::failure, &RunSummary::stranger, &RunSummary::ended, &RunSummary::missing,
               &RunSummary::first_missing};

/// Returns the error about a LOCAL_RANK without LOCAL_WORLD_SIZE that is not the rank's number among those of
/// its host, empty if there is none.
inline std::string unconfirmed_local_rank(const std::vector<RankIdentity>& ranks) {
  std::map<std::string, int> ranks_on;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const RankIdentity& identity = ranks[rank];
    const int number = ranks_on[identity.host]++;
    if (!identity.local_rank.empty() && identity.local_size.empty() &&
        identity.local_rank != std::to_string(number))
      return formatted(
          "LOCAL_RANK={} of rank {} contradicts the other ranks on {}, among which it is number {}: set "
          "LOCAL_WORLD_SIZE too if that is meant, or unset LOCAL_RANK",
          identity.local_rank, rank, identity.host_text(), number);
  }
  return {};
}

/// Returns the error about two ranks of a host that have one local rank; empty if there are none. The ranks of a host may
/// be several complete sets: launchers can imitate several hosts on one.
inline std::string repeated_local_rank(const std::vector<RankIdentity>& ranks) {
  // By host with its number of ranks, and local rank.
  std::map<std::string, std::map<std::string, std::vector<std::size_t>>> hosts;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    if (const RankIdentity& one = ranks[rank]; !one.local_size.empty())
      hosts[one.host + " " + one.local_size][one.local_rank].push_back(rank);
  for (const auto& [host, places] : hosts) {
    const std::size_t sets = places.rbegin()->second.size(), size = places.size();
    for (const auto& [local_rank, holders] : places) {
      const RankIdentity& one = ranks[holders[0]];
      if (holders.size() == 1 || (holders.size() == sets && one.local_size == std::to_string(size))) continue;
      return formatted(
          "ranks {} and {} on {} both have {}={} of {}: pass the launcher's whole environment on to each "
          "process, or give each "
          "rank of a host its own",
          holders[0], holders[1], one.host_text(),
          one.local_variable.empty() ? std::string("local rank") : one.local_variable, local_rank,
          one.local_size);
    }
  }
  return {};
}

}  // namespace lockstep::detail
