#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/detail/group.hpp"
#include "lockstep/comm/detail/group_status.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/control_plane.hpp"
#include "lockstep/world/detail/event_log.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/detail/world_state.hpp"

namespace lockstep::inline v0_1::detail {

/// What a thread learns of the other ranks while it waits for one call: failures, as they are published, and which
/// ranks are late. Not thread-safe.
///
/// After 5 s, and then every 30 s, it asks whether the ranks are in the same collective and still answer; a shorter
/// heartbeat_timeout() shortens these intervals. It logs a warning that names the late ranks after 30 s, or after
/// half the timeout if that is less, but not before 5 s. A rank that is silent for heartbeat_timeout() counts as failed.
class CallWatch {
 public:
  using Clock = Group::Clock;

  CallWatch(Group& group, const Call& call)
      : group_(group),
        call_(call),
        interval_(std::min<Milliseconds>(question_interval, group.heartbeat() / 4)),
        next_(call.start + std::min<Milliseconds>(first_question, interval_)),
        next_warning_(call.start + group.first_warning()) {}

  /// Returns when `look` will next ask the other ranks.
  [[nodiscard]] Clock::time_point next() const { return next_; }

  /// Returns why the call can never complete, null while it still may. Blocks for 1.5 s at most, where it asks the
  /// other ranks.
  [[nodiscard]] std::exception_ptr look() {
    if (!group_.plane()) return nullptr;
    if (const auto version = group_.plane()->version(); version != seen_) {
      seen_ = version;
      if (auto error = group_.obstacle(call_)) return error;
    }
    const auto now = Clock::now();
    if (now < next_) return nullptr;
    // Do not count time in which this process itself was stopped.
    const auto gap = std::min<Clock::duration>(now - asked_, 2 * interval_);
    asked_ = now;
    // The call's remaining time bounds the wait for answers: its timeout asks anew for the late ranks.
    const Answers answers = ask(time_left(Milliseconds(0), answer_timeout));
    if (auto error = find_silent(answers, gap)) return error;
    for (const auto& [rank, code] : answers.exit_codes)  // its process may live on, to host the store
      if (code >= 0 && needs(rank, answers))
        return blame(ended_early(rank, group_.world().rank(), group_.place_of(call_), code));
    if (asked_ >= next_warning_) {
      warn(answers);
      next_warning_ = call_.start + 2 * waited();
    }
    next_ = std::min(next_warning_, std::max(asked_ + interval_, Clock::now()));
    return nullptr;
  }

  /// Returns the error of the call at its timeout: the text names the late ranks and their positions.
  [[nodiscard]] TimeoutError timeout_error() {
    const auto time = waited();
    const Answers answers = group_.plane() ? ask(answer_timeout) : Answers{.store_answers = true};
    auto late = answers.store_answers ? silent(answers) : std::vector<int>();
    for (const auto& [rank, position] : answers.positions)
      if (!call_.peer && rank != group_.world().rank() && position.sequence < call_.sequence)
        late.push_back(rank);
    return group_.timeout_error(call_, lateness_of(time, answers), late);
  }

  /// Returns the reason why the transport ended the call: a PeerError with another rank's failure, or one that
  /// blames a rank that does not answer, which it publishes with `text`; a MismatchError if the ranks have made
  /// different calls. Returns null if every rank answers or the reason is unknown.
  [[nodiscard]] std::exception_ptr cause_of(const std::string& text) {
    if (!group_.plane()) return nullptr;
    group_.plane()->report();
    // A rank that fails or leaves says so before it closes its connections.
    if (auto error = obstacle_soon(2 * look_interval)) return error;
    // Leave time for one question, however late the call is.
    const auto answers = ask(time_left(answer_timeout, longest_answer));
    if (auto error = group_.obstacle(call_)) return error;
    if (auto error = peer_left(answers)) return error;
    auto late = answers.conclusive ? silent(answers) : std::vector<int>();
    // One whose connection to the store has ended before one that is slow to answer.
    std::stable_partition(late.begin(), late.end(), [&](int rank) { return answers.lost.contains(rank); });
    if (late.empty()) return obstacle_soon(time_left(2 * look_interval, 2 * news_timeout));
    const auto ended = answers.exit_codes.find(late[0]);
    const int exit_code = ended == answers.exit_codes.end() ? -1 : ended->second;
    return blame(ended_early(late[0], group_.world().rank(), group_.place_of(call_), exit_code, text));
  }

  /// Blocks on the rank that hosts the store until every rank has left the group or ended. Throws TimeoutError if a
  /// rank that still answers has not left, and MismatchError if the store has found different calls of the ranks.
  void await_departures() {
    const auto& plane = group_.plane();
    if (!plane) return;
    if (!state_of(group_.world()).hosts_store()) return plane->remove(&group_.status());
    const auto end = call_.start + group_.timeout();
    auto next_question = Clock::now() + last_request_timeout;
    for (auto pause = first_retry_pause;; pause = std::min(2 * pause, 2 * look_interval)) {
      const std::vector<int> staying = plane->staying(group_.status(), end);
      if (staying.empty() || group_.ended()) break;
      if (Clock::now() >= next_question) {
        const auto answers = ask(longest_answer);
        if (answers.conclusive && !silent(answers).empty()) return;  // the rank has failed
        next_question = Clock::now() + last_request_timeout;
      }
      if (Clock::now() >= end)
        throw group_.timeout_error(
            call_, staying_text(call_.failed(), waited(), group_.world().rank(), staying, group_.name()),
            staying);
      std::this_thread::sleep_for(pause);
    }
    if (const auto failure = plane->different_ends(group_.status(), true))
      std::rethrow_exception(group_.peer_error(*failure, call_));
  }

