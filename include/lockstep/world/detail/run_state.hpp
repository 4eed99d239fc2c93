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
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/error.hpp"
#include "lockstep/world/detail/call_history.hpp"
#include "lockstep/world/detail/event_log.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/rank_identity.hpp"
#include "lockstep/world/detail/store_protocol.hpp"
#include "lockstep/world/detail/timeouts.hpp"

namespace lockstep::detail {

/// What the store knows of a run: who has joined, where each rank is, who has failed first, who has ended.
///
/// It serves the requests about the run, and tells the ranks that have subscribed what each of them must know (see Event),
/// in one order. It keeps the positions that ranks report, and compares the hashes of their collectives: where two
/// differ, it asks these ranks for their last calls, and publishes the first that differs as the run's failure.
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
  static constexpr int most_ranks = 1 << 20;
  static constexpr std::size_t max_report_bytes = 1 << 20, max_groups = 1 << 16;

  /// A frame for some connections.
  struct Outgoing {
    std::vector<std::uint64_t> to;
    std::string frame;
  };

  /// `doubt`: what may keep ranks from reaching the store, for who waits for them.
  explicit RunState(std::chrono::milliseconds end_grace, std::string doubt = {})
      : end_grace_(end_grace), doubt_(std::move(doubt)) {}

  [[nodiscard]] std::vector<Outgoing> take_outgoing() { return std::exchange(outgoing_, {}); }

  /// Serves request `id` of a connection. Returns false if it is malformed or too large.
  [[nodiscard]] bool serve(std::uint64_t connection, std::uint64_t id, StoreOperation operation,
                           FrameReader& in, Time now) {
    switch (operation) {
      case StoreOperation::join:
        return join({connection, id}, in, now);
      case StoreOperation::leave:
        leave(connection);
        return in.whole();
      case StoreOperation::outcome:
        outcome_ ? reply({connection, id}, encoded(*outcome_)) : for_outcome_.push_back({connection, id});
        return in.whole();
      case StoreOperation::summary:
        return summarize({connection, id}, in, now);
      case StoreOperation::members:
        return describe({connection, id}, in);
      case StoreOperation::meet:
        return meet({connection, id}, in);
      case StoreOperation::subscribe: {
        const auto rank = in.value<int>();
        unsubscribe(connection);
        reply({connection, id}, {});
        if (rank < 0 || rank >= most_ranks) return in.whole();
        subscribers_[connection] = rank;
        reports_[rank] = {.connection = connection};
        for (const std::string& event : log_) push({connection}, StorePush::event, event);
        return in.whole();
      }
      case StoreOperation::publish: {
        const auto event = in.value<Event>();
        if (!in.whole()) return false;
        const bool news = publish(event);
        reply({connection, id}, std::string(1, news ? '\1' : '\0'));
        return true;
      }
      case StoreOperation::staying:
        return list_staying({connection, id}, in);
      case StoreOperation::ask:
        return answer({connection, id}, in, now);
      case StoreOperation::report:
        return take_report(connection, in, now);
      case StoreOperation::calls: {
        const std::string group(in.text());
        auto calls = in.value<std::vector<RecordedCall>>();
        const auto from = subscribers_.find(connection);
        if (!dispute_ || dispute_->group != group || from == subscribers_.end()) return in.whole();
        if (from->second == dispute_->found.one) dispute_->calls[0] = std::move(calls);
        if (from->second == dispute_->found.other) dispute_->calls[1] = std::move(calls);
        if (!dispute_->calls[0].empty() && !dispute_->calls[1].empty()) settle();
        return in.whole();
      }
      default:
        return false;
    }
  }
  /// Forgets a request that waits.
  void cancel(std::uint64_t connection, std::uint64_t id) {
    forget(
        connection, [&](const Asker& one) { return one.connection == connection && one.id == id; }, true);
  }
  /// A connection has closed.
  void close(std::uint64_t connection, Time now) {
    forget(
        connection, [&](const Asker& one) { return one.connection == connection; }, false);
    unsubscribe(connection);
    const auto bound = bound_.extract(connection);
    if (bound.empty()) return;
    Member& member = members_[bound.mapped()];
    if (member.exit_code) return;
    if (member.connected) {
      end(bound.mapped(), -1);
    } else {
      member.lost = true;
      lost_.push_back({bound.mapped(), now + end_grace_});
    }
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
  static constexpr std::size_t still_runs = ~std::size_t{0}, most_named = 5;

  /// A request that waits.
  struct Asker {
    std::uint64_t connection = 0, id = 0;
  };
  /// The ranks that a Meeting needs, all of them if there are none, and those that have come. If it `lasts`, a rank that
  /// waits no longer has come all the same.
  struct Gathering {
    struct Coming : Asker {
      bool waits = false;
    };
    std::vector<int> ranks;
    bool lasts = false;
    std::map<int, Coming> here = {};
  };
  /// A rank that has joined, or of which something is known without that.
  struct Member : KnownRank {
    bool present = false;            // it has not only told its failure
    std::size_t ended = still_runs;  // its place among those that have ended
    bool connected = false;          // it has made a communicator: the other ranks notice its death
  };
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
    std::vector<RecordedCall> calls[2] = {};
    Time until;
  };

