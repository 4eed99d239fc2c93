#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/detail/group_status.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/control_plane.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/detail/worker.hpp"
#include "lockstep/world/detail/world_state.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// Returns the store's name for errors: "the store at node1:29500, which rank 0 hosts,".
inline std::string store_text(const Environment& environment) {
  if (environment.store_outlives_attempts) return "the store that rank 0 hosts";
  if (environment.rendezvous.empty()) return "the store";
  const auto url = parse_rendezvous(environment.rendezvous);

  return formatted("the store at {}:{}{}", url.host, url.port,
                   environment.store_is_hosted ? "" : ", which rank 0 hosts,");
}

/// Returns the text of the timeout error of `call`, which names the late and the silent ranks. `positions`
/// holds the last collective of each rank that answered, by global rank. `waited` is the time already waited.
/// `elsewhere` holds collectives of other communicators that a rank has entered and this rank has not.
inline std::string lateness(const Call& call, const std::map<int, FailedCall>& positions,
                            const std::vector<int>& ranks, int own_rank, const std::string& waited,
                            const std::map<int, Elsewhere>& elsewhere = {}) {
  const auto last = [](const FailedCall& position) {
    return position.sequence == 0 ? std::string("at the start") : "last at " + text_of(position);
  };
  std::vector<std::string> late, silent;
  std::string where, other_place;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const int rank = ranks[i];
    if (rank == own_rank || (call.peer && static_cast<int>(i) != call.peer)) continue;
    const auto position = positions.find(rank);
    if (position == positions.end()) {
      silent.push_back(std::to_string(rank));
    } else if (call.peer) {
      return formatted("{} is not complete after {}: rank {} is {}", call.text(), waited, rank,
                       last(position->second));
    } else if (position->second.sequence < call.sequence) {
      late.push_back(std::to_string(rank));
      where +=
          formatted("; {}{}", late.size() > 1 ? formatted("rank {} ", rank) : "", last(position->second));
      if (const auto found = elsewhere.find(rank); other_place.empty() && found != elsewhere.end())
        other_place = formatted(
            ". Rank {} has entered {} in the communicator '{}', and rank {} has not: every rank "
            "must make the calls of all communicators in the same order",
            rank, text_of(found->second.position), found->second.group, own_rank);
    }
  }
  std::string text;
  for (const auto& [rank, position] : positions)
    if (!call.peer && position.sequence == call.sequence) {
      const FailedCall own = call.failed();
      const bool other_call =
          !own.served.empty() && !position.served.empty() && own.served != position.served;
      if (position.operation == own.operation && !other_call) continue;
      const std::string calls = different_calls(own_rank, own, rank, position);
      return formatted(
          "{} is not complete after {}: {}", call.text(), waited,
          calls.empty() ? formatted("rank {} called {} instead", rank, position.operation) : calls);
    }
  if (!late.empty())
    text = formatted("rank{} {} not entered {} after {}{}", late.size() > 1 ? "s" : "", joined(late),
                     call.text(), waited, where);
  if (!late.empty() && call.served.name) text += formatted("; every rank must call {}", call.served.name);
  text += other_place;
  if (!silent.empty())
    text += formatted("{}rank{} {} not reported a position after {} of {}: dead, stopped or cut off",
                      text.empty() ? "" : ". ", silent.size() > 1 ? "s" : "", joined(silent), waited,
                      call.text());
  if (text.empty())
    text = formatted(
        "{} is not complete after {} although every rank has entered it: the network or a rank is too "
        "slow",
        call.text(), waited);
  return text;
}

/// Keeps the first of many errors. Thread-safe.
class StickyError {
 public:
  /// Returns whether there is an error. Costs one atomic read.
  [[nodiscard]] bool set() const noexcept { return set_.load(std::memory_order_acquire); }

