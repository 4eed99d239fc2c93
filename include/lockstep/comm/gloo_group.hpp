#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/comm/failure_monitor.hpp"
#include "lockstep/comm/gloo_bytes.hpp"
#include "lockstep/comm/gloo_call.hpp"
#include "lockstep/comm/gloo_devices.hpp"
#include "lockstep/comm/gloo_options.hpp"
#include "lockstep/comm/sigpipe_guard.hpp"
#include "lockstep/detail/process_group_gloo.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// What a GlooComm and its Works share: the process group, the count of its collectives, and its first error.
///
/// LibTorch's ProcessGroupGloo waits in its destructor for whatever is in flight, up to the deadline. So it
/// is destroyed only after every rank has said farewell, and left alone in every other case: the process is
/// about to end then, and its sockets with it.
class GlooGroup {
 public:
  using Clock = std::chrono::steady_clock;

  GlooGroup(const World& world, std::vector<int> ranks, std::string name, const GlooOptions& options)
      : world_(world), options_(checked(options)), status_(std::make_shared<GroupStatus>()) {
    status_->name = std::move(name);
    status_->ranks = std::move(ranks);
    const auto own = std::find(status_->ranks.begin(), status_->ranks.end(), world.rank());
    rank_ = static_cast<int>(own - status_->ranks.begin());
    if (world.size() == 1) {
      store_ = c10::make_intrusive<c10d::HashStore>();
    } else {
      store_ = c10::make_intrusive<c10d::PrefixStore>(status_->name, world.store());
      monitor_ = FailureMonitor::of(world);
      monitor_->add(status_);
      meet();
    }
    process_group_ = connect_gloo(store_, rank_, size(), world, options_);
    lane_ = std::make_shared<BytesLane>(
        [world, rank = rank_, size = size(), own = options_, name = status_->name] {
          // On a connection of its own: the thread of the program may be waiting in the store.
          StorePtr store = c10::make_intrusive<c10d::HashStore>();
          if (world.size() > 1)
            store = c10::make_intrusive<c10d::PrefixStore>(name + "/bytes", world.connect_again());
          return connect_gloo(store, rank, size, world, own);
        });
  }

