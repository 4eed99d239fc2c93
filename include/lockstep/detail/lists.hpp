#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

namespace lockstep::inline v0_1::detail {

/// Returns `items`, numbers or texts, with `separator` between them and `last` before the last one. Above
/// `most` items, the text ends with "and N more". `count`, if greater than their number, is the number of all
/// items, of which `items` holds the first.
template <class Items>
std::string joined(const Items& items, std::string_view separator, std::string_view last,
                   std::size_t most = std::numeric_limits<std::size_t>::max(), std::size_t count = 0) {
  count = std::max<std::size_t>(count, items.size());
  const std::size_t shown = std::min<std::size_t>(items.size(), most);
  std::string text;
  for (std::size_t i = 0; i < shown; ++i) {
    text += i == 0 ? std::string_view() : i + 1 == count ? last : separator;
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(items[i])>>)
      text += std::to_string(items[i]);
    else
      text += items[i];
  }
  if (shown < count) text += " and " + std::to_string(count - shown) + " more";
  return text;
}
template <class Items>
std::string joined(const Items& items, std::string_view separator) {
  return joined(items, separator, separator);
}

/// Returns "1", "1 and 3" or "1, 2 and 3".
template <class Items>
std::string listed(const Items& items) {
  return joined(items, ", ", " and ");
}

/// Returns "rank 2" or "ranks 1, 2 and 3".
template <class Ranks>
std::string listed_ranks(const Ranks& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + listed(ranks);
}

}  // namespace lockstep::inline v0_1::detail
