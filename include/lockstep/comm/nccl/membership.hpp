#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/failure_monitor.hpp"
#include "lockstep/comm/nccl/words.hpp"
#include "lockstep/comm/own_error.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// What the ranks of a group know of each other beside what carries their tensors, through the store: that
/// all have come, how far each is, that one has failed, that one has left in good order.
///
/// Errors are returned, not thrown, so that a thread of the communicator's own can find them for the program.
/// Thread safety: every function may be called from any thread, except meet and farewell.
class Membership {
 public:
  using Clock = std::chrono::steady_clock;

  Membership(const World& world, std::vector<int> ranks, std::string name, std::chrono::milliseconds deadline)
      : world_(world), deadline_(deadline), status_(std::make_shared<GroupStatus>()) {
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
    }
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
  [[nodiscard]] c10d::Store& store() const { return *store_; }

  /// Counts a collective, and says of it when another rank asks.
  std::uint64_t enter(const char* name) {
    const std::uint64_t sequence = status_->sequence.load(std::memory_order_relaxed) + 1;
    status_->enter(sequence, name);
    return sequence;
  }

  /// Waits until every rank has come, and returns what each said of itself, by rank in the group. Throws
  /// TimeoutError naming those that have not come when the deadline passes, PeerError when one has failed.
  std::vector<std::string> meet(const std::string& card) {
    const Call call{"", 0, -1, 0, Clock::now()};
    const auto here = [](int rank) { return fmt::format("here/{}", rank); };
    store_->set(here(rank_), card);
    if (store_->add("here", 1) == size()) store_->set("all here", std::string("1"));
    await_key(call, "all here", [&] {
      std::vector<std::string> missing;
      for (int rank = 0; rank < size(); ++rank)
        if (!store_->check({here(rank)}))
          missing.push_back(std::to_string(ranks()[static_cast<std::size_t>(rank)]));
      return fmt::format("rank{} {} not come to make the communicator '{}' after {}",
                         missing.size() == 1 ? "" : "s", joined(missing), name(),
                         duration_text(Clock::now() - call.start));
    });
    std::vector<std::string> cards;
    for (int rank = 0; rank < size(); ++rank) cards.push_back(store_->get_to_str(here(rank)));
    return cards;
  }

  /// The text that rank 0 of the group makes, on every rank. Throws as meet does.
  template <class Make>
  std::string from_first(const char* key, Make&& make) {
    if (rank_ == 0) {
      std::string text = make();
      store_->set(key, text);
      return text;
    }
    await_key({"", 0, -1, 0, Clock::now()}, key, [&] {
      return fmt::format("rank {} has not given the communicator '{}' its {}", ranks()[0], name(), key);
    });
    return store_->get_to_str(key);
  }

  /// Whether anything was heard that nobody has looked at yet. Costs one atomic read.
  [[nodiscard]] bool news() const {
    return monitor_ && monitor_->version() != seen_.load(std::memory_order_relaxed);
  }

  /// Why `call` can never be complete, as far as the others have said: a PeerError, a CommunicationError
  /// where one has left before it, or nothing.
  [[nodiscard]] std::exception_ptr look(const Call& call) {
    if (!monitor_) return nullptr;
    seen_.store(monitor_->version(), std::memory_order_relaxed);
    if (auto failure = monitor_->failure()) {
      if (failure->vague) failure = monitor_->await_failure(std::chrono::milliseconds(500));
      return std::make_exception_ptr(PeerError(failure->sentence(), world_.rank()));
    }
    for (const auto& [rank, position] : monitor_->departed(name()))
      if (rank != world_.rank() && call.peer < 0 && position.sequence < call.sequence)
        return std::make_exception_ptr(
            CommunicationError(fmt::format("rank {} has left after {} #{}, so {} can never be complete", rank,
                                           position.operation, position.sequence, call.text()),
                               world_.rank()));
    return nullptr;
  }
  /// The same, with a moment's patience for what a rank that fails says before it goes.
  [[nodiscard]] std::exception_ptr look_soon(const Call& call, std::chrono::milliseconds patience) {
    if (!monitor_) return nullptr;
    if (auto error = look(call)) return error;
    monitor_->await_news(seen_.load(), patience);
    return look(call);
  }