  /// Keeps the error if it is the first. Returns whether it is.
  bool keep(std::exception_ptr error) noexcept {
    std::lock_guard lock(mutex_);
    if (error_) return false;
    error_ = std::move(error);
    set_.store(true, std::memory_order_release);
    return true;
  }
  [[nodiscard]] std::exception_ptr get() const noexcept {
    std::lock_guard lock(mutex_);
    return error_;
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> set_{false};
  std::exception_ptr error_;
};

/// The part of a communicator that no transport changes: its members, who has come to make it and who has left, the opening
/// of its calls, its first error, and what it learns of the other ranks while it waits.
///
/// A thread that finds an error stores it, publishes it to the other ranks if they cannot know of it, and only then ends
/// the transport's work, so that no rank sees a consequence before its cause.
///
/// No function blocks on the store without a bound, even if the store does not answer. A function with a deadline returns or
/// throws at most 2 s after it, `farewell` on the rank that hosts the store at most 10 s. A function without a deadline
/// returns within 2 s, `cause_of` within 10 s.
///
/// Thread safety: any thread may call any function, but one thread at a time may begin collectives and create child groups.
class Group {
 public:
  using Clock = std::chrono::steady_clock;

  /// `end_work`, if given, aborts the transport's work in flight once an error is stored. It must be thread-safe and must
  /// not throw. Blocks until every rank of the world has joined.
  Group(const World& world, std::vector<int> ranks, std::string name, std::chrono::milliseconds timeout,
        std::function<void()> end_work = nullptr)
      : world_(world),
        timeout_(timeout),
        heartbeat_(heartbeat_timeout()),
        end_work_(std::move(end_work)),
        status_(std::make_shared<GroupStatus>(std::move(name), std::move(ranks))) {
    const auto own = std::find(status_->ranks.begin(), status_->ranks.end(), world.rank());
    rank_ = static_cast<int>(own - status_->ranks.begin());
    if (world.size() == 1) return;
    WorldState& state = state_of(world);
    state.await_all();
    plane_ = ControlPlane::of(world.rank(), state.connection(), ending_rank.load() ? &fail_process : nullptr);
    plane_->add(status_);
  }
  ~Group() {
    if (plane_) plane_->remove(status_.get());
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  [[nodiscard]] pid_t owner() const { return owner_; }
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(status_->ranks.size()); }
  [[nodiscard]] const World& world() const { return world_; }
  [[nodiscard]] const std::string& name() const { return status_->name; }
  [[nodiscard]] const std::vector<int>& ranks() const { return status_->ranks; }
  [[nodiscard]] std::chrono::milliseconds timeout() const { return timeout_; }
  /// Null in a world of one rank.
  [[nodiscard]] const std::shared_ptr<ControlPlane>& plane() const { return plane_; }

  /// Returns the name of the next communicator over all ranks: "lockstep/comm/3" for the fourth. The number is equal on
  /// every rank if all make their communicators in one order. The store counts them, so that all Worlds and shared objects
  /// of a process count together. Throws as join does.
  static std::string next_name(const World& world, std::chrono::milliseconds timeout) {
    const std::string name = store_keys::communicators;
    if (world.size() == 1) return name + "/0";
    Group counting(world, {world.rank()}, name, timeout);
    const Call call = making();
    const auto number = counting.ask(
        call, [&](RunClient run) { return run.add(store_keys::calls_of_rank("comm", world.rank()), 1); });
    return formatted("{}/{}", name, number - 1);
  }
  /// Returns `ask(run)`, a request to the store. Throws TimeoutError at the timeout of `call`, PeerError if another rank has
  /// failed, and CommunicationError if the store is gone.
  template <class Ask>
  auto ask(const Call& call, Ask&& ask) -> decltype(ask(std::declval<RunClient>())) {
    auto answer = ask_until(call, call.start + timeout_, std::forward<Ask>(ask));
    if (!answer) throw_store_timeout(call);
    return *std::move(answer);
  }
  /// Returns the Call of a rendezvous: it has no name and no sequence number.
  static Call making() { return {"", 0, {}, 0, Clock::now(), served_call}; }

