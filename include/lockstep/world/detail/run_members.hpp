#pragma once

#include <algorithm>
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

#include "lockstep/world/detail/event_log.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/rank_identity.hpp"
#include "lockstep/world/detail/store_protocol.hpp"

namespace lockstep::inline v0_1::detail {

/// A request that waits for its reply.
struct Asker {
  std::uint64_t connection = 0, id = 0;
};

/// Frames that the store is to send, each to some connections.
struct Outbox {
  struct Outgoing {
    std::vector<std::uint64_t> to;
    std::string frame;
  };
  std::vector<Outgoing> frames = {};

  void reply(const Asker& to, std::string_view result) {
    send({to.connection}, to.id, StoreStatus::done, result);
  }
  void push(std::vector<std::uint64_t> to, StorePush kind, std::string_view content) {
    if (!to.empty()) send(std::move(to), push_id, kind, content);
  }

 private:
  template <class Kind>
  void send(std::vector<std::uint64_t> to, std::uint64_t id, Kind kind, std::string_view content) {
    frames.push_back({std::move(to), FrameWriter().value(id).value(kind).raw(content).take()});
  }
};

/// The ranks of a run as the store knows them: who has joined and from where, who has ended, and who has come to which
/// Meeting.
///
/// A rank that has joined has come to the meeting of all ranks, and stays there. Another meeting is forgotten once all
/// have come, or nobody waits in it and no coming lasts.
class RunMembers {
 public:
  static constexpr std::size_t max_meetings = 1 << 16;

  /// A rank that has joined, or of which something is known without that.
  struct Member : KnownRank {
    std::size_t order = 0;   // its place among those that have ended
    bool connected = false;  // it has made a communicator: the other ranks notice its death
  };

  explicit RunMembers(Outbox& out) : out_(out) {}
  RunMembers(const RunMembers&) = delete;

  /// Serves StoreOperation::join. Returns whether the rank is new, no value if the request is malformed.
  [[nodiscard]] std::optional<bool> join(const Asker& asker, FrameReader& in) {
    const auto rank = in.value<int>(), size = in.value<int>();
    const auto identity = in.value<RankIdentity>();
    const auto stays = in.value<bool>();
    if (!in.whole() || rank < 0 || rank >= size || size > most_ranks) return std::nullopt;
    if (size_ == 0) {
      size_ = size;
      sized_by_ = rank;
    }
    Member& member = members_[rank];
    if (!member.identity && size == size_) member.identity = identity;
    out_.reply(asker, encoded(JoinAnswer{member, size_, sized_by_}));
    if (size != size_ || !member.is(identity) || !stays) return false;
    bound_[asker.connection] = rank;
    if (member.exit_code.value_or(0) < 0) {  // it had left, and has come back
      member.exit_code.reset();
      --ended_;
    }
    // Another World of this process may have joined; the process counts once.
    if (!all_.here.try_emplace(rank).second) return false;
    if (all_.here.size() == static_cast<std::size_t>(size_)) complete();
    return true;
  }
  /// Serves StoreOperation::meet. Returns false if it is malformed, or is not of a rank that has joined.
  [[nodiscard]] bool meet(const Asker& asker, FrameReader& in) {
    const std::string name(in.text());
    const auto ranks = in.value<std::vector<int>>();
    const auto lasts = in.value<bool>();
    const auto bound = bound_.find(asker.connection);
    if (!in.whole() || (bound == bound_.end() && !name.empty())) return false;
    if (name.size() > max_key_bytes || ranks.size() > most_ranks || meetings_.size() >= max_meetings)
      return false;
    if (made_.contains(name)) {  // a rank whose wait ended too early asks again
      out_.reply(asker, encoded(Meeting{}));
      return true;
    }
    Gathering& gathering = meetings_.try_emplace(name, Gathering{ranks, lasts}).first->second;
    if (bound == bound_.end())  // of a rank that has joined to tell its failure alone
      visitors_.push_back(asker);
    else
      gathering.here[bound->second][asker.connection].push_back(asker.id);
    // The ranks are looked through where that may tell something new: each of very many comes.
    const bool ended = std::exchange(gathering.ends_seen, order_) < order_;
    if (!ended && !gathering.end && gathering.here.size() < number_of(gathering)) return true;
    const Meeting found = meeting_of(gathering);
    if (!found.over()) return true;
    gathering.ends_seen = 0;
    tell(gathering, found);
    if (found.missing == 0 && gathering.lasts && &gathering != &all_) keep_made(name);
    forget_empty();
    return true;
  }
  /// Serves StoreOperation::members. Returns false if it is malformed, or its answer too large.
  [[nodiscard]] bool describe(const Asker& asker, FrameReader& in) {
    const auto ranks = in.value<std::vector<int>>();
    if (ranks.size() > most_ranks) return false;
    std::vector<KnownRank> known;
    if (ranks.empty())
      for (const auto& [rank, one] : members_) known.push_back(one);
    for (const int rank : ranks) {
      const auto found = members_.find(rank);
      known.push_back(found == members_.end() ? KnownRank{} : found->second);
    }
    const std::string bytes = encoded(known);
    if (!in.whole() || bytes.size() > max_frame_bytes) return false;
    out_.reply(asker, bytes);
    return true;
  }

