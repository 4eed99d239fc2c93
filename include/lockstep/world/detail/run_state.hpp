#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/error.hpp"
#include "lockstep/world/detail/call_history.hpp"
#include "lockstep/world/detail/event_log.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/rank_identity.hpp"
#include "lockstep/world/detail/run_members.hpp"
#include "lockstep/world/detail/store_protocol.hpp"
#include "lockstep/world/detail/timeouts.hpp"

namespace lockstep::inline v0_1::detail {

/// What the store knows of a run: its members, its events, of failures the first, and where each rank is.
///
/// It serves the requests about the run, and tells the ranks that have subscribed what each must know (see Event), in one
/// order. It keeps the positions that ranks report, and compares the hashes of their collectives: where two differ, it takes
/// the last calls of both, for which it asks unless they have left, and publishes the first that differs as a failure.
///
/// A connection of a rank that has joined may close before that rank has made a communicator or has ended. Then the rank
/// has ended while other ranks wait for it: that is the run's failure, unless the rank itself or its launcher, which know
/// the cause, publish one within `end_grace`.
///
/// It has no clock, no thread and no socket: the time is an argument, and what is to be sent is collected until
/// take_outgoing. So it is run by StoreServer and, in virtual time, by a simulation.
class RunState {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::size_t max_groups = 1 << 16, most_with_calls = 64;

  /// `doubt`: what may keep ranks from joining, for who waits for them. `began`: how a later generation than the first has.
  explicit RunState(std::chrono::milliseconds end_grace, std::string doubt = {}, const Event& began = {})
      : end_grace_(end_grace), doubt_(std::move(doubt)), log_(began.kind == Event::began, encoded(began)) {}

  /// Returns what is to be sent, and forgets it.
  [[nodiscard]] std::vector<Outbox::Outgoing> take_outgoing() { return std::exchange(out_.frames, {}); }

  /// Serves request `id` of a connection. Returns false if it is malformed or too large.
  [[nodiscard]] bool serve(std::uint64_t connection, std::uint64_t id, StoreOperation operation,
                           FrameReader& in, Time now) {
    const Asker asker{connection, id};
    switch (operation) {
      case StoreOperation::join: {
        const auto is_new = members_.join(asker, in);
        if (is_new.value_or(false)) last_join_ = now;
        return is_new.has_value();
      }
      case StoreOperation::leave:
        members_.leave(connection);
        return in.whole();
      case StoreOperation::summary:
        summarize(asker, in.value<std::optional<std::string>>(), now);
        return in.whole();
      case StoreOperation::members:
        return members_.describe(asker, in);
      case StoreOperation::meet:
        return members_.meet(asker, in);
      case StoreOperation::subscribe: {
        const auto rank = in.value<int>();
        unsubscribe(connection);
        out_.reply(asker, {});
        if (rank < 0 || rank >= most_ranks) return in.whole();
        subscribers_[connection] = rank;
        reports_[rank] = {.connection = connection};
        for (const std::string& event : log_) out_.push({connection}, StorePush::event, event);
        return in.whole();
      }
      case StoreOperation::publish: {
        const auto event = in.value<Event>();
        if (!in.whole()) return false;
        out_.reply(asker, encoded(publish(event)));
        return true;
      }
      case StoreOperation::ask:
        return answer(asker, in, now);
      case StoreOperation::report:
        return take_report(connection, in, now);
      default:
        return false;
    }
  }
  /// Forgets a request that waits.
  void cancel(std::uint64_t connection, std::uint64_t id) { members_.cancel({connection, id}); }
  /// A connection has closed.
  void close(std::uint64_t connection, Time now) {
    if (const auto rank = members_.close(connection)) lost_.push_back({*rank, now + end_grace_});
    unsubscribe(connection);
  }
  /// Does what is due.
  void tick(Time now) {
    for (; !lost_.empty() && lost_.front().until <= now; lost_.pop_front()) publish_end(lost_.front().rank);
    if (dispute_ && dispute_->until <= now) settle();
  }
  /// Returns when to call tick next.
  [[nodiscard]] Time next() const {
    Time next = lost_.empty() ? Time::max() : lost_.front().until;
    return dispute_ ? std::min(next, dispute_->until) : next;
  }

  /// Keeps why a process that wanted to connect was refused, for who waits for it.
  void note_stranger(std::string reason) { stranger_ = std::move(reason); }

 private:
  /// The last report of a subscribed rank.
  struct Report {
    std::uint64_t connection = 0;
    std::vector<RankPosition> positions = {};
    Time heard{};
    bool asked = false;  // to report again
  };
  struct LostRank {
    int rank;
    Time until;
  };
  /// Two ranks whose calls differ, and their last calls once they have sent them.
  struct Dispute {
    std::string group;
    CallDifference found;
    std::map<int, std::vector<RecordedCall>> calls = {};  // of both; of an awaited one, kept ones
    std::set<int> awaited = {};
    Time until;
  };

