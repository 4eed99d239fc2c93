#pragma once

#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/printable.hpp"

namespace lockstep::detail {

/// Marks an error that every rank throws together, so that no rank needs to publish it.
struct ThrownByAll {};
template <class E>
struct Common : E, ThrownByAll {
  using E::E;
};

/// Joins the errors of all ranks into one text, equal on every rank; std::nullopt if there are none. `all`
/// holds each rank's text, empty if the rank has no error.
inline std::optional<std::string> joined_errors(const std::vector<std::string>& all,
                                                const RankNames& name_of) {
  bool equal = true;
  std::string text;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    equal = equal && all[rank] == all[0];
    if (!all[rank].empty())
      text +=
          (text.empty() ? "rank " : "; rank ") + std::to_string(name_of(rank)) + ": " + printable(all[rank]);
  }
  if (text.empty()) return std::nullopt;
  return equal ? all[0] : text;
}

/// Runs `check`, which inspects this rank alone. If it throws UsageError on any rank, every rank throws the
/// same UsageError, so that no rank waits for another. Collective.
template <Gathering C, class Check>
void check_on_every_rank(C& comm, Check&& check) {
  std::string mine;
  try {
    check();
  } catch (const UsageError& error) {
    mine = error.what();
  }
  if (const auto text = joined_errors(comm.all_gather_bytes(mine), RankNames(comm))) throw UsageError(*text);
}

}  // namespace lockstep::detail
