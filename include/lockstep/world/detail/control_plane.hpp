#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/detail/linkage.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/world/detail/call_history.hpp"
#include "lockstep/world/detail/event_log.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/timeouts.hpp"

namespace lockstep::inline v0_1::detail {

/// This process's side of the control plane: what it knows of the other ranks, and what it tells them.
///
/// The server pushes events over the connection that the whole process uses. A thread takes them, reports this rank's
/// positions twice a second and when it is asked to. All communicators of a world share one
/// ControlPlane. Thread-safe.
class ControlPlane {
 public:
  using Clock = std::chrono::steady_clock;
  /// Ends this process by a failure that the program has not noticed; null without `launch`, where it goes on.
  using End = void (*)(Failure);

  LOCKSTEP_PROCESS_WIDE static std::shared_ptr<ControlPlane> of(
      int rank, const std::shared_ptr<StoreConnection>& connection, End end) {
    const std::lock_guard lock(registry().first);
    auto& known = registry().second[connection.get()];
    auto plane = known.lock();
    if (!plane) known = plane = std::make_shared<ControlPlane>(rank, connection, end);
    return plane;
  }
  /// Returns the failure of ranks that have made different calls if the store finds it within 2.5 s: the other ranks report
  /// within half a second.
  LOCKSTEP_PROCESS_WIDE static std::optional<Failure> different_calls_of_process() {
    for (const auto end = Clock::now() + mismatch_timeout; const auto& plane : of_process())
      if (auto failure = plane->await_mismatch(end)) return failure;
    return std::nullopt;
  }
  /// Returns the failure of ranks whose calls differ from those of this process as it ends, by the departures that it knows.
  /// For a process that outlives `store`.
  LOCKSTEP_PROCESS_WIDE static std::optional<Failure> different_ends_of_process(
      const StoreConnection* store) {
    for (const auto& plane : of_process()) {
      if (plane->connection_.get() != store) continue;
      const std::lock_guard lock(plane->mutex_);
      for (const auto& group : plane->groups_)
        if (auto found = plane->view_.different_end(group->name, group->position(), group->mark().hash);
            found && !group->failed)
          return found;
    }
    return std::nullopt;
  }
  /// Reports to a store for the last time, as this process ends. Returns where it is in the groups that it has not left.
  LOCKSTEP_PROCESS_WIDE static std::vector<RankPosition> last_positions(const StoreConnection* store) {
    std::vector<RankPosition> last;
    for (const auto& plane : of_process())
      if (plane->connection_.get() == store) last = plane->report(/*last=*/true);
    return last;
  }

  /// Subscribes rank `rank` of the run.
  explicit ControlPlane(int rank, std::shared_ptr<StoreConnection> connection, End end = nullptr)
      : rank_(rank), connection_(std::move(connection)), end_(end) {
    connection_->post(StoreOperation::subscribe, rank);
    thread_ = std::thread([this] { listen(); });
  }
  ~ControlPlane() {
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
    // Another one may have subscribed since. It does so again: this one may have taken a failure or an abort that was for it.
    const std::lock_guard lock(registry().first);
    const bool last = registry().second[connection_.get()].expired();
    connection_->post(StoreOperation::subscribe, last ? -1 : rank_);
  }
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  /// Returns a number that grows with each event. Costs one atomic read.
  [[nodiscard]] std::uint64_t version() const noexcept { return version_.load(std::memory_order_acquire); }

  [[nodiscard]] std::optional<KnownFailure> failure() const { return await_failure(Milliseconds(0)); }

  /// Records that the program knows of the failure. Under `launch` a process that has not called this within two seconds
  /// of a failure is ended.
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
    changed_.wait_for(lock, timeout, [&] { return view_.failure.has_value(); });
    return view_.failure;
  }

  /// Returns why another rank has aborted a group, if one has before a failure of the world.
  [[nodiscard]] std::optional<Failure> aborted(const std::string& group) const {
    const std::lock_guard lock(mutex_);
    const auto found = view_.aborted.find(group);
    return found == view_.aborted.end() ? std::nullopt : std::optional(found->second);
  }
  /// Returns whether no call of a group can complete: another rank has failed, or has aborted the group.
  [[nodiscard]] bool ended(const std::string& group) const {
    std::lock_guard lock(mutex_);
    return view_.failure || view_.aborted.contains(group);
  }