  void reply(const Asker& to, std::string_view result) {
    outgoing_.push_back(
        {{to.connection},
         FrameWriter().integer(to.id).byte(static_cast<std::uint8_t>(StoreStatus::done)).raw(result).take()});
  }
  void push(std::vector<std::uint64_t> to, StorePush kind, std::string_view content) {
    if (to.empty()) return;
    outgoing_.push_back(
        {std::move(to),
         FrameWriter().integer(push_id).byte(static_cast<std::uint8_t>(kind)).raw(content).take()});
  }
  // Forgets what waits of a connection. The rank of one that is `open` stays where its coming lasts.
  template <class Is>
  void forget(std::uint64_t connection, const Is& is, bool open) {
    std::erase_if(for_outcome_, is);
    const auto bound = bound_.find(connection);
    if (bound == bound_.end()) return;
    for (auto& [name, gathering] : gatherings_) {
      const auto one = gathering.here.find(bound->second);
      if (one == gathering.here.end() || !is(one->second)) continue;
      one->second.waits = false;
      if (!open || !gathering.lasts) gathering.here.erase(one);
    }
    std::erase_if(gatherings_, [](const auto& one) { return one.second.here.empty(); });
  }
  [[nodiscard]] bool meet(const Asker& asker, FrameReader& in) {
    const std::string name(in.text());
    const auto rank = in.value<int>();
    auto ranks = in.value<std::vector<int>>();
    const auto waits = in.value<bool>(), lasts = in.value<bool>();
    if (!in.whole() || name.size() > max_key_bytes || gatherings_.size() >= max_groups) return false;
    if (made_.contains(name)) {  // a rank whose wait ended too early asks again
      reply(asker, encoded(Meeting{}));
      return true;
    }
    const auto here = gatherings_.try_emplace(name, Gathering{std::move(ranks), lasts}).first;
    Gathering& gathering = here->second;
    gathering.here[rank] = {asker, true};
    const std::size_t number =
        gathering.ranks.empty() ? static_cast<std::size_t>(size_) : gathering.ranks.size();
    if (gathering.here.size() == number) {
      tell(gathering, {});
      if (lasts) keep_made(name);
      gatherings_.erase(here);
    } else if (!waits || ended_ > 0) {
      const Meeting found = meeting(gathering);
      gathering.here[rank].waits = waits && found.ended < 0;
      if (!gathering.here[rank].waits) reply(asker, encoded(found));
    }
    return true;
  }
  void keep_made(const std::string& name) {
    made_.insert(name);
    made_in_order_.push_back(name);
    if (made_in_order_.size() <= max_groups) return;
    made_.erase(made_in_order_.front());
    made_in_order_.pop_front();
  }
  [[nodiscard]] Meeting meeting(const Gathering& gathering) const {
    Meeting found;
    std::size_t first = still_runs;
    const int number = gathering.ranks.empty() ? size_ : static_cast<int>(gathering.ranks.size());
    if (!gathering.here.empty()) found.lowest = gathering.here.begin()->first;
    for (int i = 0; i < number; ++i) {
      const int rank = gathering.ranks.empty() ? i : gathering.ranks[static_cast<std::size_t>(i)];
      if (gathering.here.contains(rank)) continue;
      if (++found.missing <= most_named) found.first_missing.push_back(rank);
      const auto known = members_.find(rank);
      if (known == members_.end() || known->second.ended >= first) continue;
      first = known->second.ended;
      found.ended = rank;
      found.exit_code = *known->second.exit_code;
    }
    return found;
  }
  void tell(Gathering& gathering, const Meeting& found) {
    for (auto& [rank, one] : gathering.here)
      if (std::exchange(one.waits, false)) reply(one, encoded(found));
  }