  /// Forgets a request that waits in a meeting.
  void cancel(const Asker& asker) { forget(asker.connection, asker.id); }
  /// A rank gives up a connection in good order: with its last one it takes no further part in the run.
  void leave(std::uint64_t connection) {
    forget(connection);
    const auto left = bound_.extract(connection);
    if (left.empty()) return;
    const auto is_its = [&](const auto& other) { return other.second == left.mapped(); };
    if (std::none_of(bound_.begin(), bound_.end(), is_its)) end(left.mapped(), -1);
  }
  /// A connection has closed. Returns its rank if that may have died without another rank to notice it.
  [[nodiscard]] std::optional<int> close(std::uint64_t connection) {
    forget(connection);
    const auto bound = bound_.extract(connection);
    if (bound.empty()) return std::nullopt;
    Member& member = members_[bound.mapped()];
    if (member.exit_code) return std::nullopt;
    if (!member.connected) {
      member.lost = true;
      return bound.mapped();
    }
    end(bound.mapped(), -1);
    return std::nullopt;
  }
  /// A rank has ended with `code`, -1 if that is unknown.
  void end(int rank, int code) {
    Member& member = members_[rank];
    bad_end_ = bad_end_ || (code > 0 && code != stopped_exit_code);
    if (!member.exit_code) {
      ++ended_;
      member.order = order_++;
    }
    if (member.exit_code.value_or(-1) < 0) member.exit_code = code;
    for (auto& [name, gathering] : meetings_)
      if (!gathering.here.contains(rank))
        if (const Meeting found = meeting_of(gathering); found.ended == rank) tell(gathering, found);
    forget_empty();
  }
  /// Ends the meeting of all ranks by an event unless it has ended.
  void end_rendezvous(const Event& event) {
    if (meeting().over()) return;
    all_.end = event;
    tell(all_, meeting());
  }

  /// Returns the state of a meeting, without a name of that of all ranks.
  [[nodiscard]] Meeting meeting(const std::string& name = {}) const {
    const auto found = meetings_.find(name);
    return found == meetings_.end() ? Meeting{} : meeting_of(found->second);
  }
  [[nodiscard]] Member& of(int rank) { return members_[rank]; }
  /// Returns whether two ranks that have joined run on one host.
  [[nodiscard]] bool share_host(int a, int b) const {
    const auto one = members_.find(a), other = members_.find(b);
    if (a == b || one == members_.end() || other == members_.end()) return a == b;
    return one->second.identity && other->second.identity &&
           one->second.identity->host == other->second.identity->host;
  }
  /// Returns the exit code of a rank that has ended.
  [[nodiscard]] std::optional<int> exit_code(int rank) const {
    const auto known = members_.find(rank);
    return known == members_.end() ? std::nullopt : known->second.exit_code;
  }
  /// Returns how many ranks have ended.
  [[nodiscard]] std::size_t ended() const { return ended_; }
  /// Returns whether one has ended with the code of a failure.
  [[nodiscard]] bool has_bad_end() const { return bad_end_; }

 private:
  static constexpr std::size_t most_named = 5;

  /// The ranks that a Meeting needs, all of them if there are none, and those that have come: by rank and connection the
  /// requests that wait. Two threads of a rank may wait in one meeting.
  struct Gathering {
    std::vector<int> ranks = {};
    bool lasts = true;  // a rank that waits no longer has come all the same
    std::map<int, std::map<std::uint64_t, std::vector<std::uint64_t>>> here = {};
    std::optional<Event> end = {};
    bool several_hosts = false;
    std::size_t ends_seen = 0;  // how many ranks had ended when the ranks were last looked through
  };