  ~GlooGroup() {
    leave_monitor();
    if (!process_group_) return;
    // Reachable for ever, so that no tool calls it lost.
    struct Left {
      c10::intrusive_ptr<c10d::ProcessGroupGloo> process_group;
      std::shared_ptr<BytesLane> lane;
      Messages messages;
    };
    static auto* left_behind = new std::vector<Left>();
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    left_behind->push_back({std::move(process_group_), std::move(lane_), std::move(kept_)});
  }
  GlooGroup(const GlooGroup&) = delete;
  GlooGroup& operator=(const GlooGroup&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(status_->ranks.size()); }
  [[nodiscard]] const World& world() const { return world_; }
  [[nodiscard]] const std::string& name() const { return status_->name; }
  [[nodiscard]] const std::vector<int>& ranks() const { return status_->ranks; }
  [[nodiscard]] std::string next_child() { return fmt::format("{}/{}", name(), children_++); }
  [[nodiscard]] const GlooOptions& options() const { return options_; }
  [[nodiscard]] std::chrono::milliseconds deadline() const { return options_.deadline; }
  [[nodiscard]] c10d::ProcessGroupGloo& process_group() { return *process_group_; }
  [[nodiscard]] BytesLane& bytes_lane() { return *lane_; }
  [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_acquire); }

  /// Opens a collective: throws in a rank-zero scope, and the first error again if there was one.
  Call begin(const char* name) {
    Call call = message(name, -1, 0);
    call.sequence = status_->sequence.load(std::memory_order_relaxed) + 1;
    status_->enter(call.sequence, name);
    return call;
  }
  /// Opens a send or recv, which do not count: only two ranks take part.
  Call message(const char* name, int peer, int tag) {
    forbid_in_rank_zero_scope(name);
    if (failed()) rethrow();
    if (!process_group_)
      throw CommunicationError(fmt::format("{} called after shutdown(): make a new communicator", name));
    const Call call{name, 0, peer, tag, Clock::now()};
    if (monitor_ && monitor_->version() != seen_.load(std::memory_order_relaxed)) look(call);
    return call;
  }

  /// Blocks until `work` is complete; throws when it failed, when another rank did, or when `until` has come.
  void await(const Call& call, c10d::Work& work, Clock::time_point until) {
    std::unique_lock lock(work.*WorkInternals::mutex);
    const auto complete = [&] { return work.*WorkInternals::completed; };
    auto suspicious = call.start + std::chrono::seconds(5);
    while (!complete()) {
      const auto now = Clock::now();
      if (now >= until) {
        lock.unlock();
        late(call);
      }
      if ((work.*WorkInternals::changed).wait_until(lock, std::min(until, now + slice), complete)) break;
      if (monitor_ && monitor_->version() != seen_.load(std::memory_order_relaxed)) {
        lock.unlock();
        look(call);
        lock.lock();
      }
      if (now > suspicious && monitor_ && rank_ == 0) {
        lock.unlock();
        compare(call);
        lock.lock();
        suspicious = now + 2 * (now - call.start);
      }
    }
    if (auto cause = work.*WorkInternals::exception) {
      lock.unlock();
      explain(call, cause);
    }
  }

  /// The same for a send or recv, whose wait Gloo ends only by a deadline that breaks the connection, or by
  /// abort.
  void await_message(const Call& call, const c10::intrusive_ptr<c10d::Work>& work, Clock::time_point until) {
    const auto left = [](Clock::time_point end) {
      const auto time = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
      return std::max(time, std::chrono::milliseconds(1));
    };
    if (monitor_ && monitor_->version() != seen_.load(std::memory_order_relaxed)) look(call);
    for (;;) {
      bool arrived = false;
      try {
        std::optional<FailureMonitor::Interruption> by_news;
        if (monitor_) by_news.emplace(*monitor_, work);
        std::optional<Alarm> by_deadline;
        if (until < call.start + deadline()) by_deadline.emplace(until, [&] { work->abort(); });
        arrived = work->wait(left(call.start + deadline()));
      } catch (...) {
        if (Clock::now() >= call.start + deadline()) late(call);
        explain(call, std::current_exception());
      }
      if (arrived) return;
      look(call);
      if (Clock::now() >= until) late(call);
    }
  }

  /// Keeps a message alive whose Work was dropped: Gloo would not send it.
  void keep(c10::intrusive_ptr<c10d::Work> message) noexcept {
    std::lock_guard lock(mutex_);
    kept_.push_back(std::move(message));
  }

  /// Makes every later call throw, and tells the other ranks. Never blocks longer than the store takes to
  /// answer.
  void abort(const std::string& reason) noexcept {
    if (stick(aborted(reason)) && monitor_) monitor_->publish(world_.rank(), reason);
  }
  /// The same while an exception is on its way that the destructors it runs do not know.
  void abort_by_exception() noexcept {
    const char* reason = "an exception, which its own output names, has ended it";
    if (stick(aborted(reason)) && monitor_) monitor_->publish_vague(reason);
  }

  /// Ends the group in good order: completes what is in flight, and says farewell to the other ranks. The
  /// rank that hosts the store leaves last.
  void shutdown() {
    if (!process_group_ || failed()) return;
    const Call call = message("shutdown", -1, 0);
    if (monitor_) monitor_->publish_departure(*status_);
    if (!finish_works(call)) return;
    if (!monitor_) return;
    const bool last_to_leave = world_.hosts_store();
    if (!last_to_leave) leave_monitor();
    if (store_->add("farewells", 1) == size()) store_->set("all gone", std::string("1"));
    if (last_to_leave) await_farewells();
    leave_monitor();
  }

 private:
  using Messages = std::vector<c10::intrusive_ptr<c10d::Work>>;
  struct Ending {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  // How long a waiting thread sleeps before it looks whether another rank has failed.
  static constexpr std::chrono::milliseconds slice{50};
  // How long another rank may take to answer from its monitor before it counts as dead.
  static constexpr std::chrono::milliseconds patience{1500};

  // Waits until every rank has come to make this group.
  void meet() {
    const Call call{"", 0, -1, 0, Clock::now()};
    const auto here = [](int rank) { return fmt::format("here/{}", rank); };
    store_->set(here(rank_), std::string("1"));
    if (store_->add("here", 1) == size()) store_->set("all here", std::string("1"));
    while (!appears("all here", std::min(std::chrono::milliseconds(200), deadline()))) {
      look(call);
      if (Clock::now() < call.start + deadline()) continue;
      std::vector<std::string> missing;
      for (int rank = 0; rank < size(); ++rank)
        if (!store_->check({here(rank)}))
          missing.push_back(std::to_string(ranks()[static_cast<std::size_t>(rank)]));
      throw TimeoutError(fmt::format("rank{} {} not come to make the communicator '{}' after {}",
                                     missing.size() == 1 ? "" : "s", joined(missing), name(),
                                     duration_text(Clock::now() - call.start)));
    }
  }

  // Works that nobody waited for go on: their end is awaited as any other, on a thread that can be left
  // behind.
  bool finish_works(const Call& call) {
    auto ending = std::make_shared<Ending>();
    std::thread([ending, gloo = std::move(process_group_), lane = std::move(lane_), kept = std::move(kept_),
                 deadline = deadline()]() mutable {
      const SigpipeGuard guard;
      for (auto& message : kept) try {
          message->wait(deadline);
        } catch (const std::exception&) {  // its peer has gone without receiving it
        }
      kept.clear();
      gloo.reset();
      lane->close();
      std::lock_guard lock(ending->mutex);
      ending->done = true;
      ending->changed.notify_all();
    }).detach();
    std::unique_lock lock(ending->mutex);
    while (!ending->changed.wait_for(lock, slice, [&] { return ending->done; }))
      if (Clock::now() > call.start + deadline() || (monitor_ && monitor_->failure())) return false;
    return true;
  }

  // Waits until every rank has said farewell, has failed, or does not answer any more.
  void await_farewells() {
    while (!appears("all gone", std::chrono::seconds(2))) {
      if (monitor_->failure()) return;
      const auto alive = monitor_->ask(*status_, patience);
      const auto gone = monitor_->departed(name());
      for (int rank : ranks())
        if (rank != world_.rank() && !alive.contains(rank) && !gone.contains(rank)) return;
    }
  }

  void leave_monitor() {
    if (monitor_) monitor_->remove(status_.get());
    monitor_.reset();
  }

  // Waits for a key, `most` at most.
  bool appears(const char* key, std::chrono::milliseconds most) {
    const auto end = Clock::now() + most;
    try {
      for (auto pause = std::chrono::microseconds(200); !store_->check({key});
           pause = std::min(2 * pause, std::chrono::microseconds(20000))) {
        if (Clock::now() >= end) return false;
        std::this_thread::sleep_for(pause);
      }
    } catch (const c10::DistNetworkError& error) {
      throw CommunicationError(
          fmt::format("the store in which the ranks meet is gone: {}", error.what_without_backtrace()));
    }
    return true;
  }

  // Throws PeerError if another rank has failed, or has left before this call.
  void look(const Call& call) {
    if (!monitor_) return;
    seen_.store(monitor_->version(), std::memory_order_relaxed);
    if (auto failure = monitor_->failure()) {
      if (failure->vague) failure = monitor_->await_failure(std::chrono::milliseconds(500));
      monitor_->notice();
      fail(PeerError(failure->sentence()));
    }
    for (const auto& [rank, position] : monitor_->departed(name()))
      if (rank != world_.rank() && call.peer < 0 && position.sequence < call.sequence)
        fail(CommunicationError(fmt::format("rank {} has left after {} #{}, so {} can never be complete",
                                            rank, position.operation, position.sequence, call.text())));
  }

  // Throws if another rank is in another collective of this number, which no patience can mend.
  void compare(const Call& call) {
    for (const auto& [rank, position] : monitor_->ask(*status_, patience))
      if (position.sequence == call.sequence && position.operation != call.name)
        fail(CommunicationError(
            fmt::format("the ranks disagree on collective #{}: rank {} called {}, but rank {} called {}. "
                        "Every rank must call the "
                        "same collectives in the same order",
                        call.sequence, world_.rank(), call.name, rank, position.operation)));
  }

  // The deadline of this call has passed: names the ranks that have not entered it.
  [[noreturn]] void late(const Call& call) {
    const auto waited = duration_text(Clock::now() - call.start);
    const bool last = Clock::now() >= call.start + deadline();
    look(call);
    std::string text =
        lateness(call, monitor_ ? monitor_->ask(*status_, patience) : std::map<int, Position>(), ranks(),
                 world_.rank(), waited);
    look(call);
    TimeoutError error(text, world_.rank());
    if (last) fail(error);
    throw error;
  }

  // Gloo failed: finds out which rank was the reason.
  [[noreturn]] void explain(const Call& call, const std::exception_ptr& cause) {
    if (failed()) rethrow();
    const std::string words = gloo_words(cause);
    if (monitor_) {
      // A rank that fails or leaves says so before it closes its connections.
      monitor_->await_news(seen_.load(), std::chrono::milliseconds(100));
      look(call);
      std::map<int, Position> alive;
      bool answered = false;
      try {
        alive = monitor_->ask(*status_, patience);
        answered = true;
      } catch (const std::exception&) {  // the store is gone: the monitor knows more in a moment
      }
      look(call);
      for (int rank : ranks()) {
        if (!answered || rank == world_.rank() || alive.contains(rank)) continue;
        const std::string text = fmt::format("it does not answer and has closed its connections ({})", words);
        monitor_->publish(rank, text);
        fail(PeerError(fmt::format("rank {} failed first: {}", rank, text)));
      }
      if (monitor_->await_failure(std::chrono::milliseconds(1000))) look(call);
    }
    fail(CommunicationError(fmt::format("{} failed: {}", call.text(), words)));
  }

  static std::exception_ptr aborted(const std::string& reason) {
    return std::make_exception_ptr(CommunicationError("the communicator was aborted: " + reason));
  }
  template <class E>
  [[noreturn]] void fail(const E& error) {
    stick(std::make_exception_ptr(error));
    throw error;
  }
  // Keeps the first error; true if this is it.
  bool stick(std::exception_ptr error) noexcept {
    std::lock_guard lock(mutex_);
    if (error_) return false;
    error_ = std::move(error);
    failed_.store(true, std::memory_order_release);
    return true;
  }
  [[noreturn]] void rethrow() {
    std::unique_lock lock(mutex_);
    const auto error = error_;
    lock.unlock();
    std::rethrow_exception(error);
  }

  World world_;
  GlooOptions options_;
  std::shared_ptr<GroupStatus> status_;
  int rank_ = 0;
  int children_ = 0;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<FailureMonitor> monitor_;  // none where this process is alone
  c10::intrusive_ptr<c10d::ProcessGroupGloo> process_group_;
  std::shared_ptr<BytesLane> lane_;
  std::atomic<std::uint64_t> seen_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::exception_ptr error_;
  Messages kept_;
};

}  // namespace lockstep::detail