  /// Blocks until every rank has come to make the group. Throws TimeoutError, which names the missing ranks, and PeerError
  /// if a rank has failed, or has ended without coming. The lowest rank that waits logs warnings as a CallWatch does.
  void join() {
    if (!plane_) return;
    const Call call = making();
    const auto needed = size() == world_.size() ? std::vector<int>() : ranks();
    const auto end = call.start + timeout_;
    auto next_warning = call.start + first_warning();
    for (bool waits = true;; waits = !waits) {  // for the others, and then asks who is missing
      const auto now = Clock::now();
      const auto met = ask_until(call, waits ? std::min(end, next_warning) : soon(), [&](RunClient run) {
        return waits ? run.meet(name(), needed, /*lasts=*/true) : run.summary(name()).meeting;
      });
      if (met && met->met()) return;
      // A rank that has ended has published its reason before. The store may have been lost since then.
      if (met && met->ended >= 0) {
        const auto known = plane_->await_failure(met->exit_code != 0 ? news_timeout : Milliseconds(0));
        if (!known || known->store_lost)
          std::rethrow_exception(peer_error(end_of(call, met->ended, met->exit_code), call));
      }
      throw_if_failed(call);
      if (waits) continue;
      std::string text = not_made(call);
      if (met)
        text =
            formatted("{} {} not come to make {} after {}", met->missing_text(),
                      met->missing == 1 ? "has" : "have", making_text(call), duration_text(now - call.start));
      else
        text += silence();
      if (now >= end) throw timeout_error(call, text, met ? met->first_missing : std::vector<int>());
      if (met ? met->lowest == world_.rank() : world_.local_rank() == 0)
        world_.log.all().warning("{} (the timeout is {})", text, duration_text(timeout_));
      next_warning = call.start + 2 * (now - call.start);
    }
  }

  /// Records that the transport is connected: from now on the other ranks notice by it when this rank dies.
  /// Until then the server of the store watches this rank's connection.
  void connected() const noexcept {
    if (plane_ && !state_of(world_).communicates.exchange(true))
      plane_->publish({.kind = Event::connected, .rank = world_.rank()});
  }

  /// Returns whether no call can complete: another rank has failed, or has aborted this group.
  [[nodiscard]] bool ended() const { return plane_ && plane_->ended(name()); }
  /// Returns the number of the last collective and the hash of all.
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> mark() const { return status_->mark(); }
  /// Returns the error of ranks that have made different calls, after the store has found the first of them.
  [[nodiscard]] std::exception_ptr mismatch(const Call& call) {
    static_cast<void>(plane_->await_mismatch());
    if (auto error = obstacle(call)) return error;
    return std::make_exception_ptr(MismatchError("the ranks have made different calls before " + call.text() +
                                                 "; every rank must make the same, in order"));
  }

  /// Begins a collective. Throws inside a rank-zero scope and after close(), rethrows the first error, and
  /// fails the group if the collective can never complete.
  Call begin(const char* name, const CallContent& content = {}) {
    Call call = open(name, std::nullopt, 0);
    call.sequence = status_->enter(call.name, call.served, content, call.label);
    look(call);
    return call;
  }
  /// Begins a send or recv, which has no sequence number.
  Call message(const char* name, std::optional<int> peer, int tag) {
    const Call call = open(name, peer, tag);
    look(call);
    return call;
  }
  /// Labels later calls; null removes the label. Called by the thread that begins calls.
  void label(std::shared_ptr<const std::string> text) { label_ = std::move(text); }
  /// Makes later calls throw CommunicationError, because the group has been shut down.
  void close() { closed_ = true; }
  [[nodiscard]] bool closed() const { return closed_; }

  void check_rank(const char* call, int rank) const {
    if (rank < 0 || rank >= size())
      throw CommunicationError(formatted("{}: there is no rank {} in a group of {}", call, rank, size()),
                               world().rank());
  }
  void check_peer(const char* call, int peer) const {
    check_rank(call, peer);
    if (peer == rank())
      throw CommunicationError(formatted("{}: rank {} cannot send to itself", call, peer), world().rank());
  }

  void check_subgroup(const std::vector<int>& ranks) const {
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      check_rank("new_group", ranks[i]);
      if (i > 0 && ranks[i] <= ranks[i - 1])
        throw CommunicationError("new_group: the ranks must ascend, and none may be named twice",
                                 world().rank());
    }
  }
  [[nodiscard]] std::vector<int> world_ranks(const std::vector<int>& ranks) const {
    std::vector<int> global;
    for (const int rank : ranks) global.push_back(this->ranks().at(static_cast<std::size_t>(rank)));
    return global;
  }
  [[nodiscard]] std::string next_child() { return formatted("{}/{}", name(), children_++); }

