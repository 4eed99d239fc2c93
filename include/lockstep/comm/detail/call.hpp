#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/comm/detail/failure_monitor.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

/// A call of a collective, of send or of recv, as error messages name it.
struct Call {
  const char* name = "";
  std::uint64_t sequence = 0;  // of a collective, from 1; 0 for other calls
  int peer = -1;               // of send and recv: the peer's rank in the group
  int tag = 0;
  std::chrono::steady_clock::time_point start{};

  /// Returns "all_reduce #57" or "recv from rank 2 (tag 5)".
  [[nodiscard]] std::string text() const {
    if (peer < 0) return sequence == 0 ? std::string(name) : detail::formatted("{} #{}", name, sequence);
    return detail::formatted("{} {} rank {} (tag {})", name, name[0] == 's' ? "to" : "from", peer, tag);
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
  std::string text;
  for (std::size_t i = 0; i < items.size(); ++i)
    text += (i == 0 ? "" : i + 1 == items.size() ? " and " : ", ") + items[i];
  return text + (items.size() == 1 ? " has" : " have");
}

/// Returns the text of the timeout error of `call`, which names the late and the silent ranks. `positions`
/// holds the last collective of each rank that answered, by global rank. `waited` is the time already waited.
inline std::string lateness(const Call& call, const std::map<int, Position>& positions,
                            const std::vector<int>& ranks, int own_rank, const std::string& waited) {
  const auto last = [](const Position& position) {
    return position.sequence == 0
               ? std::string("at the start")
               : detail::formatted("last at {} #{}", position.operation, position.sequence);
  };
  std::vector<std::string> late, silent;
  std::string where;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const int rank = ranks[i];
    if (rank == own_rank || (call.peer >= 0 && static_cast<int>(i) != call.peer)) continue;
    const auto position = positions.find(rank);
    if (position == positions.end()) {
      silent.push_back(std::to_string(rank));
    } else if (call.peer >= 0) {
      return detail::formatted("{} is not complete after {}: rank {} is {}", call.text(), waited, rank,
                               last(position->second));
    } else if (position->second.sequence < call.sequence) {
      late.push_back(std::to_string(rank));
      where += detail::formatted("; {}{}", late.size() > 1 ? detail::formatted("rank {} ", rank) : "",
                                 last(position->second));
    }
  }
  std::string text;
  for (const auto& [rank, position] : positions)
    if (call.peer < 0 && position.sequence == call.sequence && position.operation != call.name)
      return detail::formatted("{} is not complete after {}: rank {} called {} instead", call.text(), waited,
                               rank, position.operation);
  if (!late.empty())
    text = detail::formatted("rank{} {} not entered {} after {}{}", late.size() > 1 ? "s" : "", joined(late),
                             call.text(), waited, where);
  if (!silent.empty())
    text += detail::formatted("{}rank{} {} not said how far {} after {} of {}: dead, stopped, or cut off",
                              text.empty() ? "" : ". ", silent.size() > 1 ? "s" : "", joined(silent),
                              silent.size() > 1 ? "they are" : "it is", waited, call.text());
  if (text.empty())
    text = detail::formatted(
        "{} is not complete after {} although every rank has entered it: the network or a rank is too "
        "slow",
        call.text(), waited);
  return text;
}

}  // namespace lockstep::detail
