#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/detail/group_status.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/world/detail/call_history.hpp"
#include "lockstep/world/detail/event_log.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/store.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/store_keys.hpp"
#include "lockstep/world/detail/worker.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// The last collective that a rank has entered in a group.
using Position = FailedCall;
/// The operation of a rank that is not in the group, or has not entered a collective.
inline constexpr const char* no_operation = "nothing";

/// The first failure of a run as one rank knows it, after which no collective can complete.
struct KnownFailure : Failure {
  bool store_lost = false;  // the store is gone, so the process that hosts it has ended
};

/// A collective of another group that a rank has entered, and the asking rank, which is in that group, has not.
struct Elsewhere {
  std::string group;
  Position position;
};

/// The positions of the other ranks of a group, as they have reported since they were asked for.
struct Answers {
  bool store_answers = false;          // the store has answered since the question was asked
  bool store_left = false;             // the store's host has left gracefully; the store may be gone
  bool conclusive = false;             // a rank that has not answered had enough time to
  std::map<int, Position> positions;   // by global rank, without the ranks that have not answered
  std::map<int, Elsewhere> elsewhere;  // by global rank
  std::set<int> lost;                  // global ranks whose connection to the store has ended
};

/// Exchanges through the store what a process group cannot carry: failures of ranks, departures from a group,
/// and the position of each rank.
///
/// The server pushes events over the connection that the whole process uses. The monitor's thread takes them, and reports
/// this rank's positions twice a second, and when it is asked to.
///
/// All communicators of a world share one monitor. Thread-safe.
class FailureMonitor {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  /// Why a destructor, which does not see the exception that unwinds the stack, aborts a group.
  static constexpr const char* by_exception = "an exception, which its own output names, has ended it";

  LOCKSTEP_PROCESS_WIDE static std::shared_ptr<FailureMonitor> of(const World& world) {
    const std::lock_guard lock(registry().first);
    const auto connection = world.connection();
    auto& known = registry().second[connection.get()];
    auto monitor = known.lock();
    if (!monitor) {
      monitor = std::make_shared<FailureMonitor>(world.rank(), connection);
      known = monitor;
      failure_hooks.different_calls = [asked = known] {
        const auto asking = asked.lock();
        return asking ? asking->different_calls() : std::string();
      };
    }
    return monitor;
  }

