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
#include "lockstep/comm/detail/timeouts.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/store_keys.hpp"
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
  if (!url.path.empty()) return detail::formatted("the store in the file {}", url.path);
  return detail::formatted("the store at {}:{}{}", url.host, url.port,
                           environment.store_is_hosted ? "" : ", which rank 0 hosts,");
}

/// Returns the text of the timeout error of `call`, which names the late and the silent ranks. `positions`
/// holds the last collective of each rank that answered, by global rank. `waited` is the time already waited.
/// `elsewhere` holds collectives of other communicators that a rank has entered and this rank has not.
inline std::string lateness(const Call& call, const std::map<int, Position>& positions,
                            const std::vector<int>& ranks, int own_rank, const std::string& waited,
                            const std::map<int, Elsewhere>& elsewhere = {}) {
  const auto last = [](const Position& position) {
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

  /// Joins the rendezvous of the group. Blocks until every rank has joined; returns each rank's `identity`, by rank in
  /// the group. Throws TimeoutError, which names the missing ranks, and PeerError if a rank has failed.
  std::vector<std::string> join(const std::string& identity) {
    if (!monitor_) return {identity};
    const Call call = making();
    at_store(call, [rank = rank_, size = size(), identity](c10d::Store& store) {
      store.set(store_keys::joined_rank(rank), identity);
      if (store.add(store_keys::joined, 1) == size) store.set(store_keys::all_joined, std::string("1"));
      return true;
    });
    std::vector<std::string> signs;
    for (int rank = 0; rank < size(); ++rank) signs.push_back(store_keys::joined_rank(rank));
    await_key(call, store_keys::all_joined, signs, [&](const std::vector<std::string>& missing) {
      return detail::formatted("rank{} {} not come to make {} after {}", missing.size() == 1 ? "" : "s",
                               joined(missing), making_text(call), duration_text(Clock::now() - call.start));
    });
    return at_store(call, [size = size()](c10d::Store& store) {
      std::vector<std::string> identities;
      for (int rank = 0; rank < size; ++rank)
        identities.push_back(store.get_to_str(store_keys::joined_rank(rank)));
      return identities;
    });
  }

  /// Records that the transport is connected: from now on the other ranks notice by it when this rank dies.
  /// Until then the server of the store watches this rank's connection.
  void connected() const noexcept {
    if (monitor_ && world_.begin_communicating()) monitor_->publish_connected();
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
    for (const auto& [rank, position] : monitor_->departed(name()))
      if (rank != world_.rank() && !call.peer && position.sequence < call.sequence)
        return peer_error(left_early(rank, position.sequence == 0 ? "no collective" : text_of(position),
                                     world_.rank(), place_of(call)),
                          call);
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
          interval_(std::min<Milliseconds>(std::chrono::seconds(30), membership.heartbeat_ / 4)),
          next_(call.start + std::min<Milliseconds>(std::chrono::seconds(5), interval_)),
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
    using Milliseconds = std::chrono::milliseconds;
    // The key of the store among the ranks.
    static constexpr int store = -1;

    [[nodiscard]] Milliseconds waited() const {
      return std::chrono::floor<Milliseconds>(Clock::now() - call_.start);
    }

    // Returns an error if the store, or a rank that the call needs, has been silent for too long.
    [[nodiscard]] std::exception_ptr find_silent(const Answers& answers) {
      std::map<int, Clock::duration> silent;
      const auto is_silent = [&](int who) {
        const auto known = silent_.find(who);
        silent[who] = known == silent_.end() ? Clock::duration(0) : known->second + gap_;
      };
      if (!answers.store_answers && !answers.store_left) is_silent(store);
      if (answers.conclusive)
        for (const int rank : membership_.silent(call_, answers)) is_silent(rank);
      silent_ = std::move(silent);
      for (const auto& [who, silence] : silent_) {
        if (silence < membership_.heartbeat_) continue;
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
      return nullptr;
    }

    Membership& membership_;
    Call call_;
    std::uint64_t seen_ = 0;
    Milliseconds interval_;
    Clock::time_point next_, next_warning_, asked_{};
    Clock::duration gap_{};                  // between the last two questions
    std::map<int, Clock::duration> silent_;  // the duration of each rank's silence, by global rank
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
    using Milliseconds = std::chrono::milliseconds;
    // Leave time for one question, however late the call is.
    const auto left = [end = call.start + timeout_](Milliseconds least, Milliseconds most) {
      return std::clamp(std::chrono::floor<Milliseconds>(end - Clock::now()), least, most);
    };
    monitor_->report();
    // A rank that fails or leaves says so before it closes its connections.
    if (auto error = look_soon(call, std::chrono::milliseconds(100))) return error;
    const auto answers =
        monitor_->ask(*status_, answer_timeout, left(answer_timeout, std::chrono::seconds(5)));
    if (auto error = look(call)) return error;
    auto late = answers.conclusive ? silent(call, answers) : std::vector<int>();
    // One whose connection to the store has ended before one that is slow to answer.
    std::stable_partition(late.begin(), late.end(), [&](int rank) { return answers.lost.contains(rank); });
    if (!late.empty())
      return blame(call, exit_code_of(call, late[0]) == 0
                             ? ended_early(late[0], world_.rank(), place_of(call))
                             : Failure{.kind = FailureKind::died,
                                       .rank = late[0],
                                       .message = text + " " + waiting_text(world_.rank(), call.failed())});
    if (monitor_->await_failure(left(Milliseconds(100), Milliseconds(1000)))) return look(call);
    return nullptr;
  }

  /// Tells the other ranks that this rank has aborted the group. They throw PeerError in its calls, and go on with
  /// other groups: the exception may be caught.
  void publish_abort(const std::string& text) const noexcept {
    if (monitor_) monitor_->publish_abort(*status_, text);
  }

  /// Runs `work(store)` with the group's keys. Returns its result, or std::nullopt at `until`. Throws PeerError if
  /// another rank has failed and CommunicationError if the store is gone.
  template <class Work>
  auto at_store_until(const Call& call, Clock::time_point until, Work work)
      -> std::optional<decltype(work(std::declval<c10d::Store&>()))> {
    std::optional<decltype(work(std::declval<c10d::Store&>()))> result;
    if (!perform_until(call, until, [&](c10d::Store& store) { result = work(store); })) return std::nullopt;
    return result;
  }
  /// at_store_until() up to the timeout of `call`, at which it throws TimeoutError.
  template <class Work>
  auto at_store(const Call& call, Work work) -> decltype(work(std::declval<c10d::Store&>())) {
    auto result = at_store_until(call, call.start + timeout_, std::move(work));
    if (result) return std::move(*result);
    throw_store_timeout(call);
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
    for (;;) {
      const auto version = monitor_->version();
      const auto gone = monitor_->departed(name());
      std::vector<std::string> staying;
      for (const int rank : ranks())
        if (rank != world_.rank() && !gone.contains(rank)) staying.push_back(std::to_string(rank));
      if (staying.empty() || monitor_->ended(name())) return;
      monitor_->await_news(version, std::chrono::seconds(2));
      if (monitor_->version() == version) {
        const auto answers = monitor_->ask(*status_, answer_timeout, std::chrono::seconds(5));
        if (answers.conclusive && !silent(call, answers).empty()) return;  // the rank has failed
      }
      if (Clock::now() >= call.start + timeout_)
        throw TimeoutError(
            detail::formatted(
                "{} is not complete after {}: rank {} hosts the store and waits for rank{} {} to leave "
                "the communicator '{}'",
                call.text(), duration_text(Clock::now() - call.start), world_.rank(),
                staying.size() == 1 ? "" : "s", joined(staying), name()),
            world_.rank());
    }
  }

  [[nodiscard]] const std::shared_ptr<FailureMonitor>& monitor() const { return monitor_; }

 private:
  // at_store_until() without a result: returns whether `work` has run.
  bool perform_until(const Call& call, Clock::time_point until,
                     const std::function<void(c10d::Store&)>& work) {
    if (!monitor_) {
      work(*store_);
      return true;
    }
    try {
      c10d::PrefixStore group(name(), monitor_->store(until));
      work(group);
      return true;
    } catch (const c10::Error& error) {
      const bool over = Clock::now() >= until;
      // The store may be gone because of a failure that a rank is publishing.
      if (!over) monitor_->await_failure(std::chrono::milliseconds(1500));
      throw_if_failed(call);
      if (over) return false;
      throw CommunicationError(
          detail::formatted("{} fails: {}", store_text(world_.environment()), first_line(error)),
          world_.rank());
    }
  }

  // How long the monitor of another rank may take to answer.
  static constexpr std::chrono::milliseconds answer_timeout{1500};
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
    const auto gone = monitor_->departed(name());
    std::vector<int> silent;
    for (std::size_t i = 0; i < ranks().size(); ++i)
      if (const int rank = ranks()[i]; rank != world_.rank() && !answers.positions.contains(rank) &&
                                       (call.peer ? call.peer == static_cast<int>(i) : !gone.contains(rank)))
        silent.push_back(rank);
    return silent;
  }

  // How long a call waits before its first warning.
  [[nodiscard]] std::chrono::milliseconds first_warning() const {
    return std::clamp<std::chrono::milliseconds>(timeout_ / 2, std::chrono::seconds(5),
                                                 std::chrono::seconds(30));
  }

  // Returns the exit code of a rank that has ended, -1 if it is unknown; nothing if it has not, or the store does not
  // answer.
  std::optional<int> exit_code_of(const Call& call, int rank) {
    const std::string finished = store_keys::finished(rank);
    const auto value = at_store_until(call, soon(), [&](c10d::Store& group) {
      const auto store = static_cast<c10d::PrefixStore&>(group).getUnderlyingStore();
      return store->check({finished}) ? store->get_to_str(finished) : std::string();
    });
    return value ? whole_number(*value) : std::nullopt;
  }

  // Returns the ranks in the group whose sign, `signs[rank]`, is not in the store; std::nullopt if it does not answer.
  std::optional<std::vector<std::size_t>> find_missing(const Call& call,
                                                       const std::vector<std::string>& signs) {
    return at_store_until(call, soon(), [&](c10d::Store& group) {
      std::vector<std::size_t> missing;
      for (std::size_t rank = 0; rank < signs.size(); ++rank)
        if (!group.check({signs[rank]})) missing.push_back(rank);
      return missing;
    });
  }

  // Blocks until a key is in the store. Throws TimeoutError with the text of `late(missing)` at the timeout;
  // `missing` are the ranks without a sign (see find_missing). Throws PeerError if such a rank has ended. The
  // lowest rank that waits logs warnings as a CallWatch does.
  void await_key(const Call& call, const char* key, const std::vector<std::string>& signs,
                 const std::function<std::string(const std::vector<std::string>& missing)>& late) {
    // All waiting ranks together ask the store at most 20'000 times per second.
    const auto interval = std::max<std::chrono::microseconds>(
        std::chrono::milliseconds(500), std::chrono::microseconds(50) * signs.size() * size());
    auto next_look = call.start + interval;
    auto next_warning = call.start + first_warning();
    const auto holds = [&](const std::string& key, Clock::time_point until) {
      const auto wait = [&](c10d::Store& store) { return store.wait({key}), true; };
      return at_store_until(call, until, wait).value_or(false);
    };
    while (!holds(key, std::min({call.start + timeout_, next_look, next_warning}))) {
      throw_if_failed(call);
      const auto now = Clock::now();
      const bool over = now >= call.start + timeout_, warns = now >= next_warning;
      if (over || warns || now >= next_look) {
        const auto missing = find_missing(call, signs);
        std::vector<std::string> names;
        std::size_t lowest = 0;
        for (const std::size_t rank : missing.value_or(std::vector<std::size_t>())) {
          if (rank == lowest) ++lowest;
          names.push_back(std::to_string(ranks()[rank]));
          const auto exit_code = exit_code_of(call, ranks()[rank]);
          // It may have given its sign after the look above, and ended.
          if (!exit_code || holds(signs[rank], Clock::now() + std::chrono::milliseconds(100))) continue;
          if (*exit_code != 0) {  // the rank has published its reason before
            (void)monitor_->await_failure(std::chrono::milliseconds(500));
            throw_if_failed(call);
          }
          std::rethrow_exception(peer_error(ended(call, ranks()[rank], *exit_code), call));
        }
        const int late_alone = names.size() == 1 ? ranks()[(*missing)[0]] : -1;
        if (over || (warns && !(missing && names.empty()))) {
          const std::string text = !missing        ? not_made(call) + silence()
                                   : names.empty() ? not_made(call)
                                                   : late(names);
          if (over)
            throw TimeoutError(Failure{.kind = FailureKind::timed_out,
                                       .rank = world_.rank(),
                                       .cause = late_alone,
                                       .call = place_of(call),
                                       .message = text});
          if (missing ? rank_ == static_cast<int>(lowest) : world_.local_rank() == 0)
            world_.log.all().warning("{} (the timeout is {})", text, duration_text(timeout_));
        }
        if (warns) next_warning = call.start + 2 * (now - call.start);
        next_look = Clock::now() + interval;
      }
    }
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
    if (monitor_->await_failure(std::chrono::milliseconds(500)))
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
    if (monitor_)
      for (const auto& [rank, last] : monitor_->departed(name())) positions[rank] = last;
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
