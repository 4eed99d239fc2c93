#pragma once

#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/printable.hpp"

namespace lockstep::detail {

/// Marks an error that every rank throws at once: nobody has to be told of it.
struct ThrownByAll {};
template <class E>
struct Common : E, ThrownByAll {
  using E::E;
};

/// What is wrong on the ranks that have something to say, in words, the same whoever asks; nothing where none
/// has. `all` holds each rank's text, empty where nothing is wrong there.
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

/// Runs `check`, which looks at this rank alone. Where it throws UsageError on some rank, every rank throws
/// one and the same, so that none goes on to wait for the others. Collective.
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
