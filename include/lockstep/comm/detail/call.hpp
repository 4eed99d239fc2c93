#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/detail/served_call.hpp"

namespace lockstep::detail {

/// A call of a collective, of send or of recv, as error messages name it.
struct Call {
  const char* name = "";
  std::uint64_t sequence = 0;  // of a collective, from 1; 0 for other calls
  std::optional<int> peer{};   // of send and recv: the peer's rank in the group
  int tag = 0;
  std::chrono::steady_clock::time_point start{};
  ServedCall served{};

  /// Returns "all_reduce #57 of Trainer::fit" or "recv from rank 2 (tag 5)".
  [[nodiscard]] std::string text() const {
    std::string text = name;
    if (peer)
      text = detail::formatted("{} {} rank {} (tag {})", name, name[0] == 's' ? "to" : "from", *peer, tag);
    else if (sequence > 0)
      text = detail::formatted("{} #{}", name, sequence);
    return served.name && !text.empty() ? text + " of " + served_text(served) : text;
  }
};

/// Formats a duration: "250 ms", "6 s".
inline std::string duration_text(std::chrono::steady_clock::duration time) {
  const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
  if (milliseconds < 1000) return detail::formatted("{} ms", milliseconds);
  return detail::formatted("{} s", milliseconds / 1000);
}

/// Joins names and appends the verb: "1 has", "1 and 3 have", "1, 2 and 3 have".
inline std::string joined(const std::vector<std::string>& items) {
  return listed(items) + (items.size() == 1 ? " has" : " have");
}

}  // namespace lockstep::detail