  /// Returns whether there is an error. Costs one atomic read.
  [[nodiscard]] bool failed() const noexcept { return error_.set(); }
  [[nodiscard]] std::exception_ptr error() const noexcept { return error_.get(); }
  void check_error() {
    if (failed()) rethrow();
  }
  [[noreturn]] void rethrow() {
    // A first error of this rank's own does not count as noticing a later failure of another rank.
    if (plane_ && plane_->failure()) notice();
    std::rethrow_exception(error_.get());
  }

  /// Stores the error if it is the first and ends the work in flight. `publish` is false for an error that
  /// came from another rank, or that ends only this rank's calls.
  void record(const std::exception_ptr& error, bool publish) noexcept {
    const bool first = error_.keep(error);
    if (first && publish) publish_abort(first_line(error));
    if (first || publish) end_work();
  }
  /// record() on a thread of the program, then throws the first error.
  [[noreturn]] void fail(const std::exception_ptr& error, bool publish) {
    record(error, publish);
    rethrow();
  }

  /// Fails every later call of the group on all ranks, with `reason` or with the error by which it has failed here, and ends
  /// the work in flight. An empty reason is that of an exception. Takes at most 1 s, and the time of `end_work`.
  void abort(const std::string& reason) noexcept {
    const bool first = error_.keep(std::make_exception_ptr(
        CommunicationError("the communicator was aborted: " + (reason.empty() ? by_exception : reason))));
    if (first || !is_of_another_rank(error_.get())) publish_abort(first ? reason : first_line(error_.get()));
    end_work();
  }

  /// Returns why `call` can never complete, as far as this rank knows: a PeerError that names a rank that has
  /// failed, or has left before the call. Returns null if it still may.
  [[nodiscard]] std::exception_ptr obstacle(const Call& call) {
    if (!plane_) return nullptr;
    seen_.store(plane_->version(), std::memory_order_relaxed);
    if (const auto aborted = plane_->aborted(name())) return peer_error(*aborted, call);
    if (const auto failure = plane_->failure()) return peer_error(told(*failure, call), call);
    if (const auto left = plane_->left_before(name(), place_of(call))) return peer_error(*left, call);
    return nullptr;
  }
  /// obstacle() that waits up to `timeout` for the news of it, which a rank publishes before it ends.
  [[nodiscard]] std::exception_ptr obstacle_soon(const Call& call, std::chrono::milliseconds timeout) {
    if (!plane_) return nullptr;
    for (const auto end = Clock::now() + timeout;;) {
      const auto version = plane_->version();
      if (auto error = obstacle(call)) return error;
      const auto left = std::chrono::ceil<Milliseconds>(end - Clock::now());
      if (left <= Milliseconds(0)) return nullptr;
      plane_->await_news(version, left);
    }
  }

  /// Records that the program knows of another rank's failure. See ControlPlane::notice.
  void notice() {
    if (plane_) plane_->notice();
  }

  /// Watches one call while a thread waits for it. Finds failures of other ranks as they are published. After 5 s, and
  /// then every 30 s, asks whether the ranks are in the same collective and still answer; a shorter heartbeat_timeout()
  /// shortens these intervals. Logs a warning that names the late ranks after 30 s, or after half the timeout if that
  /// is less, but not before 5 s. A rank that is silent for heartbeat_timeout() counts as failed. Not thread-safe.
  class CallWatch {
   public:
    CallWatch(Group& group, const Call& call)
        : group_(group),
          call_(call),
          interval_(std::min<Milliseconds>(question_interval, group.heartbeat_ / 4)),
          next_(call.start + std::min<Milliseconds>(first_question, interval_)),
          next_warning_(call.start + group.first_warning()) {}

    [[nodiscard]] const Call& call() const { return call_; }
    /// Returns when `look` will next ask the other ranks.
    [[nodiscard]] Clock::time_point next() const { return next_; }

