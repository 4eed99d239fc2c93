#pragma once

#include <c10/util/Exception.h>

#include <cstddef>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/world/detail/call_history.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/store_protocol.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/detail/world_state.hpp"

namespace lockstep::inline v0_1::detail {

LOCKSTEP_INLINE std::string first_line(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  const std::string text = known ? known->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}
LOCKSTEP_INLINE std::string first_line(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return first_line(e);
  } catch (...) {
    return "an exception of unknown type";
  }
}

LOCKSTEP_INLINE bool every_rank_throws(const World& world, const std::vector<int>& ranks) noexcept try {
  const std::string name = "throws " + std::to_string(hash_of(joined(ranks, " "), 0));
  const bool all = static_cast<int>(ranks.size()) == world.size();
  return RunClient(*state_of(world).connection(), throw_together)
      .meet(name, all ? std::vector<int>() : ranks, false)
      .met();
} catch (...) {  // a rank does not throw; or the store is gone, and the abort reports the failure
  return false;
}

LOCKSTEP_INLINE std::string failures_text(const std::vector<std::string>& outcomes,
                                          const RankNames& name_of) {
  bool equal = true;
  std::string text, all;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    equal = equal && outcomes[rank] == outcomes[0];
    if (outcomes[rank].at(0) != '-') continue;
    text = outcomes[rank].size() > 1 ? printable(outcomes[rank].substr(1)) : "an exception without a text";
    all += formatted("{}rank {}: {}", all.empty() ? "" : "; ", name_of(rank), text);
  }
  return equal ? text : all;
}

template <>
inline constexpr auto fields_of<NamedValues::value_type> =
    std::tuple{&NamedValues::value_type::first, &NamedValues::value_type::second};

LOCKSTEP_INLINE std::string encoded_values(const NamedValues& values) {
  return encoded(values);
}

LOCKSTEP_INLINE std::string first_difference(const std::vector<std::string>& all, const RankNames& name_of) {
  std::map<std::string, std::vector<std::string>> values;  // by name and rank
  std::vector<std::string> names;                          // those of rank 0 first
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    for (auto& [name, value] : decoded<NamedValues>(all[rank])) {
      const auto [entry, is_new] = values.try_emplace(name, all.size(), "absent");
      entry->second[rank] = value.empty() ? "empty" : std::move(value);
      if (is_new) names.push_back(name);
    }
  for (const std::string& name : names) {
    std::vector<std::pair<std::string, std::vector<int>>> groups;  // ranks by value
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      const std::string& value = values[name][rank];
      auto group = std::find_if(groups.begin(), groups.end(), [&](auto& g) { return g.first == value; });
      if (group == groups.end()) group = groups.insert(group, {value, {}});
      group->second.push_back(name_of(rank));
    }
    if (groups.size() == 1) continue;
    std::vector<std::string> places;
    for (const auto& [value, ranks] : groups)
      places.push_back(
          formatted("{} on rank{} {}", value, ranks.size() > 1 ? "s" : "", joined(ranks, ", ", ", ", 8)));
    return name + " is " + listed(places);
  }
  return {};
}

}  // namespace lockstep::inline v0_1::detail
