#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/process_wide.hpp"
#include "lockstep/world/bulletin.hpp"
#include "lockstep/world/worker.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// What this process would say of one of its groups when another rank asks: the last collective it entered.
struct GroupStatus {
  std::string name;
  std::vector<int> ranks;  // global, by rank in the group
  std::atomic<std::uint64_t> sequence{0};
  std::atomic<const char*> operations[2] = {"", ""};  // of the last odd and the last even one

  void enter(std::uint64_t number, const char* operation) {
    operations[number % 2].store(operation, std::memory_order_relaxed);
    sequence.store(number, std::memory_order_release);
  }
  /// "57 all_reduce"; an operation belongs to its number also while another is entered.
  [[nodiscard]] std::string text() const {
    for (;;) {
      const std::uint64_t number = sequence.load(std::memory_order_acquire);
      const char* operation = operations[number % 2].load(std::memory_order_relaxed);
      std::atomic_thread_fence(std::memory_order_acquire);
      if (sequence.load(std::memory_order_relaxed) == number) return fmt::format("{} {}", number, operation);
    }
  }
};

/// How far a rank has come in a group.
struct Position {
  std::uint64_t sequence = 0;
  std::string operation;
};

/// Why no collective can succeed any more.
struct Failure {
  int rank = -1;       // the rank that failed first
  bool vague = false;  // its own words may still come
  std::string text;

  [[nodiscard]] std::string sentence() const {
    return fmt::format("{} failed first: {}",
                       rank < 0 ? std::string("another rank") : fmt::format("rank {}", rank), text);
  }
};

/// A thread of each process, with a store connection of its own, that learns what other ranks post on the
/// bulletin board: that they failed, that they have left a group, or that they want to know how far this one
/// is. It sleeps in the store until its bell is rung, a second at most.
///
/// One is shared by all communicators of a world. Thread safety: every function may be called from any
/// thread.
class FailureMonitor {
 public:
  LOCKSTEP_PROCESS_WIDE static std::shared_ptr<FailureMonitor> of(const World& world) {
    static std::mutex mutex;
    static std::map<c10d::Store*, std::weak_ptr<FailureMonitor>> monitors;
    std::lock_guard lock(mutex);
    auto& known = monitors[world.store().get()];
    auto monitor = known.lock();
    if (!monitor) {
      monitor = std::make_shared<FailureMonitor>(world);
      known = monitor;
    }
    return monitor;
  }

  explicit FailureMonitor(const World& world)
      : rank_(world.rank()),
        world_(world),
        board_(world.store(), rank_, world.size()),
        own_store_(world.connect_again()),
        own_board_(own_store_, rank_, world.size()),
        thread_([this] { run(); }) {}