    /// Returns why the call can never complete, null while it still may. Blocks for 1.5 s at most, where it asks the other
    /// ranks.
    [[nodiscard]] std::exception_ptr look() {
      if (!group_.plane_) return nullptr;
      if (const auto version = group_.plane_->version(); version != seen_) {
        seen_ = version;
        if (auto error = group_.obstacle(call_)) return error;
      }
      if (Clock::now() < next_) return nullptr;
      const auto now = Clock::now();
      // Do not count time in which this process itself was stopped.
      gap_ = std::min<Clock::duration>(now - asked_, 2 * interval_);
      asked_ = now;
      // The call's remaining time bounds the wait for answers: its timeout asks anew for the late ranks.
      const auto left = std::chrono::floor<Milliseconds>(call_.start + group_.timeout_ - now);
      const Answers answers = group_.plane_->ask(
          *group_.status_, answer_timeout, std::clamp(left, Milliseconds(0), Milliseconds(answer_timeout)));
      if (auto error = find_silent(answers)) return error;
      if (asked_ >= next_warning_) {
        group_.warn(call_, answers);
        next_warning_ = call_.start + 2 * waited();
      }
      next_ = std::min(next_warning_, std::max(asked_ + interval_, Clock::now()));
      return nullptr;
    }

   private:
    // The key of the store among the ranks.
    static constexpr int store = -1;

    [[nodiscard]] Milliseconds waited() const {
      return std::chrono::floor<Milliseconds>(Clock::now() - call_.start);
    }

    // Returns an error if the store, or a rank that the call needs, has been silent for too long.
    [[nodiscard]] std::exception_ptr find_silent(const Answers& answers) {
      std::set<int> silent;
      if (!answers.store_answers && !answers.store_left) silent.insert(store);
      if (answers.conclusive)
        for (const int rank : group_.silent(call_, answers)) silent.insert(rank);
      const auto found = silence_.add(silent, gap_, group_.heartbeat_);
      if (!found) return nullptr;
      const auto& [who, silence] = *found;
      const auto time = duration_text(silence);
      if (who == store)
        return std::make_exception_ptr(group_.timeout_error(
            call_, group_.lateness_of(call_, waited(), answers) +
                       formatted(". It has been silent for {} (LOCKSTEP_HEARTBEAT_TIMEOUT)", time)));
      return group_.blame(
          call_, {.kind = FailureKind::timed_out,
                  .rank = who,
                  .message = formatted(
                      "it has not answered for {} (LOCKSTEP_HEARTBEAT_TIMEOUT), and others wait for it "
                      "in {}: it is stopped, or its host is cut off",
                      time, call_.text())});
    }

    Group& group_;
    Call call_;
    std::uint64_t seen_ = 0;
    Milliseconds interval_;
    Clock::time_point next_, next_warning_, asked_{};
    Clock::duration gap_{};  // between the last two questions
    Silence silence_;
  };

  /// Returns the error of `call` at its timeout: the text names the late ranks and their positions.
  [[nodiscard]] TimeoutError timeout_error(const Call& call) {
    const auto waited = Clock::now() - call.start;
    Answers answers;
    answers.store_answers = true;
    if (plane_) answers = plane_->ask(*status_, answer_timeout, answer_timeout);
    auto late = answers.store_answers ? silent(call, answers) : std::vector<int>();
    for (const auto& [rank, position] : answers.positions)
      if (!call.peer && rank != world_.rank() && position.sequence < call.sequence) late.push_back(rank);
    return timeout_error(call, lateness_of(call, waited, answers), late);
  }

