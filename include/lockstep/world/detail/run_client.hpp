#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/error.hpp"
#include "lockstep/world/detail/event_log.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/rank_identity.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/store_protocol.hpp"

namespace lockstep::detail {

/// The requests about a run (see RunState) over a connection, each with one deadline. They throw StoreError.
class RunClient {
 public:
  using Clock = StoreConnection::Clock;

  /// A request also ends once `over` returns true.
  RunClient(StoreConnection& connection, Clock::time_point until, std::function<bool()> over = nullptr)
      : connection_(connection), until_(until), over_(std::move(over)) {}
  RunClient(StoreConnection& connection, std::chrono::milliseconds timeout)
      : RunClient(connection, Clock::now() + timeout) {}

  /// Joins the run as rank `rank` of `size`, unless another process has that rank or another rank has said another size.
  /// A process that only tells its failure does not stay.
  JoinAnswer join(int rank, int size, const RankIdentity& identity, bool stays) {
    const auto answer = ask<JoinAnswer>(StoreOperation::join, rank, size, identity, stays);
    if (stays) connection_.leave_at_end();
    return answer;
  }
  RunSummary summary() { return ask<RunSummary>(StoreOperation::summary); }
  /// Returns what is known of `ranks`, in their order; of all that anything is known of if there are none.
  std::vector<KnownRank> members(const std::vector<int>& ranks = {}) {
    return ask<std::vector<KnownRank>>(StoreOperation::members, ranks);
  }
  /// Comes to the meeting `name` of `ranks`, of all if there are none; without a name to that of all which join. If it
  /// `waits`, blocks until all have come, or it has ended without that. If the coming `lasts`, it outlasts the end of this
  /// call.
  Meeting meet(const std::string& name, const std::vector<int>& ranks, bool waits, bool lasts) {
    return ask<Meeting>(StoreOperation::meet, name, ranks, waits, lasts);
  }
  /// Returns which of `ranks` have neither left a communicator nor ended.
  std::vector<int> staying(const std::string& group, const std::vector<int>& ranks) {
    return ask<std::vector<int>>(StoreOperation::staying, group, ranks);
  }
  /// Returns what is known of `ranks`, in their order, and asks them to report.
  std::vector<RankReport> reports(const std::string& group, const std::vector<int>& ranks) {
    return ask<std::vector<RankReport>>(StoreOperation::ask, group, ranks);
  }
  /// Adds to the number at a key of the store, 0 at first. Returns the sum.
  std::int64_t add(const std::string& key, std::int64_t amount) {
    return ask<std::int64_t>(StoreOperation::add, key, amount);
  }
  /// Sets a key of the store to `desired` if it has the value `expected`, or none and that is empty. Returns its value.
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) {
    return request(StoreOperation::compare_set, key, expected, desired);
  }
  /// Adds an event. Returns whether it is news.
  bool publish(const Event& event) { return ask<bool>(StoreOperation::publish, event); }

 private:
  template <class... Arguments>
  std::string request(StoreOperation operation, const Arguments&... arguments) {
    return connection_.request(
        operation, until_, [&](FrameWriter& out) { (out.value(arguments), ...); }, over_);
  }
  template <class Reply, class... Arguments>
  Reply ask(StoreOperation operation, const Arguments&... arguments) {
    return decoded<Reply>(request(operation, arguments...));
  }

  StoreConnection& connection_;
  Clock::time_point until_;
  std::function<bool()> over_;
};

}  // namespace lockstep::detail