  void summarize(const Asker& asker, const std::optional<std::string>& meeting, Time now) {
    const auto quiet = std::chrono::floor<std::chrono::milliseconds>(now - last_join_);
    out_.reply(asker,
               encoded(RunSummary{
                   .failure = failure_,
                   .dispute = dispute_ ? std::optional(mismatch(dispute_->found, dispute_->group, {}, {}))
                                       : std::nullopt,
                   .ended = members_.ended(),
                   .bad_end = members_.has_bad_end(),
                   .quiet = quiet.count(),
                   .hints = doubt_ + (doubt_.empty() || stranger_.empty() ? "" : "; ") + stranger_,
                   .host_failed = host_failed_,
                   .meeting = meeting ? members_.meeting(*meeting) : Meeting{}}));
  }

  // Takes an event. Returns whether it is news: of failures, the first; of refusals, those before all ranks have joined.
  bool publish(const Event& event) {
    const bool of_run = event.kind == Event::failed || event.kind == Event::refused;
    if (event.rank < (of_run ? -1 : 0) || event.rank >= most_ranks) return false;
    switch (event.kind) {
      case Event::began:  // the store's own
        return false;
      case Event::connected:
        members_.of(event.rank).connected = true;
        return true;
      case Event::ended:
        members_.end(event.rank, event.failure.code);
        for (const auto& [group, position] : event.last)
          if (depart(event.rank, group, position))
            push_to_all({.kind = Event::departed, .rank = event.rank, .group = group, .position = position});
        return true;
      case Event::failed:
        host_failed_ = host_failed_ || !event.failure.host.empty();
        // The launcher of a host knows that its ranks were asked to end, whatever one of them has told.
        if (failure_ && event.failure.kind == FailureKind::stopped &&
            members_.share_host(failure_->rank, event.failure.rank))
          failure_->kind = FailureKind::stopped;
        if (failure_) return false;
        failure_ = event.failure;
        members_.end_rendezvous(event);
        break;
      case Event::refused:
        members_.end_rendezvous(event);
        if (!members_.meeting().met()) return true;
        break;
      case Event::departed:
        if (!depart(event.rank, event.group, event.position)) return true;
        break;
      case Event::aborted:  // the other ranks of the group do so by the first
        if (aborted_.size() < max_groups && !aborted_.insert(event.group).second) return false;
        comparisons_.erase(event.group);
        break;
    }
    push_to_all(event);
    return true;
  }
  void push_to_all(const Event& event) {
    const std::string bytes = encoded(event);
    if (event.kind <= Event::aborted && log_.size() < max_groups) log_.push_back(bytes);
    std::vector<std::uint64_t> to;
    for (const auto& [connection, rank] : subscribers_) to.push_back(connection);
    out_.push(std::move(to), StorePush::event, bytes);
  }
  // A rank leaves a communicator after the collective `last`. Returns whether the other ranks must know: some wait for it in
  // vain, or it may host this store.
  bool depart(int rank, const std::string& name, const FailedCall& last) {
    const auto found = comparisons_.find(name);
    if (found == comparisons_.end()) return rank == 0;
    CallComparison& group = found->second;
    // The ranks that wait in vain are told of the first rank that has left, not of each: that would be N^2 messages.
    const bool waited_for = group.furthest() > last.sequence && !group.left_before(last.sequence + 1);
    if (const auto other = group.leave(rank, last))
      publish({.failure = left_unequally(rank, last, other->first, other->second)});
    if (group.all_left()) comparisons_.erase(found);
    return waited_for || rank == 0;
  }
  // The grace of a rank whose connection has closed before it has made a communicator is over.
  void publish_end(int rank) {
    if (failure_) return;
    const auto& member = members_.of(rank);
    const Meeting all = members_.meeting();
    if (member.exit_code || member.connected || (all.over() && !all.met())) return;
    publish({.failure = ended_unnoticed(rank, member.identity.value_or(RankIdentity{}).process)});
  }

