#pragma once

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/detail/lists.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/store_protocol.hpp"
#include "lockstep/world/detail/timeouts.hpp"

/// What happens in a run, and what one rank concludes from it. Without a clock, a thread or a socket: the time is an
/// argument.
namespace lockstep::inline v0_1::detail {

/// What happens in a run. The store takes events in one order, and sends those to every rank that it must know.
struct Event {
  enum Kind : std::uint8_t {
    failed,     ///< a rank has failed: `failure`; of these the ranks are sent the first
    aborted,    ///< a rank has ended `group` by `failure`, with a message if it knows why, and may go on
    departed,   ///< a rank has left `group` after its collective `position`; `hash` of all, 0 if unknown
    refused,    ///< a process may not join for the reason in `failure`
    connected,  ///< a rank has made a communicator, whose other ranks notice its death; it is not sent on
    ended,  ///< a rank has ended with exit code `failure.code`, in communicators at `last`; it is not sent on
    began  ///< generation `restart` has begun, in which all ranks were started again, after `failure` of the one before
  };
  Kind kind = failed;
  int rank = -1;
  std::string group = {};
  FailedCall position = {};
  std::uint64_t hash = 0;
  Failure failure = {};
  std::vector<RankPosition> last = {};
  std::int64_t restart = 0;
};
template <>
inline constexpr Event::Kind last_of<Event::Kind> = Event::began;
template <>
inline constexpr auto fields_of<Event> =
    std::tuple{&Event::kind, &Event::rank,    &Event::group, &Event::position,
               &Event::hash, &Event::failure, &Event::last,  &Event::restart};

/// Returns the first of the failures of several ranks, null while that is undecided: `waited` is the time
/// since the first one has become known. A rank that dies makes other ranks fail, and their reports may arrive before its
/// death is seen. So a killed process ranks before all others, a cause before a consequence, and otherwise
/// the earlier failure first. A consequence waits for its cause. Ranks tell the store no consequences, so the first failure
/// that reaches the store is the first of the run.
inline const Failure* first_failure(const std::vector<Failure>& failures, std::chrono::nanoseconds waited) {
  const auto order = [](const Failure& failure) {
    if (failure.kind == FailureKind::died && failure.code == 128 + SIGKILL) return 0;
    return failure.kind == FailureKind::consequence ? 2 : 1;
  };
  const auto first = std::min_element(failures.begin(), failures.end(), [&](const auto& a, const auto& b) {
    return std::pair(order(a), a.time) < std::pair(order(b), b.time);
  });
  if (first == failures.end()) return nullptr;
  const Milliseconds settling[]{{}, cause_settles, consequence_settles};
  return waited < settling[order(*first)] ? nullptr : &*first;
}
/// What the store knows of a rank that somebody asks for.
struct RankReport {
  std::int64_t age = -1;                     // of its last report, in ms; -1 if it is not connected
  std::vector<RankPosition> positions = {};  // in that report
  std::optional<FailedCall> left = {};  // its last collective in the group in question, if it has left that
  std::optional<int> exit_code = {};    // once it has ended
};
template <>
inline constexpr auto fields_of<RankReport> =
    std::tuple{&RankReport::age, &RankReport::positions, &RankReport::left, &RankReport::exit_code};

/// The state of a meeting: some ranks come to one place, as all do that join the run, and the members of a communicator that
/// is made.
struct Meeting {
  std::size_t missing = 0;  // how many have not come
  std::vector<int> first_missing = {};
  int lowest = -1;                // of those that have come
  int ended = -1, exit_code = 0;  // the first that has ended without coming, or -1
  std::optional<Event> end = {};  // what has ended the meeting of all ranks: a failure, or a refusal
  bool several_hosts = false;     // of all ranks, if all have joined

  /// Returns whether nobody waits in it any longer.
  [[nodiscard]] bool over() const { return missing == 0 || ended >= 0 || end; }
  /// Returns whether all have come.
  [[nodiscard]] bool met() const { return missing == 0 && !end; }
  /// Returns "rank 2", "ranks 1 and 2", or "ranks 1, 2, 3, 4 and 60 more".
  [[nodiscard]] std::string missing_text() const {
    const std::size_t shown = missing > first_missing.size() ? 4 : missing;
    return (missing == 1 ? "rank " : "ranks ") + joined(first_missing, ", ", " and ", shown, missing);
  }
};
template <>
inline constexpr auto fields_of<Meeting> =
    std::tuple{&Meeting::missing,   &Meeting::first_missing, &Meeting::lowest,       &Meeting::ended,
               &Meeting::exit_code, &Meeting::end,           &Meeting::several_hosts};

/// What the store knows of a run.
struct RunSummary {
  std::optional<Failure> failure{};  // the first
  std::optional<Failure> dispute{};  // calls differ, and it is not yet known which
  std::size_t ended = 0;             // how many ranks have ended
  bool bad_end = false;              // one of them with the code of a failure
  std::int64_t quiet = 0;            // the time since the last rank has joined, in ms
  std::string hints = {};            // what may keep ranks from joining
  bool host_failed = false;          // a launcher has told a failure: it ends the ranks of its host
  Meeting meeting = {};              // that was asked for; one that all have come to if it is not kept
};
template <>
inline constexpr auto fields_of<RunSummary> =
    std::tuple{&RunSummary::failure, &RunSummary::dispute, &RunSummary::ended,       &RunSummary::bad_end,
               &RunSummary::quiet,   &RunSummary::hints,   &RunSummary::host_failed, &RunSummary::meeting};

/// The reason of a rank whose stack an exception unwinds, past a communicator.
inline const std::string by_exception = "an exception, which its own output names, has ended it";

/// The first failure of a run as one rank knows it, after which no collective can complete.
struct KnownFailure : Failure {
  bool store_lost = false;  // the store is gone, so the process that hosts it has ended
};

/// What a rank knows of the others from the events that it was sent.
struct RankView {
  int rank = -1;
  std::optional<KnownFailure> failure = {};
  /// A last collective, and the hash of all, 0 if it is unknown.
  using Departure = std::pair<FailedCall, std::uint64_t>;
  std::map<std::string, std::map<int, Departure>> departed =
      {};                                       // by group: rank 0, and ranks that this one may wait for
  std::map<std::string, Failure> aborted = {};  // groups, by another rank