  [[nodiscard]] bool join(const Asker& asker, FrameReader& in, Time now) {
    const auto rank = in.value<int>(), size = in.value<int>();
    const auto identity = in.value<RankIdentity>();
    const auto stays = in.value<bool>();
    if (!in.whole() || rank < 0 || rank >= size || size > most_ranks) return false;
    if (size_ == 0) {
      size_ = size;
      sized_by_ = rank;
    }
    Member& member = members_[rank];
    if (!member.identity && size == size_) member.identity = identity;
    reply(asker, encoded(JoinAnswer{member, size_, sized_by_}));
    if (size != size_ || !member.is(identity) || !stays) return true;
    bound_[asker.connection] = rank;
    if (member.exit_code.value_or(0) < 0) {  // it had left, and has come back
      member.exit_code.reset();
      member.ended = still_runs;
      --ended_;
    }
    // Another World of this process may have joined; the process counts once.
    if (std::exchange(member.present, true)) return true;
    last_join_ = now;
    if (++present_ < size_) return true;
    std::vector<RankIdentity> all;
    for (const auto& [number, one] : members_) all.push_back(one.identity.value_or(RankIdentity{}));
    Outcome outcome;
    outcome.several_hosts =
        std::any_of(all.begin(), all.end(), [&](const RankIdentity& one) { return one.host != all[0].host; });
    for (const auto& wrong : {repeated_local_rank(all), unconfirmed_local_rank(all)})
      if (!wrong.empty() && outcome.kind == Outcome::complete)
        outcome = {.kind = Outcome::refused, .text = wrong};
    end_rendezvous(std::move(outcome));
    return true;
  }
  // A rank gives up a connection in good order: with its last one it takes no further part in the run.
  void leave(std::uint64_t connection) {
    forget(
        connection, [&](const Asker& one) { return one.connection == connection; }, false);
    const auto left = bound_.extract(connection);
    if (left.empty()) return;
    const auto is_its = [&](const auto& other) { return other.second == left.mapped(); };
    if (std::none_of(bound_.begin(), bound_.end(), is_its)) end(left.mapped(), -1);
  }
  // Ends the rendezvous unless it has ended.
  void end_rendezvous(Outcome outcome) {
    if (outcome_) return;
    outcome_ = std::move(outcome);
    for (const Asker& one : std::exchange(for_outcome_, {})) reply(one, encoded(*outcome_));
  }
  [[nodiscard]] bool summarize(const Asker& asker, FrameReader& in, Time now) {
    const auto quiet = std::chrono::floor<std::chrono::milliseconds>(now - last_join_);
    RunSummary summary{.failure = failure_,
                       .ended = ended_,
                       .quiet = quiet.count(),
                       .hints = doubt_ + (doubt_.empty() || stranger_.empty() ? "" : "; ") + stranger_};
    const int size = std::min(in.value<int>(), most_ranks);
    for (int rank = 0; rank < size; ++rank) {
      const auto found = members_.find(rank);
      if (found != members_.end() && found->second.identity) continue;
      if (++summary.missing <= most_named) summary.first_missing.push_back(rank);
    }
    reply(asker, encoded(summary));
    return in.whole();
  }
  [[nodiscard]] bool describe(const Asker& asker, FrameReader& in) {
    const auto ranks = in.value<std::vector<int>>();
    std::vector<KnownRank> known;
    if (ranks.empty())
      for (const auto& [rank, one] : members_) known.push_back(one);
    for (const int rank : ranks) {
      const auto found = members_.find(rank);
      known.push_back(found == members_.end() ? KnownRank{} : found->second);
    }
    const std::string bytes = encoded(known);
    if (!in.whole() || bytes.size() > max_frame_bytes) return false;
    reply(asker, bytes);
    return true;
  }