  /// Returns the reason why the transport ended `call`: a PeerError with another rank's failure, or one that
  /// blames a rank that does not answer, which it publishes with `text`; a MismatchError if the ranks have made
  /// different calls. Returns null if every rank answers or the reason is unknown.
  [[nodiscard]] std::exception_ptr cause_of(const Call& call, const std::string& text) {
    if (!plane_) return nullptr;
    // Leave time for one question, however late the call is.
    const auto left = [end = call.start + timeout_](Milliseconds least, Milliseconds most) {
      return std::clamp(std::chrono::floor<Milliseconds>(end - Clock::now()), least, most);
    };
    plane_->report();
    // A rank that fails or leaves says so before it closes its connections.
    if (auto error = obstacle_soon(call, 2 * look_interval)) return error;
    const auto answers = plane_->ask(*status_, answer_timeout, left(answer_timeout, longest_answer));
    if (auto error = obstacle(call)) return error;
    auto late = answers.conclusive ? silent(call, answers) : std::vector<int>();
    // One whose connection to the store has ended before one that is slow to answer.
    std::stable_partition(late.begin(), late.end(), [&](int rank) { return answers.lost.contains(rank); });
    if (!late.empty())
      return blame(call, answers.exit_codes.contains(late[0]) && answers.exit_codes.at(late[0]) == 0
                             ? ended_early(late[0], world_.rank(), place_of(call))
                             : Failure{.kind = FailureKind::died,
                                       .rank = late[0],
                                       .message = text + " " + waiting_text(world_.rank(), call.failed())});
    return obstacle_soon(call, left(2 * look_interval, 2 * news_timeout));
  }

  /// Announces to the other ranks that this rank leaves gracefully.
  void depart(const Call& call) {
    if (plane_ && !plane_->publish_departure(*status_, call.start + timeout_)) throw_store_timeout(call);
  }
  /// Blocks on the rank that hosts the store until every rank has left the group or ended. Throws TimeoutError if a rank
  /// that still answers has not left.
  void farewell(const Call& call) {
    if (!plane_) return;
    if (!state_of(world_).hosts_store()) return plane_->remove(status_.get());
    auto look = Clock::now() + last_request_timeout;
    for (auto pause = std::chrono::milliseconds(1);;
         pause = std::min<Milliseconds>(2 * pause, look_interval)) {
      const std::vector<int> staying = plane_->staying(*status_, call.start + timeout_);
      if (staying.empty() || plane_->ended(name())) return throw_mismatch(call);
      if (Clock::now() >= look) {
        const auto answers = plane_->ask(*status_, answer_timeout, longest_answer);
        if (answers.conclusive && !silent(call, answers).empty()) return;  // the rank has failed
        look = Clock::now() + last_request_timeout;
      }
      if (Clock::now() >= call.start + timeout_)
        throw timeout_error(
            call,
            formatted(
                "{} is not complete after {}: rank {} hosts the store and waits for rank{} {} to leave the "
                "communicator '{}'",
                call.text(), duration_text(Clock::now() - call.start), world_.rank(),
                staying.size() == 1 ? "" : "s", joined(staying, ", ", " and "), name()),
            staying);
      std::this_thread::sleep_for(pause);
    }
  }

 private:
  Call open(const char* name, std::optional<int> peer, int tag) {
    forbid_in_rank_zero_scope(name);
    check_error();
    if (closed_)
      throw CommunicationError(formatted("{} called after shutdown(): make a new communicator", name),
                               world().rank());
    return {name, 0, peer, tag, Clock::now(), served_call, label_};
  }

  // The other ranks know of such an error.
  static bool is_of_another_rank(const std::exception_ptr& error) noexcept {
    try {
      std::rethrow_exception(error);
    } catch (const PeerError&) {
      return true;
    } catch (...) {
      return false;
    }
  }
  // Tells the other ranks that this rank has aborted the group. They throw PeerError in its calls, and go on with other
  // groups: the exception may be caught.
  void publish_abort(const std::string& reason) noexcept {
    if (plane_ && !published_.exchange(true))
      plane_->publish(
          {.kind = Event::aborted,
           .rank = world_.rank(),
           .group = name(),
           .failure = {.rank = world_.rank(), .message = reason, .time = monotonic_nanoseconds()}});
  }
  void end_work() noexcept {
    if (end_work_) end_work_();
  }

  // Fails the group if another rank has failed, or has left before this call. Costs one atomic read if neither has
  // happened.
  void look(const Call& call) {
    if (!plane_ || plane_->version() == seen_.load(std::memory_order_relaxed)) return;
    if (auto error = obstacle(call)) fail(error, false);
  }

