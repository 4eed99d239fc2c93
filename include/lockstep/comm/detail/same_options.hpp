#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

/// Options by name, with their values as text. Neither contains a zero byte.
using NamedOptions = std::vector<std::pair<std::string, std::string>>;

/// Describes the first option whose value differs between two ranks, equally on every rank; std::nullopt if
/// all are equal. `all` holds each rank's options: name, zero byte, value, zero byte, and so on.
inline std::optional<std::string> option_difference(const std::vector<std::string>& all,
                                                    const RankNames& name_of) {
  const auto field = [](std::string_view& rest) {
    const std::string_view next = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(next.size() + 1);
    return next;
  };
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    std::string_view zero = all[0], other = all[rank];
    while (!zero.empty() && !other.empty()) {
      const std::string_view name = field(zero), value = field(zero);
      field(other);
      if (const std::string_view differs = field(other); differs != value)
        return detail::formatted("{} is {} on rank {} and {} on rank {}", name, value, name_of(0), differs,
                                 name_of(rank));
    }
  }
  return std::nullopt;
}

/// Compares options that must be equal on every rank. All ranks pass the same names in the same order.
/// Collective.
template <Gathering C>
std::optional<std::string> option_difference(const NamedOptions& mine, C& comm) {
  std::string bytes;
  for (const auto& [name, value] : mine) {
    bytes.append(name.c_str(), name.size() + 1);
    bytes.append(value.c_str(), value.size() + 1);
  }
  return option_difference(comm.all_gather_bytes(bytes), RankNames(comm));
}

}  // namespace lockstep::detail