  // Takes an event. Returns whether it is news: of failures, the first; of refusals, those before all ranks have joined.
  bool publish(const Event& event) {
    if (event.rank < -1 || event.rank >= most_ranks) return false;
    switch (event.kind) {
      case Event::connected:
        members_[event.rank].connected = true;
        return true;
      case Event::ended:
        end(event.rank, event.failure.code);
        if (!members_[event.rank].identity) end_rendezvous({.kind = Outcome::ended, .rank = event.rank});
        return true;
      case Event::failed:
        if (failure_) return false;
        failure_ = event.failure;
        end_rendezvous({.kind = Outcome::failed, .failure = event.failure});
        break;
      case Event::refused:
        end_rendezvous({.kind = Outcome::refused, .rank = event.rank, .text = event.failure.message});
        if (outcome_->kind != Outcome::complete) return true;
        break;
      case Event::departed:
        if (!depart(event)) return true;
        break;
      case Event::aborted:  // the other ranks of the group do so by the first
        if (aborted_.size() < max_groups && !aborted_.insert(event.group).second) return false;
        break;
    }
    const std::string bytes = encoded(event);
    if (event.kind <= Event::aborted && log_.size() < max_groups) log_.push_back(bytes);
    std::vector<std::uint64_t> to;
    for (const auto& [connection, rank] : subscribers_) to.push_back(connection);
    push(std::move(to), StorePush::event, bytes);
    return true;
  }
  // A rank leaves a communicator. Returns whether the other ranks must know: some wait for it in vain, or it may host this
  // store.
  bool depart(const Event& event) {
    const auto found = comparisons_.find(event.group);
    if (found == comparisons_.end()) return event.rank == 0;
    CallComparison& group = found->second;
    const bool waited_for = group.furthest() > event.position.sequence;
    if (const auto other = group.leave(event.rank, event.position))
      publish({.failure = left_unequally(event.rank, event.position, other->first, other->second)});
    if (group.all_left()) comparisons_.erase(found);
    return waited_for || event.rank == 0;
  }
  // The ranks that are in a communicator.
  [[nodiscard]] bool list_staying(const Asker& asker, FrameReader& in) {
    const auto group = comparisons_.find(std::string(in.text()));
    std::vector<int> staying;
    for (const int rank : in.value<std::vector<int>>()) {
      const auto known = members_.find(rank);
      const bool ended = known != members_.end() && known->second.exit_code;
      if (group != comparisons_.end() && !group->second.left().contains(rank) && !ended)
        staying.push_back(rank);
    }
    reply(asker, encoded(staying));
    return in.whole();
  }
  void end(int rank, int code) {
    Member& member = members_[rank];
    if (!member.exit_code) {
      ++ended_;
      member.ended = order_++;
    }
    if (member.exit_code.value_or(-1) < 0) member.exit_code = code;
    for (auto& [name, gathering] : gatherings_)
      if (const Meeting found = meeting(gathering); found.ended == rank) tell(gathering, found);
  }
  // The grace of a rank whose connection has closed before it has made a communicator is over.
  void publish_end(int rank) {
    const Member& member = members_[rank];
    if (member.exit_code || member.connected || (outcome_ && outcome_->kind != Outcome::complete)) return;
    publish({.kind = Event::failed,
             .failure = {
                 .kind = FailureKind::died,
                 .rank = rank,
                 .message = formatted("has ended before its first communicator ({}): it was killed, or its "
                                      "connection broke; look at its output, and start all ranks again",
                                      member.identity.value_or(RankIdentity{}).process)}});
  }