  [[nodiscard]] std::size_t number_of(const Gathering& gathering) const {
    return gathering.ranks.empty() ? static_cast<std::size_t>(std::max(size_, 1)) : gathering.ranks.size();
  }
  [[nodiscard]] Meeting meeting_of(const Gathering& gathering) const {
    Meeting found{.end = gathering.end, .several_hosts = gathering.several_hosts};
    if (!gathering.here.empty()) found.lowest = gathering.here.begin()->first;
    const bool all = gathering.ranks.empty();
    if (all && gathering.here.size() == number_of(gathering)) return found;
    std::size_t first = order_;
    for (std::size_t i = 0; i < number_of(gathering); ++i) {
      const int rank = all ? static_cast<int>(i) : gathering.ranks[i];
      if (gathering.here.contains(rank)) continue;
      if (++found.missing <= most_named) found.first_missing.push_back(rank);
      const auto known = members_.find(rank);
      if (known == members_.end() || !known->second.exit_code || known->second.order >= first) continue;
      first = known->second.order;
      found.ended = rank;
      found.exit_code = *known->second.exit_code;
    }
    return found;
  }
  // Replies to all who wait.
  void tell(Gathering& gathering, const Meeting& found) {
    const std::string state = encoded(found);
    for (auto& [rank, connections] : gathering.here)
      for (auto& [connection, ids] : connections)
        for (const auto id : std::exchange(ids, {})) out_.reply({connection, id}, state);
    if (&gathering == &all_)
      for (const Asker& visitor : std::exchange(visitors_, {})) out_.reply(visitor, state);
    if (!gathering.lasts) gathering.here.clear();
  }
  // All ranks have joined.
  void complete() {
    std::vector<RankIdentity> all;
    for (const auto& [number, one] : members_) all.push_back(one.identity.value_or(RankIdentity{}));
    all_.several_hosts =
        std::any_of(all.begin(), all.end(), [&](const RankIdentity& one) { return one.host != all[0].host; });
    for (const auto& wrong : {repeated_local_rank(all), unconfirmed_local_rank(all)})
      if (!wrong.empty() && !all_.end)
        all_.end = Event{.kind = Event::refused,
                         .failure = {.call = {.operation = detail::rendezvous}, .message = wrong}};
    tell(all_, meeting());
  }
  void keep_made(const std::string& name) {
    meetings_.erase(name);
    made_.insert(name);
    made_in_order_.push_back(name);
    if (made_in_order_.size() <= max_meetings) return;
    made_.erase(made_in_order_.front());
    made_in_order_.pop_front();
  }
  // Forgets a request that waits, or all of a connection that ends: its rank has then not come, but to the meeting of all.
  void forget(std::uint64_t connection, std::optional<std::uint64_t> id = std::nullopt) {
    std::erase_if(visitors_, [&](const Asker& visitor) {
      return visitor.connection == connection && (!id || visitor.id == *id);
    });
    const auto bound = bound_.find(connection);
    if (bound == bound_.end()) return;
    for (auto& [name, gathering] : meetings_) {
      const auto rank = gathering.here.find(bound->second);
      if (rank == gathering.here.end() || !rank->second.contains(connection)) continue;
      auto& ids = rank->second[connection];
      if (id) std::erase(ids, *id);
      if (!id || (ids.empty() && !gathering.lasts)) rank->second.erase(connection);
      if (rank->second.empty() && &gathering != &all_) gathering.here.erase(rank);
    }
    forget_empty();
  }
  void forget_empty() {
    std::erase_if(meetings_,
                  [&](const auto& one) { return one.second.here.empty() && &one.second != &all_; });
  }

  Outbox& out_;
  int size_ = 0, sized_by_ = -1;       // the number of ranks, and the rank that has said it first
  std::map<int, Member> members_;      // by rank
  std::size_t ended_ = 0, order_ = 0;  // how many ranks have ended, and have done so in all
  bool bad_end_ = false;
  std::unordered_map<std::uint64_t, int> bound_;         // the ranks of connections
  std::unordered_map<std::string, Gathering> meetings_;  // by name
  Gathering& all_ = meetings_[""];                       // of all ranks
  std::vector<Asker> visitors_;                          // wait in it without a rank
  std::set<std::string> made_;                           // communicators that all members have come to make
  std::deque<std::string> made_in_order_;
};

}  // namespace lockstep::inline v0_1::detail