  void unsubscribe(std::uint64_t connection) {
    const auto found = subscribers_.extract(connection);
    if (found.empty()) return;
    const int rank = found.mapped();
    if (const auto known = reports_.find(rank);
        known == reports_.end() || known->second.connection != connection)
      return;
    reports_.erase(rank);
    if (dispute_ && dispute_->awaited.erase(rank) > 0) settle(true);
  }
  [[nodiscard]] bool answer(const Asker& asker, FrameReader& in, Time now) {
    const auto group = comparisons_.find(std::string(in.text()));
    std::vector<RankReport> answers;
    std::vector<std::uint64_t> asked;
    const auto ranks = in.value<std::vector<int>>();
    const auto asks = in.value<bool>();
    if (ranks.size() > most_ranks) return false;
    for (const int rank : ranks) {
      RankReport& one = answers.emplace_back();
      if (group == comparisons_.end()) {
        one.left.emplace();  // all ranks have left it, or it has been aborted
      } else if (const auto left = group->second.left().find(rank); left != group->second.left().end()) {
        one.left = left->second;
      }
      one.exit_code = members_.exit_code(rank);
      const auto found = reports_.find(rank);
      if (found == reports_.end()) continue;
      one.age = std::chrono::floor<std::chrono::milliseconds>(now - found->second.heard).count();
      if (!asks) continue;
      one.positions = found->second.positions;
      if (!std::exchange(found->second.asked, true)) asked.push_back(found->second.connection);
    }
    const std::string bytes = encoded(answers);
    if (!in.whole() || bytes.size() > max_frame_bytes) return false;
    out_.push(std::move(asked), StorePush::question, {});
    out_.reply(asker, bytes);
    return true;
  }
  [[nodiscard]] bool take_report(std::uint64_t connection, FrameReader& in, Time now) {
    const auto from = subscribers_.find(connection);
    if (from == subscribers_.end()) return true;
    Report& known = reports_[from->second];
    known = {connection, in.value<std::vector<RankPosition>>(), now};
    for (const CallMarks& group : in.value<std::vector<CallMarks>>()) {
      const bool tells = dispute_ && dispute_->group == group.group && !group.calls.empty();
      if (tells && dispute_->awaited.erase(from->second) > 0) {
        dispute_->calls[from->second] = group.calls;
        settle(true);
      }
      if (aborted_.contains(group.group)) continue;
      if (!comparisons_.contains(group.group) && comparisons_.size() >= max_groups) {
        publish({.failure = too_many_groups(from->second, max_groups)});
        break;
      }
      CallComparison& comparison = comparisons_.try_emplace(group.group, group.ranks).first->second;
      if (comparisons_.size() <= most_with_calls) comparison.keep(group.calls);
      for (const CallMark& mark : group.marks)
        contest(group, comparison, comparison.report(from->second, mark), from->second, now);
      if (group.marks.empty()) continue;
      if (const auto left = comparison.left_before(group.marks[0].sequence))
        out_.push({connection}, StorePush::event,
                  encoded(Event{.kind = Event::departed,
                                .rank = left->first,
                                .group = group.group,
                                .position = left->second}));
    }
    return in.whole();
  }
  // Asks two ranks whose calls differ for their last ones, unless they have left, or are `teller`, who tells them with `group`.
  void contest(const CallMarks& group, const CallComparison& comparison,
               const std::optional<CallDifference>& found, int teller, Time now) {
    if (!found || dispute_ || failure_) return;
    dispute_ = {.group = group.group, .found = *found, .until = now + dispute_timeout};
    for (const auto& [rank, hash] :
         {std::pair(found->one, found->one_hash), std::pair(found->other, found->other_hash)}) {
      const bool told = rank == teller && !group.calls.empty();
      dispute_->calls[rank] = told ? group.calls : comparison.kept(found->sequence, hash);
      const auto there = reports_.find(rank);
      if (told || there == reports_.end() || comparison.left().contains(rank)) continue;
      dispute_->awaited.insert(rank);
      out_.push({there->second.connection}, StorePush::calls, FrameWriter().text(group.group).payload());
    }
    settle(true);
  }
  void settle(bool once_told = false) {
    if (once_told && !dispute_->awaited.empty()) return;
    auto [group, found, calls, awaited, until] = *std::exchange(dispute_, std::nullopt);
    publish({.kind = Event::failed, .failure = mismatch(found, group, calls[found.one], calls[found.other])});
  }

  const std::chrono::milliseconds end_grace_;
  const std::string doubt_;
  Outbox out_;
  RunMembers members_{out_};
  Time last_join_{};
  std::deque<LostRank> lost_;       // by time
  std::optional<Failure> failure_;  // the first
  std::set<std::string> aborted_;   // groups
  std::vector<std::string> log_;    // a start, failures and aborts, for who subscribes later
  std::string stranger_;
  bool host_failed_ = false;
  std::map<std::uint64_t, int> subscribers_;                     // the ranks of connections
  std::map<int, Report> reports_;                                // of the subscribed ranks
  std::unordered_map<std::string, CallComparison> comparisons_;  // by group
  std::optional<Dispute> dispute_;
};

}  // namespace lockstep::inline v0_1::detail