  /// Says that the program has been told of another rank's failure: see FailureMonitor::notice.
  void notice() {
    if (monitor_) monitor_->notice();
  }

  /// Whether another rank is in another collective of this number, which no patience can mend.
  [[nodiscard]] std::exception_ptr compare(const Call& call) {
    if (!monitor_) return nullptr;
    for (const auto& [rank, position] : monitor_->ask(*status_, patience))
      if (position.sequence == call.sequence && position.operation != call.name)
        return std::make_exception_ptr(CommunicationError(
            fmt::format("the ranks disagree on collective #{}: rank {} called {}, but rank {} called {}. "
                        "Every rank must call the same collectives in the same order",
                        call.sequence, world_.rank(), call.name, rank, position.operation),
            world_.rank()));
    return nullptr;
  }

  /// What to say when `call` is not complete although its time has passed: who is late, and where it is.
  [[nodiscard]] std::string lateness_of(const Call& call) {
    const auto waited = duration_text(Clock::now() - call.start);
    return lateness(call, monitor_ ? monitor_->ask(*status_, patience) : std::map<int, Position>(), ranks(),
                    world_.rank(), waited);
  }

  /// The global rank of one that does not answer any more, or -1.
  [[nodiscard]] int silent_rank() {
    if (!monitor_) return -1;
    const auto alive = monitor_->ask(*status_, patience);
    for (int rank : ranks())
      if (rank != world_.rank() && !alive.contains(rank)) return rank;
    return -1;
  }

  /// Tells every rank that `rank` has failed and why; the form without a rank that this one has.
  void publish(int rank, const std::string& text) const noexcept {
    if (monitor_) monitor_->publish(rank, text);
  }
  void publish(const std::string& text) const noexcept { publish(world_.rank(), text); }
  /// Tells them of this rank's error, unless it is one that another has told of.
  void publish(const std::exception_ptr& error) const noexcept {
    try {
      std::rethrow_exception(error);
    } catch (const PeerError&) {
    } catch (const std::exception& own) {
      publish(first_line(own));
    } catch (...) {
    }
  }
  /// The same when the reason is not known yet.
  void publish_vague(const std::string& text) const noexcept {
    if (monitor_) monitor_->publish_vague(text);
  }

  /// Tells the others that this rank leaves in good order.
  void depart() {
    if (monitor_) monitor_->publish_departure(*status_);
  }
  /// Says farewell. The rank that hosts the store leaves last.
  void farewell() {
    if (!monitor_) return;
    const bool last_to_leave = world_.hosts_store();
    if (!last_to_leave) monitor_->remove(status_.get());
    if (store_->add("farewells", 1) == size()) store_->set("all gone", std::string("1"));
    if (!last_to_leave) return;
    while (!appears("all gone", std::chrono::seconds(2))) {
      if (monitor_->failure()) return;
      const auto alive = monitor_->ask(*status_, patience);
      const auto gone = monitor_->departed(name());
      for (int rank : ranks())
        if (rank != world_.rank() && !alive.contains(rank) && !gone.contains(rank)) return;
    }
  }

 private:
  // How long another rank may take to answer from its monitor before it counts as dead.
  static constexpr std::chrono::milliseconds patience{1500};

  template <class Late>
  void await_key(const Call& call, const char* key, Late&& late) {
    while (!appears(key, std::min(std::chrono::milliseconds(100), deadline_))) {
      if (auto error = look(call)) {
        notice();
        std::rethrow_exception(error);
      }
      if (Clock::now() >= call.start + deadline_) throw TimeoutError(late(), world_.rank());
    }
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
          fmt::format("the store in which the ranks meet is gone: {}", error.what_without_backtrace()),
          world_.rank());
    }
    return true;
  }

  World world_;
  std::chrono::milliseconds deadline_;
  std::shared_ptr<GroupStatus> status_;
  int rank_ = 0;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<FailureMonitor> monitor_;  // none where this process is alone
  std::atomic<std::uint64_t> seen_{0};
};

}  // namespace lockstep::detail
