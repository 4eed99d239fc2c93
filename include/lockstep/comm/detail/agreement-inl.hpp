#pragma once

#include <c10/util/Exception.h>

#include <cstddef>
#include <map>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/detail/bytes.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/world/detail/printable.hpp"

namespace lockstep::detail {

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

LOCKSTEP_INLINE std::string failure_text(const std::string& outcome) {
  return outcome.size() > 1 ? printable(outcome.substr(1)) : std::string("an exception without a text");
}

LOCKSTEP_INLINE std::string failures_text(const std::vector<std::string>& outcomes,
                                          const RankNames& name_of) {
  bool equal = true;
  std::string text;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    equal = equal && outcomes[rank] == outcomes[0];
    if (outcomes[rank].at(0) == '-')
      text += detail::formatted("{}rank {}: {}", text.empty() ? "" : "; ", name_of(rank),
                                failure_text(outcomes[rank]));
  }
  return !text.empty() && equal ? failure_text(outcomes[0]) : text;
}

LOCKSTEP_INLINE std::string serialize(const NamedValues& values) {
  std::string bytes;
  for (const auto& [name, value] : values)
    for (const std::string* field : {&name, &value}) bytes.append(field->c_str(), field->size() + 1);
  return bytes;
}

LOCKSTEP_INLINE std::string digest(std::string_view bytes) {
  return detail::formatted("{:016x}{:x}", fnv1a(bytes), bytes.size());
}

LOCKSTEP_INLINE std::string first_difference(const std::vector<std::string>& serialized,
                                             const RankNames& name_of) {
  const auto next = [](std::string_view& rest) {
    const std::string_view field = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(field.size() + 1);
    return field;
  };
  std::vector<std::map<std::string_view, std::string_view>> values(serialized.size());  // of each rank
  std::vector<std::string_view> names;  // of all ranks, those of rank 0 first
  for (std::size_t rank = 0; rank < serialized.size(); ++rank)
    for (std::string_view rest = serialized[rank]; !rest.empty();) {
      const std::string_view name = next(rest), value = next(rest);
      values[rank].emplace(name, value.empty() ? "empty" : value);
      const bool known = std::any_of(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(rank),
                                     [&](const auto& other) { return other.contains(name); });
      if (!known) names.push_back(name);
    }
  for (const std::string_view name : names) {
    std::vector<std::pair<std::string_view, std::vector<int>>> groups;  // ranks by value
    for (std::size_t rank = 0; rank < values.size(); ++rank) {
      const auto entry = values[rank].find(name);
      const std::string_view value = entry == values[rank].end() ? "absent" : entry->second;
      auto group = std::find_if(groups.begin(), groups.end(), [&](auto& g) { return g.first == value; });
      if (group == groups.end()) group = groups.insert(group, {value, {}});
      group->second.push_back(name_of(rank));
    }
    if (groups.size() == 1) continue;
    std::string text(name);
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const auto& [value, ranks] = groups[i];
      text += detail::formatted("{}{} on rank{} {}",
                                i == 0                  ? " is "
                                : i + 1 < groups.size() ? ", "
                                                        : " and ",
                                value, ranks.size() > 1 ? "s" : "", joined(ranks, ", ", ", ", 8));
    }
    return text;
  }
  return {};
}

}  // namespace lockstep::detail
