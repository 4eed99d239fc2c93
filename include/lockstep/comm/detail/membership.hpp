#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/detail/failure_monitor.hpp"
#include "lockstep/comm/detail/own_error.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/store_keys.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// Returns the next number, from 0, of rank `rank`'s counter `what`. The number is equal on every rank if all
/// ranks call this in the same order. The counter is in the store, so all Worlds and shared objects of a
/// process use the same one. Throws the store's exceptions. Thread-safe.
inline std::int64_t next_number(c10d::Store& store, int rank, std::string_view what) {
  return store.add(store_keys::calls_of_rank(what, rank), 1) - 1;
}

/// Returns the store's name for errors: "the store at node1:29500, which rank 0 hosts,".
inline std::string store_text(const Environment& environment) {
  if (environment.store_outlives_attempts) return "the store that rank 0 hosts";
  if (environment.rendezvous.empty()) return "the store";
  const auto url = parse_rendezvous(environment.rendezvous);

  return detail::formatted("the store at {}:{}{}", url.host, url.port,
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
      return detail::formatted("{} is not complete after {}: rank {} is {}", call.text(), waited, rank,
                               last(position->second));
    } else if (position->second.sequence < call.sequence) {
      late.push_back(std::to_string(rank));
      where += detail::formatted("; {}{}", late.size() > 1 ? detail::formatted("rank {} ", rank) : "",
                                 last(position->second));
      if (const auto found = elsewhere.find(rank); other_place.empty() && found != elsewhere.end())
        other_place = detail::formatted(
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
    text = detail::formatted("rank{} {} not entered {} after {}{}", late.size() > 1 ? "s" : "", joined(late),
                             call.text(), waited, where);
  if (!late.empty() && call.served.name)
    text += detail::formatted("; every rank must call {}", call.served.name);
  text += other_place;
  if (!silent.empty())
    text += detail::formatted("{}rank{} {} not reported a position after {} of {}: dead, stopped or cut off",
                              text.empty() ? "" : ". ", silent.size() > 1 ? "s" : "", joined(silent), waited,
                              call.text());
  if (text.empty())
    text = detail::formatted(
        "{} is not complete after {} although every rank has entered it: the network or a rank is too "
        "slow",
        call.text(), waited);
  return text;
}

/// One rank's membership in a group: the exchanges through the store that need no tensor transport, which are
/// rendezvous, positions, failures and graceful departures.
///
/// No function blocks on the store without a bound, even if the store does not answer. A function with a
/// deadline returns or throws at most 2 s after it, `farewell` on the rank that hosts the store at most 10 s.
/// A function without a deadline returns within 2 s, `cause_of` within 10 s.
class Membership {
 public:
  using Clock = std::chrono::steady_clock;

  Membership(const World& world, std::vector<int> ranks, std::string name, std::chrono::milliseconds timeout)
      : world_(world),
        timeout_(timeout),
        heartbeat_(heartbeat_timeout()),
        status_(std::make_shared<GroupStatus>(std::move(name), std::move(ranks))) {
    const auto own = std::find(status_->ranks.begin(), status_->ranks.end(), world.rank());
    rank_ = static_cast<int>(own - status_->ranks.begin());
    if (world.size() == 1) {
      store_ = c10::make_intrusive<c10d::HashStore>();
    } else {
      store_ = c10::make_intrusive<c10d::PrefixStore>(status_->name, world.store());
      monitor_ = FailureMonitor::of(world);
      monitor_->add(status_);
    }
  }
  /// Returns the name of the next communicator over all ranks: "lockstep/comm/3" for the fourth of kind
  /// "comm". Throws as join does.
  static std::string next_name(const World& world, const std::string& kind,
                               std::chrono::milliseconds timeout) {
    const std::string prefix = store_keys::communicators(kind);
    if (world.size() == 1) return prefix + "/0";  // such processes have separate stores
    Membership counting(world, {world.rank()}, prefix, timeout);
    const std::int64_t number = counting.at_store(
        making(), [kind, rank = world.rank()](c10d::Store& store) { return next_number(store, rank, kind); });
    return detail::formatted("{}/{}", prefix, number);
  }

  ~Membership() {
    if (monitor_) monitor_->remove(status_.get());
  }
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(status_->ranks.size()); }
  [[nodiscard]] const World& world() const { return world_; }
  [[nodiscard]] const std::string& name() const { return status_->name; }
  [[nodiscard]] const std::vector<int>& ranks() const { return status_->ranks; }
  /// Returns the Call of a rendezvous: it has no name and no sequence number.
  static Call making() { return {"", 0, {}, 0, Clock::now(), served_call}; }

  /// Counts a collective and makes it this rank's position, which answers to other ranks report.
  std::uint64_t enter(const Call& call, const CallContent& content) {
    return status_->enter(call.name, call.served, content, call.label);
  }
  /// Returns the number of the last collective and the hash of all.
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> mark() const { return status_->mark(); }
  /// Returns the error of ranks that have made different calls, after the store has found the first of them.
  [[nodiscard]] std::exception_ptr mismatch(const Call& call) {
    static_cast<void>(monitor_->different_calls());
    if (auto error = look(call)) return error;
    return std::make_exception_ptr(MismatchError("the ranks have made different calls before " + call.text() +
                                                 "; every rank must make the same, in order"));
  }

  /// Blocks until every rank has come to make the group. Throws TimeoutError, which names the missing ranks, and PeerError
  /// if a rank has failed, or has ended without coming. The lowest rank that waits logs warnings as a CallWatch does.
  void join() {
    if (!monitor_) return;
    const Call call = making();
    auto next_warning = call.start + first_warning();
    // Returns whether all have come.
    const auto together = [&](const std::optional<Meeting>& met) {
      if (!met || (met->missing > 0 && met->ended < 0)) return false;
      if (met->missing == 0) return true;
      // The rank has published its reason before.
      if (met->exit_code != 0) (void)monitor_->await_failure(news_timeout);
      throw_if_failed(call);
      std::rethrow_exception(peer_error(ended(call, met->ended, met->exit_code), call));
    };
    while (!together(meet(call, std::min(call.start + timeout_, next_warning), true))) {
      throw_if_failed(call);
      const auto now = Clock::now();
      const bool over = now >= call.start + timeout_;
      const auto met = meet(call, soon(), false);
      if (together(met)) return;
      std::string text = not_made(call);
      if (met)
        text =
            formatted("rank{} {} {} not come to make {} after {}", met->missing == 1 ? "" : "s",
                      joined(met->first_missing, ", ", " and ",
                             met->missing > met->first_missing.size() ? 4 : met->missing, met->missing),
                      met->missing == 1 ? "has" : "have", making_text(call), duration_text(now - call.start));
      else
        text += silence();
      if (over)
        throw TimeoutError(Failure{.kind = FailureKind::timed_out,
                                   .rank = world_.rank(),
                                   .cause = met && met->missing == 1 ? met->first_missing[0] : -1,
                                   .call = place_of(call),
                                   .message = text});
      if (met ? met->lowest == world_.rank() : world_.local_rank() == 0)
        world_.log.all().warning("{} (the timeout is {})", text, duration_text(timeout_));
      next_warning = call.start + 2 * (now - call.start);
    }
  }

  /// Records that the transport is connected: from now on the other ranks notice by it when this rank dies.
  /// Until then the server of the store watches this rank's connection.
  void connected() const noexcept {
    if (monitor_ && world_.begin_communicating())
      monitor_->publish({.kind = Event::connected, .rank = world_.rank()});
  }

  /// Returns whether the monitor has learned of anything since the last look. Costs one atomic read.
  [[nodiscard]] bool news() const {
    return monitor_ && monitor_->version() != seen_.load(std::memory_order_relaxed);
  }

  /// Returns why `call` can never complete, as far as this rank knows: a PeerError that names a rank that has
  /// failed, or has left before the call. Returns null if it still may.
  [[nodiscard]] std::exception_ptr look(const Call& call) {
    if (!monitor_) return nullptr;
    seen_.store(monitor_->version(), std::memory_order_relaxed);
    if (const auto aborted = monitor_->aborted(name())) return peer_error(*aborted, call);
    if (const auto failure = monitor_->failure()) return peer_error(told(*failure, call), call);
    if (const auto left = monitor_->left_before(name(), place_of(call))) return peer_error(*left, call);
    return nullptr;
  }
  /// look() that waits up to `timeout` for the failure that a rank publishes before it ends.
  [[nodiscard]] std::exception_ptr look_soon(const Call& call, std::chrono::milliseconds timeout) {
    if (!monitor_) return nullptr;
    const auto version = monitor_->version();
    if (auto error = look(call)) return error;
    monitor_->await_news(version, timeout);
    return look(call);
  }

  /// Records that the program knows of another rank's failure. See FailureMonitor::notice.
  void notice() {
    if (monitor_) monitor_->notice();
  }

  /// Watches one call while a thread waits for it. Finds failures of other ranks as they are published. After 5 s, and
  /// then every 30 s, asks whether the ranks are in the same collective and still answer; a shorter heartbeat_timeout()
  /// shortens these intervals. Logs a warning that names the late ranks after 30 s, or after half the timeout if that
  /// is less, but not before 5 s. A rank that is silent for heartbeat_timeout() counts as failed. Not thread-safe.
  class CallWatch {
   public:
    CallWatch(Membership& membership, const Call& call)
        : membership_(membership),
          call_(call),
          interval_(std::min<Milliseconds>(question_interval, membership.heartbeat_ / 4)),
          next_(call.start + std::min<Milliseconds>(first_question, interval_)),
          next_warning_(call.start + membership.first_warning()) {}

    [[nodiscard]] const Call& call() const { return call_; }
    /// Returns when `look` will next ask the other ranks.
    [[nodiscard]] Clock::time_point next() const { return next_; }

    /// Returns why the call can never complete, null while it still may. Blocks for 1.5 s at most, where it asks the other
    /// ranks.
    [[nodiscard]] std::exception_ptr look() {
      if (!membership_.monitor_) return nullptr;
      if (const auto version = membership_.monitor_->version(); version != seen_) {
        seen_ = version;
        if (auto error = membership_.look(call_)) return error;
      }
      if (Clock::now() < next_) return nullptr;
      const auto now = Clock::now();
      // Do not count time in which this process itself was stopped.
      gap_ = std::min<Clock::duration>(now - asked_, 2 * interval_);
      asked_ = now;
      // The call's remaining time bounds the wait for answers: its timeout asks anew for the late ranks.
      const auto left = std::chrono::floor<Milliseconds>(call_.start + membership_.timeout_ - now);
      const Answers answers =
          membership_.monitor_->ask(*membership_.status_, answer_timeout,
                                    std::clamp(left, Milliseconds(0), Milliseconds(answer_timeout)));
      if (auto error = find_silent(answers)) return error;
      if (asked_ >= next_warning_) {
        membership_.warn(call_, answers);
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
        for (const int rank : membership_.silent(call_, answers)) silent.insert(rank);
      const auto found = silence_.add(silent, gap_, membership_.heartbeat_);
      if (!found) return nullptr;
      const auto& [who, silence] = *found;
      const auto time = duration_text(silence);
      if (who == store)
        return std::make_exception_ptr(TimeoutError(
            membership_.lateness_of(call_, waited(), answers) +
                detail::formatted(". It has been silent for {} (LOCKSTEP_HEARTBEAT_TIMEOUT)", time),
            membership_.world_.rank()));
      return membership_.blame(
          call_, {.kind = FailureKind::timed_out,
                  .rank = who,
                  .message = formatted(
                      "it has not answered for {} (LOCKSTEP_HEARTBEAT_TIMEOUT), and others wait for it "
                      "in {}: it is stopped, or its host is cut off",
                      time, call_.text())});
    }

    Membership& membership_;
    Call call_;
    std::uint64_t seen_ = 0;
    Milliseconds interval_;
    Clock::time_point next_, next_warning_, asked_{};
    Clock::duration gap_{};  // between the last two questions
    Silence silence_;
  };

  /// Returns the text of the timeout error of `call`: the late ranks and their positions.
  [[nodiscard]] std::string lateness_of(const Call& call) {
    const auto waited = Clock::now() - call.start;
    Answers answers;
    answers.store_answers = true;
    if (monitor_) answers = monitor_->ask(*status_, answer_timeout, answer_timeout);
    return lateness_of(call, waited, answers);
  }

  /// Returns the reason why the transport ended `call`: a PeerError with another rank's failure, or one that
  /// blames a rank that does not answer, which it publishes with `text`; a MismatchError if the ranks have made
  /// different calls. Returns null if every rank answers or the reason is unknown.
  [[nodiscard]] std::exception_ptr cause_of(const Call& call, const std::string& text) {
    if (!monitor_) return nullptr;
    // Leave time for one question, however late the call is.
    const auto left = [end = call.start + timeout_](Milliseconds least, Milliseconds most) {
      return std::clamp(std::chrono::floor<Milliseconds>(end - Clock::now()), least, most);
    };
    monitor_->report();
    // A rank that fails or leaves says so before it closes its connections.
    if (auto error = look_soon(call, 2 * look_interval)) return error;
    const auto answers = monitor_->ask(*status_, answer_timeout, left(answer_timeout, longest_answer));
    if (auto error = look(call)) return error;
    auto late = answers.conclusive ? silent(call, answers) : std::vector<int>();
    // One whose connection to the store has ended before one that is slow to answer.
    std::stable_partition(late.begin(), late.end(), [&](int rank) { return answers.lost.contains(rank); });
    if (!late.empty())
      return blame(call, answers.exit_codes.contains(late[0]) && answers.exit_codes.at(late[0]) == 0
                             ? ended_early(late[0], world_.rank(), place_of(call))
                             : Failure{.kind = FailureKind::died,
                                       .rank = late[0],
                                       .message = text + " " + waiting_text(world_.rank(), call.failed())});
    if (monitor_->await_failure(left(2 * look_interval, 2 * news_timeout))) return look(call);
    return nullptr;
  }

  /// Tells the other ranks that this rank has aborted the group. They throw PeerError in its calls, and go on with
  /// other groups: the exception may be caught.
  void publish_abort(const std::string& text) const noexcept {
    if (monitor_)
      monitor_->publish(
          {.kind = Event::aborted,
           .rank = world_.rank(),
           .group = name(),
           .failure = {.rank = world_.rank(), .message = text, .time = monotonic_nanoseconds()}});
  }

  /// Runs `work(store)` with the group's keys. Returns its result. Throws PeerError if another rank has failed,
  /// CommunicationError if the store is gone, and TimeoutError at the timeout of `call`.
  template <class Work>
  auto at_store(const Call& call, Work work) -> decltype(work(std::declval<c10d::Store&>())) {
    if (!monitor_) return work(*store_);
    std::optional<decltype(work(std::declval<c10d::Store&>()))> result;
    const auto until = call.start + timeout_;
    const bool answered = ask_until(call, until, [&] {
      c10d::PrefixStore group(name(), monitor_->store(until));
      result = work(group);
    });
    if (!answered) throw_store_timeout(call);
    return std::move(*result);
  }
  /// Throws the TimeoutError of a call that the store has not answered in time.
  [[noreturn]] void throw_store_timeout(const Call& call) const {
    const std::string what = *call.name == '\0'
                                 ? not_made(call)
                                 : detail::formatted("{} is not complete after {}", call.text(),
                                                     duration_text(Clock::now() - call.start));
    throw TimeoutError(what + silence(), world_.rank());
  }

  /// Announces to the other ranks that this rank leaves gracefully.
  void depart(const Call& call) {
    if (monitor_ && !monitor_->publish_departure(*status_, call.start + timeout_)) throw_store_timeout(call);
  }
  /// Blocks on the rank that hosts the store until every rank has left the group or ended. Throws TimeoutError if a rank
  /// that still answers has not left.
  void farewell(const Call& call) {
    if (!monitor_) return;
    if (!world_.hosts_store()) return monitor_->remove(status_.get());
    auto look = Clock::now() + last_request_timeout;
    for (auto pause = std::chrono::milliseconds(1);;
         pause = std::min<Milliseconds>(2 * pause, look_interval)) {
      const std::vector<int> staying = monitor_->staying(*status_, call.start + timeout_);
      if (staying.empty() || monitor_->ended(name())) return throw_mismatch(call);
      if (Clock::now() >= look) {
        const auto answers = monitor_->ask(*status_, answer_timeout, longest_answer);
        if (answers.conclusive && !silent(call, answers).empty()) return;  // the rank has failed
        look = Clock::now() + last_request_timeout;
      }
      if (Clock::now() >= call.start + timeout_)
        throw TimeoutError(
            detail::formatted(
                "{} is not complete after {}: rank {} hosts the store and waits for rank{} {} to leave "
                "the communicator '{}'",
                call.text(), duration_text(Clock::now() - call.start), world_.rank(),
                staying.size() == 1 ? "" : "s", joined(staying, ", ", " and "), name()),
            world_.rank());
      std::this_thread::sleep_for(pause);
    }
  }

  [[nodiscard]] const std::shared_ptr<FailureMonitor>& monitor() const { return monitor_; }

 private:
  // Throws MismatchError if the store has found that the ranks have made different calls.
  void throw_mismatch(const Call& call) const {
    std::optional<Failure> failure = monitor_->failure();
    if (!failure) try {  // it may be on its way
        failure = monitor_->client(soon()).summary().failure;
      } catch (const StoreError&) {  // it has arrived
        failure = monitor_->failure();
      }
    if (failure && failure->kind == FailureKind::mismatch)
      std::rethrow_exception(error_of(*failure, world_.rank(), place_of(call)));
  }
  // Runs `ask`, which ends at `until`. Returns whether it has returned before that. Otherwise throws as at_store.
  bool ask_until(const Call& call, Clock::time_point until, const std::function<void()>& ask) {
    std::string reason;
    try {
      ask();
      return true;
    } catch (const c10::Error& error) {
      reason = first_line(error);
    } catch (const StoreError& error) {
      reason = error.what();
    }
    const bool over = Clock::now() >= until;
    // The store may be gone because of a failure that a rank is publishing.
    if (!over) monitor_->await_failure(answer_timeout);
    throw_if_failed(call);
    if (over) return false;
    throw CommunicationError(formatted("{} fails: {}", store_text(world_.environment()), reason),
                             world_.rank());
  }
  // Comes to the meeting of the group. Returns who has come, or std::nullopt at `until`.
  std::optional<Meeting> meet(const Call& call, Clock::time_point until, bool waits) {
    std::optional<Meeting> met;
    const auto& needed = size() == world_.size() ? std::vector<int>() : ranks();
    static_cast<void>(ask_until(call, until, [&] {
      met = monitor_->client(until).meet(name(), world_.rank(), needed, waits, true);
    }));
    return met;
  }

  static Clock::time_point soon() { return Clock::now() + answer_timeout; }
  // Returns "the communicator 'lockstep/comm/0' in the constructor of Trainer".
  [[nodiscard]] std::string making_text(const Call& call) const {
    return detail::formatted("the communicator '{}'{}", name(),
                             call.served.name ? detail::formatted(" in {}", call.served.name) : "");
  }
  [[nodiscard]] std::string not_made(const Call& call) const {
    return detail::formatted("{} is not made after {}", making_text(call),
                             duration_text(Clock::now() - call.start));
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
    return detail::formatted(
        ": {} does not answer, so nobody knows which rank is late. Its host is stopped or cut off from rank "
        "{}: look there, or at the network between them",
        store_text(world_.environment()), world_.rank());
  }

  // Returns the ranks that `call` needs and that have not answered. One that has left the group in good order needs not
  // answer; look() finds the calls that it has left out.
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

  [[nodiscard]] Failure ended(const Call& call, int rank, int exit_code) const {
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
    if (auto error = look(call)) {
      notice();
      std::rethrow_exception(error);
    }
  }

  // Publishes the failure of another rank and returns the PeerError of the failure that was published first.
  [[nodiscard]] std::exception_ptr blame(const Call& call, const Failure& failure) {
    monitor_->publish({.kind = Event::failed, .failure = failure});
    if (monitor_->await_failure(news_timeout))
      if (auto error = look(call)) return error;
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
    return detail::formatted("{} is not complete after {}", call.text(), time) + silence();
  }

  World world_;
  std::chrono::milliseconds timeout_, heartbeat_;
  std::shared_ptr<GroupStatus> status_;
  int rank_ = 0;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<FailureMonitor> monitor_;  // null in a world of one rank
  std::atomic<std::uint64_t> seen_{0};
};

}  // namespace lockstep::detail