  void unsubscribe(std::uint64_t connection) {
    const auto found = subscribers_.extract(connection);
    if (found.empty()) return;
    const int rank = found.mapped();
    if (const auto known = reports_.find(rank);
        known == reports_.end() || known->second.connection != connection)
      return;
    reports_.erase(rank);
    if (dispute_ && (dispute_->found.one == rank || dispute_->found.other == rank)) settle();
  }
  [[nodiscard]] bool answer(const Asker& asker, FrameReader& in, Time now) {
    const auto group = comparisons_.find(std::string(in.text()));
    std::vector<RankReport> answers;
    std::vector<std::uint64_t> asked;
    for (const int rank : in.value<std::vector<int>>()) {
      RankReport& one = answers.emplace_back();
      if (group != comparisons_.end())
        if (const auto left = group->second.left().find(rank); left != group->second.left().end())
          one.left = left->second;
      if (const auto known = members_.find(rank); known != members_.end())
        one.exit_code = known->second.exit_code;
      const auto found = reports_.find(rank);
      if (found == reports_.end()) continue;
      one.age = std::chrono::floor<std::chrono::milliseconds>(now - found->second.heard).count();
      one.positions = found->second.positions;
      if (!std::exchange(found->second.asked, true)) asked.push_back(found->second.connection);
    }
    const std::string bytes = encoded(answers);
    if (!in.whole() || bytes.size() > max_frame_bytes) return false;
    push(std::move(asked), StorePush::question, {});
    reply(asker, bytes);
    return true;
  }
  [[nodiscard]] bool take_report(std::uint64_t connection, FrameReader& in, Time now) {
    const auto from = subscribers_.find(connection);
    if (from == subscribers_.end()) return true;
    if (in.rest().size() > max_report_bytes) return false;
    Report& known = reports_[from->second];
    known = {connection, in.value<std::vector<RankPosition>>(), now};
    for (const CallMarks& group : in.value<std::vector<CallMarks>>()) {
      if (!comparisons_.contains(group.group) && comparisons_.size() >= max_groups) continue;
      CallComparison& comparison = comparisons_.try_emplace(group.group, group.ranks).first->second;
      for (const CallMark& mark : group.marks)
        contest(group.group, comparison.report(from->second, mark), now);
      if (group.marks.empty()) continue;
      if (const auto left = comparison.left_before(group.marks[0].sequence))
        push({connection}, StorePush::event,
             encoded(Event{.kind = Event::departed,
                           .rank = left->first,
                           .group = group.group,
                           .position = left->second}));
    }
    return in.whole();
  }
  // Asks two ranks whose calls differ for their last calls, if both are there to tell them.
  void contest(const std::string& group, const std::optional<CallDifference>& found, Time now) {
    if (!found || dispute_ || failure_) return;
    dispute_ = {.group = group, .found = *found, .until = now + dispute_timeout};
    const auto one = reports_.find(found->one), other = reports_.find(found->other);
    if (one == reports_.end() || other == reports_.end()) return settle();
    push({one->second.connection, other->second.connection}, StorePush::calls,
         FrameWriter().text(group).payload());
  }
  void settle() {
    const Dispute dispute = *std::exchange(dispute_, std::nullopt);
    const auto& calls = dispute.calls;
    publish({.kind = Event::failed, .failure = mismatch(dispute.found, dispute.group, calls[0], calls[1])});
  }

  const std::chrono::milliseconds end_grace_;
  const std::string doubt_;
  std::vector<Outgoing> outgoing_;
  int size_ = 0, sized_by_ = -1;  // the number of ranks, and the rank that has said it first
  int present_ = 0;
  Time last_join_{};
  std::size_t ended_ = 0, order_ = 0;             // how many ranks have ended, and have done so in all
  std::map<int, Member> members_;                 // by rank
  std::unordered_map<std::uint64_t, int> bound_;  // the ranks of connections
  std::deque<LostRank> lost_;                     // by time
  std::optional<Outcome> outcome_;
  std::optional<Failure> failure_;  // the first
  std::set<std::string> aborted_;   // groups
  std::vector<std::string> log_;    // failures and aborts, for who subscribes later
  std::string stranger_;
  std::vector<Asker> for_outcome_;
  std::unordered_map<std::string, Gathering> gatherings_;  // by name
  std::set<std::string> made_;                             // communicators that all members have come to make
  std::deque<std::string> made_in_order_;
  std::map<std::uint64_t, int> subscribers_;                     // the ranks of connections
  std::map<int, Report> reports_;                                // of the subscribed ranks
  std::unordered_map<std::string, CallComparison> comparisons_;  // by group
  std::optional<Dispute> dispute_;
};

}  // namespace lockstep::detail