  void learn(const Event& event) {
    if (event.kind == Event::failed && !failure) failure = KnownFailure{event.failure};
    if (event.kind == Event::departed) departed[event.group][event.rank] = {event.position, event.hash};
    if (event.kind != Event::aborted || event.rank == rank || failure) return;
    Failure reason = event.failure;
    if (reason.message.empty()) {  // the exception may have ended another group just before
      reason.message = by_exception;
      for (const auto& [group, other] : aborted)
        if (other.rank == event.rank && std::chrono::nanoseconds(reason.time - other.time) < same_exception)
          reason.message = other.message;
    }
    aborted.try_emplace(event.group, std::move(reason));
  }
  /// Returns whether nothing more can be learned: another rank has failed, or every rank throws.
  [[nodiscard]] bool over() const {
    return failure && (failure->rank != rank || failure->kind == FailureKind::mismatch);
  }
  /// Returns the failure of a rank that has left `group` before the collective `call`.
  [[nodiscard]] std::optional<Failure> left_before(const std::string& group, const FailedCall& call) const {
    const auto gone = departed.find(group);
    if (gone == departed.end() || call.peer >= 0) return std::nullopt;
    for (const auto& [other, departure] : gone->second)
      if (const auto& last = departure.first; other != rank && last.sequence < call.sequence)
        return left_early(other, last, rank, call);
    return std::nullopt;
  }
  /// Returns the failure of this rank, which has left `group` after `own` with the hash of all its calls, and one that has
  /// left it before, if their calls differ.
  [[nodiscard]] std::optional<Failure> different_end(const std::string& group, const FailedCall& own,
                                                     std::uint64_t hash) const {
    const auto gone = departed.find(group);
    if (gone == departed.end()) return std::nullopt;
    for (const auto& [other, departure] : gone->second) {
      const auto& [last, its_hash] = departure;
      if (last.sequence != own.sequence) return left_unequally(rank, own, other, last);
      if (its_hash != 0 && its_hash != hash) return mismatch({rank, other, own.sequence}, group, {}, {});
    }
    return std::nullopt;
  }
};

/// What the other ranks of a group have reported since they were asked for it; ranks are global.
struct Answers {
  bool store_answers = false;               // the store has answered since the question was asked
  bool store_left = false;                  // the store's host has left gracefully; the store may be gone
  bool conclusive = false;                  // a rank that has not answered had enough time to
  std::map<int, FailedCall> positions{};    // last collectives; without the ranks that have not answered
  std::map<int, RankPosition> elsewhere{};  // of another group, where the asking rank is behind
  std::set<int> lost{};                     // whose connection to the store has ended
  std::map<int, FailedCall> left{};         // last collectives of those that have left the group
  std::map<int, int> exit_codes{};          // of those that have ended
};

/// The reports of ranks since one of them was first asked for. It is over once every rank has reported, or after `timeout`;
/// while reports still arrive, or the store is slow, as on a machine short of cores, after `most`.
struct Question {
  using Time = std::chrono::steady_clock::time_point;

  std::vector<int> ranks;
  int own;  // the rank that asks
  Time begin;
  Milliseconds timeout, most;
  Answers answers = {};
  std::size_t reports = 0;  // that have arrived, the last of them at `last`
  Time last = begin;

  /// Takes the answer to RunClient::reports, which was sent at `asked` and came at `now`; `read(rank, positions)` takes each
  /// new report. Returns whether the question is over.
  template <class Read>
  bool take(const std::vector<RankReport>& answer, Time asked, Time now, Read&& read) {
    std::size_t fresh = 0;
    for (std::size_t i = 0; i < std::min(answer.size(), ranks.size()); ++i) {
      const int rank = ranks[i];
      const RankReport& known = answer[i];
      if (known.left) answers.left[rank] = *known.left;
      if (known.exit_code) answers.exit_codes[rank] = *known.exit_code;
      if (known.age < 0) answers.lost.insert(rank);
      if (known.age < 0 || Milliseconds(known.age) > asked - begin) continue;
      ++fresh;
      if (rank == own)  // shows that the store and this process keep up
        answers.store_answers = true;
      else
        read(rank, known.positions);
    }
    if (std::exchange(reports, fresh) < fresh) last = now;
    answers.conclusive = answers.store_answers && now >= begin + timeout && now >= last + trickle;
    return fresh == ranks.size() || answers.conclusive || now >= begin + most;
  }
};

/// For how long ranks have been silent.
class Silence {
 public:
  using Duration = std::chrono::steady_clock::duration;

  /// Adds a look that found `silent`, `gap` after the last one. Returns who has been silent for `limit`, and how long.
  std::optional<std::pair<int, Duration>> add(const std::set<int>& silent, Duration gap, Duration limit) {
    std::map<int, Duration> known;
    for (const int who : silent) known[who] = known_.contains(who) ? known_[who] + gap : Duration(0);
    known_ = std::move(known);
    for (const auto& [who, time] : known_)
      if (time >= limit) return std::pair(who, time);
    return std::nullopt;
  }

 private:
  std::map<int, Duration> known_;
};

}  // namespace lockstep::inline v0_1::detail