  /// See RankView::left_before.
  [[nodiscard]] std::optional<Failure> left_before(const std::string& group, const FailedCall& call) const {
    const std::lock_guard lock(mutex_);
    return view_.left_before(group, call);
  }

  /// Returns a client of the run each call on which ends at `until`, or once another rank has failed.
  [[nodiscard]] RunClient client(Clock::time_point until) const {
    return {*connection_, until, [this] { return failed_elsewhere_.load(); }};
  }

  /// Publishes an event to every rank, of failures the first. Does not block.
  void publish(const Event& event) noexcept {
    if (!failed_elsewhere_) connection_->post(StoreOperation::publish, event);
  }
  /// Announces to every rank that this rank leaves a group gracefully. Returns false if the store has not told the others by
  /// `until`. Without that waits only where this process hosts the store, which may end with it.
  bool publish_departure(const ReportedGroup& group, std::optional<Clock::time_point> until) noexcept {
    if (!until && connection_->hosts_store()) until = Clock::now() + last_request_timeout;
    try {
      report();
      const Event event{.kind = Event::departed,
                        .rank = rank_,
                        .group = group.name,
                        .position = group.position(),
                        .hash = group.mark().hash};
      until ? static_cast<void>(client(*until).publish(event)) : publish(event);
      return true;
    } catch (const std::exception&) {  // another rank has failed, or the store is gone
      return until && Clock::now() < *until;
    }
  }
  /// Returns the failure of ranks whose calls differ, once this one has left a group: as the store knows it, or where that is
  /// gone the ranks that have left before. Waits for the calls that differ if it `waits`.
  [[nodiscard]] std::optional<Failure> different_ends(const ReportedGroup& group, bool waits) const {
    std::optional<Failure> found = failure();
    if (!found) try {
        const RunSummary run = client(Clock::now() + answer_timeout).summary();
        found = run.failure ? run.failure : run.dispute;
        if (run.dispute && waits) found = await_failure(mismatch_timeout);
      } catch (const StoreError&) {
      }
    const std::lock_guard lock(mutex_);
    if (!found) found = view_.different_end(group.name, group.position(), group.mark().hash);
    return found && found->kind == FailureKind::mismatch ? found : std::nullopt;
  }
  /// Returns which of the other ranks have neither left a group nor ended.
  [[nodiscard]] std::vector<int> staying(const ReportedGroup& group, Clock::time_point until) const try {
    const auto reports = client(until).reports(group.name, group.ranks, /*asks=*/false);
    std::vector<int> staying;
    for (std::size_t i = 0; i < std::min(reports.size(), group.ranks.size()); ++i)
      if (group.ranks[i] != rank_ && !reports[i].left && !reports[i].exit_code)
        staying.push_back(group.ranks[i]);
    return staying;
  } catch (const StoreError&) {
    return {};
  }

  void add(std::shared_ptr<ReportedGroup> group) {
    std::lock_guard lock(mutex_);
    groups_.push_back(std::move(group));
    noticed_ = view_.failure.has_value();  // what the program has caught before is not of this group
  }
  void remove(const ReportedGroup* group) noexcept {
    std::lock_guard lock(mutex_);
    std::erase_if(groups_, [&](const auto& known) { return known.get() == group; });
  }