  /// Subscribes rank `rank` of the run.
  FailureMonitor(int rank, std::shared_ptr<StoreConnection> connection)
      : rank_(rank), connection_(std::move(connection)) {
    connection_->post(StoreOperation::subscribe,
                      [&](FrameWriter& out) { out.integer(static_cast<std::uint64_t>(rank)); });
    thread_ = std::thread([this] { listen(); });
  }
  ~FailureMonitor() {
    if (getpid() != owner_) {  // the thread runs in the parent alone
      thread_.detach();
      return;
    }
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      messages_.clear();
      changed_.notify_all();
    }
    connection_->wake();
    thread_.join();
    const std::lock_guard lock(registry().first);  // another monitor may have subscribed since
    if (registry().second[connection_.get()].expired())
      connection_->post(StoreOperation::subscribe, [](FrameWriter& out) { out.integer(~std::uint64_t{0}); });
  }
  FailureMonitor(const FailureMonitor&) = delete;
  FailureMonitor& operator=(const FailureMonitor&) = delete;

  /// Returns a number that grows with each failure and each departure. Costs one atomic read.
  [[nodiscard]] std::uint64_t version() const noexcept { return version_.load(std::memory_order_acquire); }

  [[nodiscard]] std::optional<KnownFailure> failure() const {
    std::lock_guard lock(mutex_);
    return failure_;
  }

  /// Records that the program knows of the failure. The monitor ends a process that has not called this
  /// within two seconds of a failure.
  void notice() {
    std::lock_guard lock(mutex_);
    noticed_ = true;
    changed_.notify_all();
  }

  /// Blocks until the version differs from `known`, at most `timeout`.
  void await_news(std::uint64_t known, Milliseconds timeout) const {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, timeout, [&] { return version() != known; });
  }

  /// Blocks until a failure is known, at most `timeout`.
  std::optional<KnownFailure> await_failure(Milliseconds timeout) const {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, timeout, [&] { return failure_.has_value(); });
    return failure_;
  }

  /// Returns why another rank has aborted a group, if one has before a failure of the world. If the rank gave no reason,
  /// looks for the one that it gives for another group within a second, for at most 500 ms.
  [[nodiscard]] std::optional<Failure> aborted(const std::string& group) const {
    std::unique_lock lock(mutex_);
    const auto found = aborted_.find(group);
    if (found == aborted_.end()) return std::nullopt;
    Failure reason = found->second;
    if (!reason.message.empty()) return reason;
    const auto near = [&] {
      const auto other = reasons_.find(reason.rank);
      return other != reasons_.end() && std::abs(other->second.time - reason.time) < 1'000'000'000;
    };
    changed_.wait_for(lock, Milliseconds(500), [&] { return near() || failure_; });
    if (!near() && failure_) return std::nullopt;
    reason.message = near() ? reasons_.at(reason.rank).message : by_exception;
    return reason;
  }
  /// Returns whether no call of a group can complete: another rank has failed, or has aborted the group.
  [[nodiscard]] bool ended(const std::string& group) const {
    std::lock_guard lock(mutex_);
    return failure_ || aborted_.contains(group);
  }

  /// Returns the last positions of the ranks that have left this group gracefully, by global rank.
  [[nodiscard]] std::map<int, Position> departed(const std::string& group) const {
    std::lock_guard lock(mutex_);
    const auto found = departed_.find(group);
    return found == departed_.end() ? std::map<int, Position>() : found->second;
  }

  /// Returns a client of the store each call on which ends at `until`, or once another rank has failed.
  [[nodiscard]] StorePtr store(Clock::time_point until) const {
    const auto left = std::chrono::ceil<Milliseconds>(until - Clock::now());
    return c10::make_intrusive<StoreClient>(connection_, std::max(left, Milliseconds(1)), [this, until] {
      return failed_elsewhere() || Clock::now() >= until;
    });
  }

  /// Publishes an event to every rank, of failures the first. Does not block.
  void publish(const Event& event) noexcept {
    if (!failed_elsewhere())
      connection_->post(StoreOperation::publish, [&](FrameWriter& out) { out.text(event.encode()); });
  }
  /// Announces to the other ranks that this rank has aborted a group.
  void publish_abort(const GroupStatus& group, const std::string& text) noexcept {
    publish({.kind = Event::aborted,
             .rank = rank_,
             .group = group.name,
             .failure = {.rank = rank_, .message = text, .time = monotonic_nanoseconds()}});
  }
  /// Announces to every rank that this rank leaves a group gracefully. Returns false if the store does not answer by
  /// `until`.
  bool publish_departure(const GroupStatus& group, Clock::time_point until) try {
    report();
    const Event event{
        .kind = Event::departed, .rank = rank_, .group = group.name, .position = group.position()};
    connection_->request(
        StoreOperation::publish, until, [&](FrameWriter& out) { out.text(event.encode()); },
        [this] { return failed_elsewhere(); });
    return true;
  } catch (const std::runtime_error&) {
    return Clock::now() < until;  // another rank has failed, or the store is gone
  }
  /// Records in the store that this rank has made a communicator. Does not block.
  void publish_connected() noexcept {
    connection_->post(StoreOperation::set,
                      [&](FrameWriter& out) { out.texts({store_keys::communicates(rank_)}).texts({"1"}); });
  }

  void add(std::shared_ptr<GroupStatus> group) {
    std::lock_guard lock(mutex_);
    groups_.push_back(std::move(group));
    noticed_ = failure_.has_value();  // what the program has caught before is not of this group
  }
  void remove(const GroupStatus* group) noexcept {
    std::lock_guard lock(mutex_);
    std::erase_if(groups_, [&](const auto& known) { return known.get() == group; });
  }

  /// Returns the positions that the other ranks of a group report from now on. Blocks until every rank has reported,
  /// another rank is known to have failed, or `timeout` expires. While reports still arrive, or the store is slow, as on
  /// a machine short of cores, `timeout` extends to `most`.
  [[nodiscard]] Answers ask(const GroupStatus& group, Milliseconds timeout, Milliseconds most) {
    const auto since = Clock::now();
    auto last = since;  // when the last report came
    const auto over = [this] { return failed_elsewhere(); };
    std::size_t reports = 0;
    Answers answers;
    report();
    for (Milliseconds pause(5); !over(); pause = std::min(2 * pause, Milliseconds(100))) try {
        const auto asked = Clock::now();
        const std::string reply = connection_->request(
            StoreOperation::ask, std::max(since + most, asked + Milliseconds(500)),
            [&](FrameWriter& out) {
              for (const int rank : group.ranks) out.integer(static_cast<std::uint64_t>(rank));
            },
            over);
        const auto now = Clock::now();
        FrameReader in(reply);
        std::size_t fresh = 0;
        for (const int rank : group.ranks) {
          const std::uint64_t age = in.integer();
          FrameReader positions(in.text());
          if (age == ~std::uint64_t{0}) answers.lost.insert(rank);
          if (age > static_cast<std::uint64_t>((asked - since) / Milliseconds(1))) continue;
          ++fresh;
          if (rank == rank_)  // shows that the store and this process keep up
            answers.store_answers = true;
          else
            read_positions(positions, group, rank, answers);
        }
        if (std::exchange(reports, fresh) < fresh) last = now;
        answers.conclusive = answers.store_answers && now >= since + timeout && now >= last + trickle;
        if (fresh == group.ranks.size() || answers.conclusive || now >= since + most) break;
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, pause, over);
      } catch (const std::runtime_error&) {  // the store does not answer
        break;
      }
    std::lock_guard lock(mutex_);
    answers.store_left = host_has_left();
    return answers;
  }

  /// Sends the store this rank's positions, and what it compares over the ranks. Does not block.
  void report() noexcept try {
    FrameWriter positions, marks;
    {
      std::lock_guard lock(mutex_);
      for (const auto& group : groups_) {
        write_call(positions.text(group->name), group->position());
        group->write_marks(marks);
      }
    }
    connection_->post(StoreOperation::report,
                      [&](FrameWriter& out) { out.text(positions.payload()).raw(marks.payload()); });
  } catch (const std::exception&) {  // no memory
  }
  /// Returns the text about ranks that have made different calls, empty if the store finds none within 2.5 s: the other
  /// ranks report within half a second.
  [[nodiscard]] std::string different_calls() {
    report();
    const auto failure = await_failure(Milliseconds(2500));
    return failure && failure->kind == FailureKind::mismatch ? failure->message : std::string();
  }

  /// While it lives, aborts the wait for `message` when a failure or departure arrives, and at `due`.
  /// Gloo offers no other way to interrupt that wait.
  class Interruption {
   public:
    Interruption(FailureMonitor& monitor, c10::intrusive_ptr<c10d::Work> message, Clock::time_point due)
        : monitor_(monitor), message_(std::move(message)) {
      {
        std::lock_guard lock(monitor_.mutex_);
        monitor_.messages_[message_.get()] = due;
      }
      if (due > Clock::now() + report_interval) return;  // the thread looks as often
      monitor_.due_soon_ = true;
      monitor_.connection_->wake();
    }
    ~Interruption() {
      std::lock_guard lock(monitor_.mutex_);
      monitor_.messages_.erase(message_.get());
    }
    Interruption(const Interruption&) = delete;
    Interruption& operator=(const Interruption&) = delete;

   private:
    FailureMonitor& monitor_;
    c10::intrusive_ptr<c10d::Work> message_;
  };

 private:
  using Registry = std::pair<std::mutex, std::map<StoreConnection*, std::weak_ptr<FailureMonitor>>>;
  // Never destroyed: a monitor may end with the process.
  LOCKSTEP_PROCESS_WIDE static Registry& registry() {
    static auto* known = new Registry();
    return *known;
  }

  // Reads what report() has written.
  void read_positions(FrameReader& in, const GroupStatus& group, int rank, Answers& answers) const {
    Position& position = answers.positions[rank];
    if (position.operation.empty()) position.operation = no_operation;
    std::lock_guard lock(mutex_);
    while (in.more()) {
      const std::string name(in.text());
      Position there = read_call(in);
      if (name == group.name) {
        position = std::move(there);
        continue;
      }
      for (const auto& known : groups_)
        if (known->name == name && there.sequence > known->mark().first)
          answers.elsewhere.try_emplace(rank, Elsewhere{name, there});
    }
  }

  // The longest pause between the reports of two live ranks that have been asked.
  static constexpr Milliseconds trickle{400};
  static constexpr Milliseconds report_interval{500};

  // True if nothing more can be learned. The store may then disappear at any moment.
  [[nodiscard]] bool failed_elsewhere() const { return failed_elsewhere_.load(); }

  void listen() noexcept {
    const auto over = [&] {
      return stopping_ || failed_elsewhere();
    };  // also called under the connection's lock
    try {
      for (auto until = Clock::now(); !over();) {
        connection_->serve([&](StorePush kind, FrameReader& in) { take(kind, in); }, until,
                           [&] { return over() || due_soon_.exchange(false); });
        report();
        std::lock_guard lock(mutex_);
        until = end_due_messages();
      }
    } catch (const std::exception&) {
      std::unique_lock lock(mutex_);
      if (!stopping_ && !host_has_left())
        note({{.kind = FailureKind::died,
               .rank = 0,
               .message = "has ended, since the store that its process hosts is gone"},
              /*store_lost=*/true});
      while (!over())
        changed_.wait_until(lock, std::min(end_due_messages(), Clock::now() + Milliseconds(50)));
    }
    end_unless_noticed();
  }
  // Ends the waits for messages that are due. Returns when to look again.
  Clock::time_point end_due_messages() {
    auto next = Clock::now() + report_interval;
    for (const auto& [message, due] : messages_) {
      if (Clock::now() >= due) message->abort();
      next = std::min(next, std::max(due, Clock::now() + Milliseconds(20)));
    }
    return next;
  }

  void take(StorePush kind, FrameReader& in) {
    if (kind == StorePush::event) {
      learn(Event::decode(in.rest()));
    } else if (kind == StorePush::question) {
      report();
    } else if (kind == StorePush::calls) {
      const std::string name(in.text());
      std::vector<RecordedCall> calls;
      {
        std::lock_guard lock(mutex_);
        for (const auto& group : groups_)
          if (group->name == name) calls = group->last_calls();
      }
      connection_->post(StoreOperation::calls,
                        [&](FrameWriter& out) { out.text(name).text(RecordedCall::encode(calls)); });
    }
  }

  void learn(const Event& event) {
    std::lock_guard lock(mutex_);
    switch (event.kind) {
      case Event::failed:
        return note({event.failure});
      case Event::aborted:
        if (!event.failure.message.empty()) reasons_[event.rank] = event.failure;
        if (event.rank != rank_ && !failure_) aborted_.try_emplace(event.group, event.failure);
        return announce();
      case Event::departed:
        departed_[event.group][event.rank] = event.position;
        return announce();
      case Event::refused:
        if (rank_ == 0 && refused_.insert(event.failure.message).second)
          Log(rank_).warning("a process that tried to join this run was refused: {}", event.failure.message);
    }
  }

  // Keeps the first failure.
  void note(KnownFailure found) {
    if (!failure_) failure_ = std::move(found);
    failed_elsewhere_ = failure_->rank != rank_ || failure_->kind == FailureKind::mismatch;
    announce();
  }

  void announce() {
    version_.fetch_add(1, std::memory_order_release);
    for (const auto& [message, due] : messages_) message->abort();
    changed_.notify_all();
    connection_->wake();
  }

  // Without a launcher rank 0 hosts the store. The store may disappear once rank 0 has left, gracefully,
  // every group that it shares with this rank.
  [[nodiscard]] bool host_has_left() const {
    return std::all_of(groups_.begin(), groups_.end(), [&](const auto& group) {
      if (std::find(group->ranks.begin(), group->ranks.end(), 0) == group->ranks.end()) return true;
      const auto left = departed_.find(group->name);
      return left != departed_.end() && left->second.contains(0);
    });
  }

  // Ends this process if it has not noticed another rank's failure: a rank busy outside collectives would
  // otherwise outlive the other ranks.
  void end_unless_noticed() {
    std::unique_lock lock(mutex_);
    if (!failed_elsewhere()) return;
    const bool told = changed_.wait_for(lock, std::chrono::seconds(2), [&] { return stopping_ || noticed_; });
    if (!told) fail_process(failure_of(error_of(*failure_, rank_, {})));
  }

  const int rank_;
  const pid_t owner_ = getpid();
  const std::shared_ptr<StoreConnection> connection_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;  // wakes threads that wait for events and answers
  std::atomic<std::uint64_t> version_{0};
  std::atomic<bool> stopping_{false}, failed_elsewhere_{false}, due_soon_{false};
  bool noticed_ = false;
  std::optional<KnownFailure> failure_;
  std::map<std::string, std::map<int, Position>> departed_;
  std::map<std::string, Failure> aborted_;  // groups, by another rank
  std::map<int, Failure> reasons_;          // of the ranks' last aborts
  std::vector<std::shared_ptr<GroupStatus>> groups_;
  std::map<c10d::Work*, Clock::time_point> messages_;
  std::set<std::string> refused_;  // the processes that rank 0 has told about
  std::thread thread_;
};

}  // namespace lockstep::detail