 private:
  // The key of the store among the ranks.
  static constexpr int store = -1;

  [[nodiscard]] Milliseconds waited() const {
    return std::chrono::floor<Milliseconds>(Clock::now() - call_.start);
  }
  // Returns the time until the call's timeout, clamped.
  [[nodiscard]] Milliseconds time_left(Milliseconds least, Milliseconds most) const {
    return std::clamp(std::chrono::floor<Milliseconds>(group_.timeout() - (Clock::now() - call_.start)),
                      least, most);
  }
  [[nodiscard]] Answers ask(Milliseconds most) const {
    return group_.plane()->ask(group_.status(), answer_timeout, most);
  }
  // Group::obstacle that waits up to `timeout` for the news of it, which a rank publishes before it ends.
  [[nodiscard]] std::exception_ptr obstacle_soon(Milliseconds timeout) {
    for (const auto end = Clock::now() + timeout;;) {
      const auto version = group_.plane()->version();
      if (auto error = group_.obstacle(call_)) return error;
      const auto left = std::chrono::ceil<Milliseconds>(end - Clock::now());
      if (left <= Milliseconds(0)) return nullptr;
      group_.plane()->await_news(version, left);
    }
  }

  [[nodiscard]] int peer() const { return group_.ranks()[static_cast<std::size_t>(*call_.peer)]; }
  // Returns the error of a message whose peer has left the group in good order, if it has.
  [[nodiscard]] std::exception_ptr peer_left(const Answers& answers) const {
    const auto left = call_.peer ? answers.left.find(peer()) : answers.left.end();
    if (left == answers.left.end()) return nullptr;
    const auto failure = left_early(left->first, left->second, group_.world().rank(), call_.failed());
    return group_.peer_error(failure, call_);
  }
  // Returns whether the call needs a rank: its peer, or all that have not left the group in good order.
  [[nodiscard]] bool needs(int rank, const Answers& answers) const {
    if (rank == group_.world().rank()) return false;
    return call_.peer ? peer() == rank : !answers.left.contains(rank);
  }
  // Returns the ranks that the call needs and that have not answered. One that has left the group in good order needs
  // not answer; obstacle() finds the calls that it has left out.
  [[nodiscard]] std::vector<int> silent(const Answers& answers) const {
    std::vector<int> silent;
    for (const int rank : group_.ranks())
      if (!answers.positions.contains(rank) && needs(rank, answers)) silent.push_back(rank);
    return silent;
  }
  // Returns an error if the store, or a rank that the call needs, has been silent for too long. `gap` is the time
  // between the last two questions.
  [[nodiscard]] std::exception_ptr find_silent(const Answers& answers, Clock::duration gap) {
    std::set<int> all;
    if (!answers.store_answers && !answers.store_left) all.insert(store);
    if (answers.conclusive)
      for (const int rank : silent(answers)) all.insert(rank);
    // What a peer has sent before it left may still be on its way.
    const auto left = peer_left(answers);
    if (left) all.insert(peer());
    const auto found = silence_.add(all, gap, group_.heartbeat());
    if (!found) return nullptr;
    if (found->first == store)
      return std::make_exception_ptr(
          group_.timeout_error(call_, group_.silence(call_, waited(), duration_text(found->second))));
    if (left && found->first == peer()) return left;
    return blame(silent_for(found->second, found->first, call_.failed()));
  }
  // Publishes the failure of another rank and returns the PeerError of the failure that was published first.
  [[nodiscard]] std::exception_ptr blame(const Failure& failure) {
    group_.plane()->publish({.kind = Event::failed, .failure = failure});
    if (group_.plane()->await_failure(news_timeout))
      if (auto error = group_.obstacle(call_)) return error;
    return group_.peer_error(failure, call_);
  }

  // Logs a warning, on the lowest of the ranks that wait for one call; if the store does not answer, on the first
  // rank of each host.
  void warn(const Answers& answers) const {
    const World& world = group_.world();
    const bool lower =
        std::any_of(answers.positions.begin(), answers.positions.end(), [&](const auto& answer) {
          return answer.first < world.rank() && answer.second.sequence >= call_.sequence;
        });
    if (answers.store_answers ? lower && !call_.peer : world.local_rank() != 0) return;
    world.log.all().warning("{} (the timeout is {})", lateness_of(waited(), answers),
                            duration_text(group_.timeout()));
  }
  [[nodiscard]] std::string lateness_of(Milliseconds waited, const Answers& answers) const {
    if (!answers.store_answers) return group_.silence(call_, waited);
    auto positions = answers.positions;
    for (const auto& [rank, last] : answers.left)
      if (!last.operation.empty()) positions[rank] = last;
    return lateness(call_.failed(), positions, group_.ranks(), group_.world().rank(), duration_text(waited),
                    answers.elsewhere);
  }

  Group& group_;
  const Call call_;
  std::uint64_t seen_ = 0;
  Milliseconds interval_;
  Clock::time_point next_, next_warning_, asked_{};
  Silence silence_;
};

}  // namespace lockstep::inline v0_1::detail