  // Throws MismatchError if the store has found that the ranks have made different calls.
  void throw_mismatch(const Call& call) const {
    std::optional<Failure> failure = plane_->failure();
    if (!failure) try {  // it may be on its way
        failure = plane_->client(soon()).summary().failure;
      } catch (const StoreError&) {  // it has arrived
        failure = plane_->failure();
      }
    if (failure && failure->kind == FailureKind::mismatch)
      std::rethrow_exception(error_of(*failure, world_.rank(), place_of(call)));
  }
  // Returns `ask(run)`, std::nullopt at `until`. Throws PeerError if another rank has failed, CommunicationError if the
  // store is gone.
  template <class Ask>
  auto ask_until(const Call& call, Clock::time_point until, Ask&& ask)
      -> std::optional<decltype(ask(std::declval<RunClient>()))> {
    std::string reason;
    try {
      return ask(plane_->client(until));
    } catch (const StoreError& error) {
      reason = error.what();
    }
    const bool over = Clock::now() >= until;
    // The store may be gone because of a failure that a rank is publishing.
    if (!over) plane_->await_failure(answer_timeout);
    throw_if_failed(call);
    if (over) return std::nullopt;
    throw CommunicationError(formatted("{} fails: {}", store_text(world_.environment()), reason),
                             world_.rank());
  }
  // Returns the error with `text` of a call that has timed out. `late`: the ranks that it has waited for.
  [[nodiscard]] TimeoutError timeout_error(const Call& call, const std::string& text,
                                           const std::vector<int>& late = {}) const {
    return TimeoutError(Failure{.kind = FailureKind::timed_out,
                                .rank = world_.rank(),
                                .cause = late.size() == 1 ? late[0] : -1,
                                .call = place_of(call),
                                .message = text});
  }
  // Throws the TimeoutError of a call that the store has not answered in time.
  [[noreturn]] void throw_store_timeout(const Call& call) const {
    throw timeout_error(call, (*call.name == '\0' ? not_made(call)
                                                  : formatted("{} is not complete after {}", call.text(),
                                                              duration_text(Clock::now() - call.start))) +
                                  silence());
  }

  static Clock::time_point soon() { return Clock::now() + answer_timeout; }
  // Returns "the communicator 'lockstep/comm/0' in the constructor of Trainer".
  [[nodiscard]] std::string making_text(const Call& call) const {
    return formatted("the communicator '{}'{}", name(),
                     call.served.name ? formatted(" in {}", call.served.name) : "");
  }
  [[nodiscard]] std::string not_made(const Call& call) const {
    return formatted("{} is not made after {}", making_text(call), duration_text(Clock::now() - call.start));
  }
  // Returns where this rank waits: in a collective, or in the rendezvous of this communicator.
  [[nodiscard]] FailedCall place_of(const Call& call) const {
    FailedCall place = call.failed();
    if (*call.name == '\0') {
      place.operation = rendezvous;
      place.label = formatted("communicator '{}'", name());
      place.served = call.served.name ? call.served.name : "";
    }
    return place;
  }
  [[nodiscard]] std::exception_ptr peer_error(const Failure& first, const Call& call) const {
    return error_of(first, world_.rank(), place_of(call));
  }
  // The failure as this rank tells it: the rank that hosts the store cannot say why it has ended.
  [[nodiscard]] Failure told(const KnownFailure& failure, const Call& call) const {
    Failure first = failure;
    if (!failure.store_lost) return first;
    const auto& environment = world_.environment();
    const bool rank_hosts = !environment.store_is_hosted || environment.store_outlives_attempts;
    first.message = formatted("{}{}", rank_hosts ? "has ended, and the store with it, " : first.message + " ",
                              waiting_text(world_.rank(), place_of(call)));
    return first;
  }
  [[nodiscard]] std::string silence() const {
    return formatted(
        ": {} does not answer, so nobody knows which rank is late. Its host is stopped or cut off from rank "
        "{}: look there, or at the network between them",
        store_text(world_.environment()), world_.rank());
  }

  // Returns the ranks that `call` needs and that have not answered. One that has left the group in good order needs not
  // answer; obstacle() finds the calls that it has left out.
  [[nodiscard]] std::vector<int> silent(const Call& call, const Answers& answers) const {
    std::vector<int> silent;
    for (std::size_t i = 0; i < ranks().size(); ++i)
      if (const int rank = ranks()[i];
          rank != world_.rank() && !answers.positions.contains(rank) &&
          (call.peer ? call.peer == static_cast<int>(i) : !answers.left.contains(rank)))
        silent.push_back(rank);
    return silent;
  }