  /// Returns the positions that the other ranks of a group report from now on. Blocks until every rank has reported,
  /// another rank is known to have failed, or `timeout` expires. While reports still arrive, or the store is slow, as on
  /// a machine short of cores, `timeout` extends to `most`.
  [[nodiscard]] Answers ask(const ReportedGroup& group, Milliseconds timeout, Milliseconds most) {
    Question question{group.ranks, rank_, Clock::now(), timeout, most};
    // Called under the lock.
    const auto read = [&](int rank, const std::vector<RankPosition>& positions) {
      FailedCall& position = question.answers.positions[rank];
      if (position.operation.empty()) position.operation = "nothing";
      for (const auto& [name, there] : positions) {
        if (name == group.name) position = there;
        for (const auto& known : groups_)
          if (name != group.name && known->name == name && there.sequence > known->position().sequence)
            question.answers.elsewhere.try_emplace(rank, RankPosition{name, there});
      }
    };
    report();
    for (auto pause = first_retry_pause; !failed_elsewhere_; pause = std::min(2 * pause, 2 * look_interval))
      try {
        const auto asked = Clock::now();
        const auto reply =
            client(std::max(question.begin + most, asked + news_timeout)).reports(group.name, group.ranks);
        std::unique_lock lock(mutex_);
        if (question.take(reply, asked, Clock::now(), read)) break;
        changed_.wait_for(lock, pause, [this] { return failed_elsewhere_.load(); });
      } catch (const StoreError&) {  // the store does not answer
        break;
      }
    std::lock_guard lock(mutex_);
    question.answers.store_left = host_has_left();
    return std::move(question.answers);
  }

  /// Sends the store this rank's positions, and what it compares over the ranks. Returns the positions. Does not block.
  std::vector<RankPosition> report(bool last = false) noexcept try {
    // What one thread has taken is sent before what the next one says.
    const std::lock_guard reporting(reporting_);
    std::vector<RankPosition> positions;
    std::vector<CallMarks> marks;
    {
      std::lock_guard lock(mutex_);
      std::size_t room = 1 << 14;  // calls in one frame
      for (const auto& group : groups_) {
        if (last) group->leave();
        if (!last || !group->failed) positions.push_back({group->name, group->position()});
        if (auto found = group->new_marks()) {
          auto& calls = found->calls;  // of each group in any case the last ones
          const auto most = std::max<std::size_t>(room, mark_interval), told = std::min(most, calls.size());
          calls.erase(calls.begin(), calls.end() - static_cast<std::ptrdiff_t>(told));
          room -= std::min(room, told);
          marks.push_back(std::move(*found));
        }
      }
    }
    connection_->post(StoreOperation::report, positions, marks);
    return positions;
  } catch (const std::exception&) {  // no memory
    return {};
  }
  /// Returns the failure of ranks that have made different calls if the store finds it by `until`.
  std::optional<Failure> await_mismatch(Clock::time_point until = Clock::now() + mismatch_timeout) {
    report();
    const auto failure = await_failure(std::chrono::ceil<Milliseconds>(until - Clock::now()));
    return failure && failure->kind == FailureKind::mismatch ? failure : std::nullopt;
  }

  /// While it lives, calls `abort`, which ends the wait for a message, when a failure or departure arrives, and at `due`.
  /// Gloo offers no other way to interrupt that wait.
  class Interruption {
   public:
    Interruption(ControlPlane& plane, std::function<void()> abort, Clock::time_point due) : plane_(plane) {
      {
        std::lock_guard lock(plane_.mutex_);
        plane_.messages_[this] = {due, std::move(abort)};
      }
      if (due > Clock::now() + report_interval) return;  // the thread looks as often
      plane_.due_soon_ = true;
      plane_.connection_->wake();
    }
    ~Interruption() {
      std::lock_guard lock(plane_.mutex_);
      plane_.messages_.erase(this);
    }
    Interruption(const Interruption&) = delete;
    Interruption& operator=(const Interruption&) = delete;

   private:
    ControlPlane& plane_;
  };

 private:
  using Registry = std::pair<std::mutex, std::map<StoreConnection*, std::weak_ptr<ControlPlane>>>;
  // Never destroyed: a control plane may end with the process.
  LOCKSTEP_PROCESS_WIDE static Registry& registry() {
    static auto* known = new Registry();
    return *known;
  }
  LOCKSTEP_PROCESS_WIDE static std::vector<std::shared_ptr<ControlPlane>> of_process() {
    std::vector<std::shared_ptr<ControlPlane>> planes;
    const std::lock_guard lock(registry().first);
    for (const auto& [connection, plane] : registry().second)
      if (auto known = plane.lock()) planes.push_back(std::move(known));
    return planes;
  }