  ~FailureMonitor() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    try {
      board_.ring(rank_);
    } catch (...) {  // without a store the thread ends by itself, within a second
    }
    thread_.join();
  }
  FailureMonitor(const FailureMonitor&) = delete;
  FailureMonitor& operator=(const FailureMonitor&) = delete;

  /// Grows whenever there is something new to know.
  [[nodiscard]] std::uint64_t version() const noexcept { return version_.load(std::memory_order_acquire); }

  [[nodiscard]] std::optional<Failure> failure() const {
    std::lock_guard lock(mutex_);
    return failure_;
  }

  /// Says that the program has been told of the failure. A process that has not been, within two seconds, is
  /// ended.
  void notice() {
    std::lock_guard lock(mutex_);
    noticed_ = true;
    changed_.notify_all();
  }

  /// Waits at most `patience` for anything new.
  void await_news(std::uint64_t known, std::chrono::milliseconds patience) const {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, patience, [&] { return version() != known; });
  }

  /// Waits at most `patience` for a failure, and as long again for its words if it is vague.
  [[nodiscard]] std::optional<Failure> await_failure(std::chrono::milliseconds patience) const {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, patience, [&] { return failure_.has_value(); });
    if (failure_) changed_.wait_for(lock, patience, [&] { return !failure_->vague; });
    return failure_;
  }

  /// Where the ranks were that have left this group in good order, by global rank.
  [[nodiscard]] std::map<int, Position> departed(const std::string& group) const {
    std::lock_guard lock(mutex_);
    const auto found = departed_.find(group);
    return found == departed_.end() ? std::map<int, Position>() : found->second;
  }

  /// Tells every rank, at once, that `rank` has failed and why.
  void publish(int rank, const std::string& text) const noexcept {
    try {
      world_.publish_failure(fmt::format("rank {}: {}", rank, text));
    } catch (...) {  // whoever hosted the store is gone, and with it those who would read this
    }
  }

  /// The same for this rank when the reason is not known yet: who hears it waits a moment for publish().
  void publish_vague(const std::string& text) noexcept {
    try {
      board_.post(fmt::format("failed {} {}", rank_, text));
      board_.ring_all();
    } catch (...) {
    }
  }

  /// Tells every rank that this one leaves a group in good order.
  void publish_departure(const GroupStatus& group) {
    board_.post(fmt::format("departed {} {} {}", group.name, rank_, group.text()));
    board_.ring_all();
  }

  /// Asks the other ranks of a group how far they are. A rank that does not answer in time is not in the
  /// result.
  [[nodiscard]] std::map<int, Position> ask(const GroupStatus& group, std::chrono::milliseconds patience) {
    std::map<int, Position> positions;
    const std::int64_t question = board_.post(fmt::format("asked {}", group.name));
    board_.ring_all();
    std::vector<int> others;
    for (int rank : group.ranks)
      if (rank != rank_) others.push_back(rank);
    for (const auto& [rank, answer] :
         board_.answers(question, others, patience, [this] { return failed_elsewhere(); }))
      positions[rank] = parse(answer);
    return positions;
  }

  void add(std::shared_ptr<const GroupStatus> group) {
    std::lock_guard lock(mutex_);
    groups_.push_back(std::move(group));
  }
  void remove(const GroupStatus* group) noexcept {
    std::lock_guard lock(mutex_);
    std::erase_if(groups_, [&](const auto& known) { return known.get() == group; });
  }

  /// While it lives, news abort the wait for `message`, which Gloo does not let us interrupt otherwise.
  class Interruption {
   public:
    Interruption(FailureMonitor& monitor, c10::intrusive_ptr<c10d::Work> message)
        : monitor_(monitor), message_(std::move(message)) {
      std::lock_guard lock(monitor_.mutex_);
      monitor_.messages_.push_back(message_.get());
    }
    ~Interruption() {
      std::lock_guard lock(monitor_.mutex_);
      std::erase(monitor_.messages_, message_.get());
    }
    Interruption(const Interruption&) = delete;
    Interruption& operator=(const Interruption&) = delete;

   private:
    FailureMonitor& monitor_;
    c10::intrusive_ptr<c10d::Work> message_;
  };

 private:
  void run() noexcept {
    try {
      while (!stopping_ && !failed_elsewhere()) {
        own_board_.sleep();
        if (stopping_) return;
        if (const auto text = World::published_failure(*own_store_)) learn(*text);
        for (const Notice& notice : own_board_.news()) learn(notice);
      }
    } catch (const std::exception&) {
      std::unique_lock lock(mutex_);
      if (stopping_ || departed_hosts()) return;
      note({0, false, "the store in which the ranks meet is gone, so the process that hosts it has ended"},
           lock);
    }
    end_unless_noticed();
  }

  // There is nothing more to learn then, and the store may be gone at any moment.
  [[nodiscard]] bool failed_elsewhere() const {
    std::lock_guard lock(mutex_);
    return failure_ && !failure_->vague && failure_->rank != rank_;
  }

  // A rank that is busy with something else than collectives would outlive the others by as long as that
  // takes.
  void end_unless_noticed() {
    std::unique_lock lock(mutex_);
    if (!failure_ || failure_->rank == rank_) return;
    const bool noticed =
        changed_.wait_for(lock, std::chrono::seconds(2), [&] { return stopping_ || noticed_; });
    if (!noticed) fail_process(describe(std::make_exception_ptr(PeerError(failure_->sentence()))));
  }

  // "rank 3: why", or the why alone.
  void learn(const std::string& published) {
    int rank = -1;
    std::size_t begin = 0;
    if (const auto colon = published.find(": ");
        published.starts_with("rank ") && colon != std::string::npos) {
      rank = std::atoi(published.c_str() + 5);
      begin = colon + 2;
    }
    std::unique_lock lock(mutex_);
    if (!failure_ || failure_->vague) note({rank, false, published.substr(begin)}, lock);
  }

  void learn(const Notice& notice) {
    if (notice.kind == "failed") {
      std::unique_lock lock(mutex_);
      note({std::stoi(notice.word(0)), true, notice.rest(1)}, lock);
    } else if (notice.kind == "departed") {
      std::unique_lock lock(mutex_);
      departed_[notice.word(0)][std::stoi(notice.word(1))] = parse(notice.rest(2));
      announce(lock);
    } else if (notice.kind == "asked") {
      std::string answer = "0 nothing";
      {
        std::lock_guard lock(mutex_);
        for (const auto& group : groups_)
          if (group->name == notice.word(0)) answer = group->text();
      }
      own_board_.answer(notice.number, answer);
    }
  }

  // The first failure counts, and its words come before its mere announcement.
  void note(Failure failure, std::unique_lock<std::mutex>& lock) {
    if (!failure_ || (failure_->vague && !failure.vague)) failure_ = std::move(failure);
    announce(lock);
  }

  void announce(std::unique_lock<std::mutex>&) {
    version_.fetch_add(1, std::memory_order_release);
    for (c10d::Work* message : messages_) message->abort();
    changed_.notify_all();
  }

  // Rank 0 hosts the store where no launcher does: once it has left in good order, the store may go.
  [[nodiscard]] bool departed_hosts() const {
    for (const auto& [group, ranks] : departed_)
      if (ranks.contains(0)) return true;
    return false;
  }

  static Position parse(const std::string& text) {
    const auto space = text.find(' ');
    return {std::stoull(text), space == std::string::npos ? std::string() : text.substr(space + 1)};
  }

  const int rank_;
  World world_;
  Bulletin board_;  // on the connection of the world
  StorePtr own_store_;
  Bulletin own_board_;  // on the thread's own
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::optional<Failure> failure_;
  std::map<std::string, std::map<int, Position>> departed_;
  std::vector<std::shared_ptr<const GroupStatus>> groups_;
  std::vector<c10d::Work*> messages_;
  std::atomic<std::uint64_t> version_{0};
  std::atomic<bool> stopping_{false};
  bool noticed_ = false;
  std::thread thread_;
};

}  // namespace lockstep::detail