  // How long a call waits before its first warning.
  [[nodiscard]] std::chrono::milliseconds first_warning() const {
    return std::clamp<Milliseconds>(timeout_ / 2, least_warning, most_warning);
  }

  [[nodiscard]] Failure end_of(const Call& call, int rank, int exit_code) const {
    const FailedCall place = place_of(call);
    if (exit_code == 0) return ended_early(rank, world_.rank(), place);
    return {.kind = FailureKind::died,
            .rank = rank,
            .code = exit_code,
            .message =
                formatted("has ended{} {}", exit_code < 0 ? "" : formatted(" with exit code {}", exit_code),
                          waiting_text(world_.rank(), place))};
  }

  void throw_if_failed(const Call& call) {
    if (auto error = obstacle(call)) {
      notice();
      std::rethrow_exception(error);
    }
  }

  // Publishes the failure of another rank and returns the PeerError of the failure that was published first.
  [[nodiscard]] std::exception_ptr blame(const Call& call, const Failure& failure) {
    plane_->publish({.kind = Event::failed, .failure = failure});
    if (plane_->await_failure(news_timeout))
      if (auto error = obstacle(call)) return error;
    return peer_error(failure, call);
  }

  // Logs a warning, on the lowest of the ranks that wait for one call; if the store does not answer, on the first rank of
  // each host.
  void warn(const Call& call, const Answers& answers) const {
    const bool lower =
        std::any_of(answers.positions.begin(), answers.positions.end(), [&](const auto& answer) {
          return answer.first < world_.rank() && answer.second.sequence >= call.sequence;
        });
    if (answers.store_answers ? lower && !call.peer : world_.local_rank() != 0) return;
    world_.log.all().warning("{} (the timeout is {})", lateness_of(call, Clock::now() - call.start, answers),
                             duration_text(timeout_));
  }

  [[nodiscard]] std::string lateness_of(const Call& call, Clock::duration waited,
                                        const Answers& answers) const {
    const auto time = duration_text(waited);
    auto positions = answers.positions;
    for (const auto& [rank, last] : answers.left) positions[rank] = last;
    if (answers.store_answers)
      return lateness(call, positions, ranks(), world_.rank(), time, answers.elsewhere);
    return formatted("{} is not complete after {}", call.text(), time) + silence();
  }

  World world_;
  const std::chrono::milliseconds timeout_, heartbeat_;
  const std::function<void()> end_work_;
  std::shared_ptr<GroupStatus> status_;
  int rank_ = 0, children_ = 0;
  std::shared_ptr<ControlPlane> plane_;  // null in a world of one rank
  std::atomic<std::uint64_t> seen_{0};
  std::shared_ptr<const std::string> label_;
  std::atomic<bool> closed_{false}, published_{false};
  StickyError error_;
  const pid_t owner_ = getpid();
};

/// Returns the ranks of a world of `size` ranks: 0, 1, and so on.
inline std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// Ends a communicator's use of its group, if it has one: aborts the group if it has failed, or during the unwinding of an
/// exception that was thrown after the communicator was constructed, else shuts it down. `exceptions` is the value of
/// std::uncaught_exceptions() at the construction.
template <class Group>
void leave_group(std::shared_ptr<Group>& group, int exceptions) noexcept {
  if (!group) return;
  if (getpid() != group->state().owner()) {
    static_cast<void>(new std::shared_ptr<Group>(std::move(group)));  // its threads run in the parent alone
  } else if (group->state().failed() || std::uncaught_exceptions() > exceptions) {
    group->state().abort("");  // a destructor does not see the exception that unwinds the stack
  } else {
    try {
      group->shutdown();
    } catch (const std::exception& error) {
      if (dynamic_cast<const MismatchError*>(&error) && !ending_rank.load())  // else `launch` says so
        group->state().world().log.all().error("{}", error.what());
      group->state().abort(error.what());
    }
  }
  group.reset();
}

}  // namespace lockstep::detail
