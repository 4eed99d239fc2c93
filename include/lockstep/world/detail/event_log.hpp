#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/error.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/store_protocol.hpp"

namespace lockstep::detail {

/// What happens in a run. The store takes events in one order, and sends those to every rank that it must know.
struct Event {
  enum Kind : std::uint8_t {
    failed,     ///< a rank has failed: `failure`; of these the ranks are sent the first
    aborted,    ///< a rank has ended `group` by `failure`, with a message if it knows why, and may go on
    departed,   ///< a rank has left `group` after its collective `position`
    refused,    ///< a process may not join for the reason in `failure`; `rank` alone is late, or -1
    connected,  ///< a rank has made a communicator, whose other ranks notice its death; it is not sent on
    ended       ///< a rank has ended with exit code `failure.code`; it is not sent on
  };
  Kind kind = failed;
  int rank = -1;
  std::string group = {};
  FailedCall position = {};
  Failure failure = {};
};
template <>
inline constexpr Event::Kind last_of<Event::Kind> = Event::ended;
template <>
inline constexpr auto fields_of<Event> =
    std::tuple{&Event::kind, &Event::rank, &Event::group, &Event::position, &Event::failure};

/// The last collective of a rank in a communicator.
struct RankPosition {
  std::string group = {};
  FailedCall call = {};
};
template <>
inline constexpr auto fields_of<RankPosition> = std::tuple{&RankPosition::group, &RankPosition::call};
/// What the store knows of a rank that somebody asks for.
struct RankReport {
  std::int64_t age = -1;                     // of its last report, in ms; -1 if it is not connected
  std::vector<RankPosition> positions = {};  // in that report
  std::optional<FailedCall> left =
      {};  // its last collective in the communicator in question, if it has left that
  std::optional<int> exit_code = {};  // once it has ended
};
template <>
inline constexpr auto fields_of<RankReport> =
    std::tuple{&RankReport::age, &RankReport::positions, &RankReport::left, &RankReport::exit_code};

/// Some ranks that come to one place, as the members of a communicator that is made.
struct Meeting {
  std::size_t missing = 0;  // how many have not come
  std::vector<int> first_missing = {};
  int lowest = -1;                // of those that have come
  int ended = -1, exit_code = 0;  // the first that has ended without coming, or -1
};
template <>
inline constexpr auto fields_of<Meeting> = std::tuple{&Meeting::missing, &Meeting::first_missing,
                                                      &Meeting::lowest, &Meeting::ended, &Meeting::exit_code};

/// How a rendezvous has ended, for the ranks that wait for it.
struct Outcome {
  enum Kind : std::uint8_t { complete, failed, ended, refused } kind = complete;
  int rank = -1;               // that has ended with exit code 0 before it signed in, or alone was late
  bool several_hosts = false;  // of the ranks, if all have joined
  std::string text = {};       // of a refusal
  Failure failure = {};        // of the rank that has failed
};
template <>
inline constexpr Outcome::Kind last_of<Outcome::Kind> = Outcome::refused;
template <>
inline constexpr auto fields_of<Outcome> =
    std::tuple{&Outcome::kind, &Outcome::rank, &Outcome::several_hosts, &Outcome::text, &Outcome::failure};

}  // namespace lockstep::detail