  void listen() noexcept {
    const auto over = [&] { return stopping_ || failed_elsewhere_; };  // also under the connection's lock
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
      while (!over()) changed_.wait_until(lock, std::min(end_due_messages(), Clock::now() + look_interval));
    }
    end_unless_noticed();
  }
  // Ends the waits for messages that are due. Returns when to look again.
  Clock::time_point end_due_messages() {
    auto next = Clock::now() + report_interval;
    for (const auto& [wait, message] : messages_) {
      if (Clock::now() >= message.due) message.abort();
      next = std::min(next, std::max(message.due, Clock::now() + message_pause));
    }
    return next;
  }

  void take(StorePush kind, FrameReader& in) {
    if (kind == StorePush::event) {
      learn(in.value<Event>());
    } else {
      if (kind == StorePush::calls) {
        const std::string name(in.text());
        std::lock_guard lock(mutex_);
        for (const auto& group : groups_)
          if (group->name == name) group->ask_calls();
      }
      report();
    }
  }

  void learn(const Event& event) {
    std::lock_guard lock(mutex_);
    if (event.kind == Event::failed) return note({event.failure});
    view_.learn(event);
    if (event.kind == Event::aborted || event.kind == Event::departed) announce();
    static std::atomic_flag told;  // each control plane of a process is sent it
    if (event.kind == Event::began && rank_ == 0 && !told.test_and_set())
      Log(rank_).warning("restart {}, after this: {}", event.restart, cause_text(event.failure));
    if (event.kind == Event::refused && rank_ == 0 && refused_.insert(event.failure.message).second)
      Log(rank_).warning("a process that tried to join this run was refused: {}", event.failure.message);
  }

  // Keeps the first failure.
  void note(KnownFailure found) {
    if (!view_.failure) view_.failure = std::move(found);
    failed_elsewhere_ = view_.over();
    announce();
  }

  void announce() {
    version_.fetch_add(1, std::memory_order_release);
    for (const auto& [wait, message] : messages_) message.abort();
    changed_.notify_all();
    connection_->wake();
  }

  // Without a launcher rank 0 hosts the store. The store may disappear once rank 0 has left, gracefully,
  // every group that it shares with this rank.
  [[nodiscard]] bool host_has_left() const {
    return std::all_of(groups_.begin(), groups_.end(), [&](const auto& group) {
      if (std::find(group->ranks.begin(), group->ranks.end(), 0) == group->ranks.end()) return true;
      const auto left = view_.departed.find(group->name);
      return left != view_.departed.end() && left->second.contains(0);
    });
  }

  // Under `launch` ends this process if it has not noticed another rank's failure: a rank busy outside collectives would
  // otherwise outlive the other ranks.
  void end_unless_noticed() {
    std::unique_lock lock(mutex_);
    if (!failed_elsewhere_ || !end_) return;
    const bool told = changed_.wait_for(lock, notice_limit, [&] { return stopping_ || noticed_; });
    if (!told) end_(failure_of(error_of(*view_.failure, rank_, {})));
  }

  const int rank_;
  const pid_t owner_ = getpid();
  const std::shared_ptr<StoreConnection> connection_;
  const End end_;
  std::mutex reporting_;  // locked before mutex_
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;  // wakes threads that wait for events and answers
  std::atomic<std::uint64_t> version_{0};
  std::atomic<bool> stopping_{false}, due_soon_{false};
  std::atomic<bool> failed_elsewhere_{false};  // nothing more can be learned: the store may disappear
  bool noticed_ = false;
  RankView view_{rank_};
  std::vector<std::shared_ptr<ReportedGroup>> groups_;
  struct Message {
    Clock::time_point due;
    std::function<void()> abort;
  };
  std::map<const Interruption*, Message> messages_;
  std::set<std::string> refused_;  // the processes that rank 0 has told about
  std::thread thread_;
};

}  // namespace lockstep::inline v0_1::detail
