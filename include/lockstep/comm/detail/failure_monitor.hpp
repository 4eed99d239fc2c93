#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
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

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/world/detail/printable.hpp"
#include "lockstep/world/detail/store.hpp"
#include "lockstep/world/detail/store_keys.hpp"
#include "lockstep/world/detail/store_mailbox.hpp"
#include "lockstep/world/detail/worker.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// The last collective that a rank has entered in a group.
struct Position {
  /// The operation of a rank that is not in the group, or has not entered a collective.
  static constexpr const char* none = "nothing";

  std::uint64_t sequence = 0;
  std::string operation{};
  std::string call{}, part{};  // the public call that it serves, see ServedCall; empty if there is none

  /// Parses the text of a GroupStatus.
  static Position parse(const std::string& text) {
    Position position{std::strtoull(text.c_str(), nullptr, 10)};
    const auto space = text.find(' ');
    if (space == std::string::npos) return position;
    std::string_view rest = std::string_view(text).substr(space + 1);
    for (std::string* field : {&position.operation, &position.call, &position.part}) {
      const auto end = std::min(rest.find('|'), rest.size());
      *field = printable(std::string(rest.substr(0, end)));
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
    return position;
  }

  /// Returns "all_reduce #56 of Trainer::fit".
  [[nodiscard]] std::string text() const {
    const std::string what = detail::formatted("{} #{}", operation, sequence);
    return call.empty() ? what : what + " of " + served_text(call, part);
  }
};

/// Returns whether `position` serves another public call than `served`.
inline bool other_call(const Position& position, const ServedCall& served) {
  return served.name && !position.call.empty() && position.call != served.name;
}

/// Returns whether a collective of one rank, `position`, cannot be the collective of another rank with the
/// same sequence number.
inline bool differs(const Position& position, const char* operation, const ServedCall& served) {
  return position.operation != operation || other_call(position, served);
}

/// Describes ranks that are in different public calls: "rank 0 is in Trainer::evaluate, rank 1 in
/// Trainer::save_checkpoint; call both on every rank, and equally often". Returns an empty text if neither
/// rank is in one, or both are in the same.
inline std::string different_calls(int rank, const char* operation, const ServedCall& served, int other,
                                   const Position& position) {
  // Where the outermost calls differ, the calls inside them explain nothing.
  const bool outer = other_call(position, served);
  const std::string here = outer ? std::string(served.name) : served_text(served);
  const std::string there = outer ? position.call : served_text(position.call, position.part);
  if (here.empty() && there.empty()) return {};
  std::vector<std::string> names{
      here.empty() ? detail::formatted("a call of {}", operation) : here,
      there.empty() ? detail::formatted("a call of {}", position.operation) : there};
  std::vector<int> ranks{rank, other};
  if (rank > other) {
    std::swap(names[0], names[1]);
    std::swap(ranks[0], ranks[1]);
  }
  return different_calls(names, ranks);
}

/// The last collective that this process has entered in one group.
///
/// Thread safety: one thread at a time may call `enter`; any thread may call the other functions.
struct GroupStatus {
  std::string name;
  std::vector<int> ranks;  // global, by rank in the group
  std::atomic<std::uint64_t> sequence{0};
  /// A collective, and the names of its ServedCall.
  struct Entry {
    std::atomic<const char*> operation{""};
    std::atomic<const char*> call{nullptr}, part{nullptr};
  };
  Entry entries[2];  // of the last even and the last odd sequence number

  void enter(std::uint64_t number, const char* operation, const ServedCall& served = {}) {
    // A reader that sees the new entry at the index of an older number must also see that `sequence` has
    // changed since that number.
    std::atomic_thread_fence(std::memory_order_release);
    Entry& entry = entries[number % 2];
    entry.operation.store(operation, std::memory_order_relaxed);
    entry.call.store(served.name, std::memory_order_relaxed);
    entry.part.store(served.part, std::memory_order_relaxed);
    sequence.store(number, std::memory_order_release);
  }

  /// The values of an Entry and its sequence number.
  struct Snapshot {
    std::uint64_t sequence;
    const char* operation;
    ServedCall served;
  };
  /// Returns the last collective. Its values match even while another thread calls `enter`.
  [[nodiscard]] Snapshot snapshot() const {
    for (;;) {
      const std::uint64_t number = sequence.load(std::memory_order_acquire);
      const Entry& entry = entries[number % 2];
      const Snapshot snapshot{
          number,
          entry.operation.load(std::memory_order_relaxed),
          {entry.call.load(std::memory_order_relaxed), entry.part.load(std::memory_order_relaxed)}};
      std::atomic_thread_fence(std::memory_order_acquire);
      if (sequence.load(std::memory_order_relaxed) == number) return snapshot;
    }
  }
  /// Returns "57 all_reduce|Trainer::fit|DistributedDataParallel::backward", without the names of calls that
  /// there are none of.
  [[nodiscard]] std::string text() const {
    const auto [number, operation, served] = snapshot();
    std::string text = detail::formatted("{} {}", number, operation);
    if (served.name) text.append("|").append(served.name);
    if (served.part) text.append("|").append(served.part);
    return text;
  }
};

/// The text of the failure of the process that hosts the store, as the other ranks find it.
inline constexpr const char* store_lost = "the store is gone, so the process that hosts it has ended";

/// A collective of another group that a rank has entered, and the asking rank, which is in that group, has not.
struct Elsewhere {
  std::string group;
  Position position;
};

/// The positions of the other ranks of a group, as they answered a Question.
struct Answers {
  bool store_answers = false;          // the store has answered since the question was asked
  bool store_left = false;             // the store's host has left gracefully; the store may be gone
  bool conclusive = false;             // a rank that has not answered had enough time to
  std::map<int, Position> positions;   // by global rank, without the ranks that have not answered
  std::map<int, Elsewhere> elsewhere;  // by global rank
};

/// Exchanges through the store what a process group cannot carry: failures of ranks, departures from a group,
/// and the position of each rank.
///
/// All store operations run on two threads of the monitor, each with its own connection. The listener waits
/// in the store for messages and answers questions. The sender posts messages and asks questions. The
/// program's threads wait for the sender with a timeout, also when the store does not answer. The destructor
/// detaches a thread that the store blocks.
///
/// A question costs each asking and each answering rank a constant number of store operations: it is one
/// message, which every listener answers by replacing its rank's status text. Ranks that ask at the same time
/// share one question.
///
/// All communicators of a world share one monitor. Thread-safe.
class FailureMonitor {
  struct Shared;
  struct Abort {
    int rank;
    std::int64_t at;   // by the rank's own clock, in ms
    std::string text;  // empty if unknown
  };

 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  /// Opens a connection to the store. Every operation on it ends within `timeout`.
  using Connect = std::function<StorePtr(Milliseconds timeout)>;
  /// Why a destructor, which does not see the exception that unwinds the stack, aborts a group.
  static constexpr const char* by_exception = "an exception, which its own output names, has ended it";

  LOCKSTEP_PROCESS_WIDE static std::shared_ptr<FailureMonitor> of(const World& world) {
    static std::mutex mutex;
    static std::map<c10d::Store*, std::weak_ptr<FailureMonitor>> monitors;
    std::lock_guard lock(mutex);
    auto& known = monitors[world.store().get()];
    auto monitor = known.lock();
    if (!monitor) {
      monitor = std::make_shared<FailureMonitor>(
          world.rank(), world.size(), [world](Milliseconds timeout) { return world.connect_again(timeout); });
      known = monitor;
      failure_hooks.different_calls = [asked = known] {
        const auto asking = asked.lock();
        return asking ? asking->different_calls() : std::string();
      };
    }
    return monitor;
  }

  FailureMonitor(int rank, int size, Connect connect)
      : shared_(std::make_shared<Shared>(rank, size, std::move(connect))),
        listener_([shared = shared_] { shared->run([&] { shared->listen(); }); }),
        sender_([shared = shared_] { shared->run([&] { shared->send(); }); }) {}

  ~FailureMonitor() {
    const bool ended = getpid() == owner_ && shared_->end_threads();  // they run in one process
    for (std::thread* thread : {&listener_, &sender_}) ended ? thread->join() : thread->detach();
  }
  FailureMonitor(const FailureMonitor&) = delete;
  FailureMonitor& operator=(const FailureMonitor&) = delete;

  /// Returns a number that grows with each failure and each departure. Costs one atomic read.
  [[nodiscard]] std::uint64_t version() const noexcept {
    return shared_->version.load(std::memory_order_acquire);
  }

  [[nodiscard]] std::optional<Failure> failure() const {
    std::lock_guard lock(shared_->mutex);
    return shared_->failure;
  }

  /// Records that the program knows of the failure. The monitor ends a process that has not called this
  /// within two seconds of a failure.
  void notice() {
    std::lock_guard lock(shared_->mutex);
    shared_->noticed = true;
    shared_->changed.notify_all();
  }

  /// Blocks until the version differs from `known`, at most `timeout`.
  void await_news(std::uint64_t known, Milliseconds timeout) const {
    std::unique_lock lock(shared_->mutex);
    shared_->changed.wait_for(lock, timeout, [&] { return version() != known; });
  }

  /// Blocks until a failure is known, at most `timeout`.
  std::optional<Failure> await_failure(Milliseconds timeout) const {
    std::unique_lock lock(shared_->mutex);
    shared_->changed.wait_for(lock, timeout, [&] { return shared_->failure.has_value(); });
    return shared_->failure;
  }

  /// Returns why another rank has aborted a group, if one has before a failure of the world. If the rank gave no reason,
  /// looks for the one that it gives for another group within a second, for at most 500 ms.
  [[nodiscard]] std::optional<Failure> aborted(const std::string& group) const {
    std::unique_lock lock(shared_->mutex);
    const auto found = shared_->aborted.find(group);
    if (found == shared_->aborted.end()) return std::nullopt;
    const Abort abort = found->second;
    if (!abort.text.empty()) return Failure{abort.rank, abort.text};
    const Abort& reason = shared_->reasons[abort.rank];
    const auto near = [&] { return !reason.text.empty() && std::abs(reason.at - abort.at) < 1000; };
    shared_->changed.wait_for(lock, Milliseconds(500), [&] { return near() || shared_->failure; });
    if (!near() && shared_->failure) return std::nullopt;
    return Failure{abort.rank, near() ? reason.text : by_exception};
  }
  /// Returns whether no call of a group can complete: another rank has failed, or has aborted the group.
  [[nodiscard]] bool ended(const std::string& group) const {
    std::lock_guard lock(shared_->mutex);
    return shared_->failure || shared_->aborted.contains(group);
  }

  /// Returns the last positions of the ranks that have left this group gracefully, by global rank.
  [[nodiscard]] std::map<int, Position> departed(const std::string& group) const {
    std::lock_guard lock(shared_->mutex);
    const auto found = shared_->departed.find(group);
    return found == shared_->departed.end() ? std::map<int, Position>() : found->second;
  }

  /// The outcome of a store operation on the sender's thread. `cut_short`: the deadline passed, or another
  /// rank failed, before the operation completed; it may still take effect.
  enum class Ending { complete, failed, cut_short };

  /// Runs `work(store)` on the sender's thread. Blocks until it completes, at most until `until`. `work` must
  /// own what it uses. If `work` throws and `error` is not null, `*error` receives the exception.
  Ending perform(std::function<void(const StorePtr&)> work, Clock::time_point until,
                 std::exception_ptr* error = nullptr) {
    auto job = std::make_shared<Job>();
    job->work = std::move(work);
    job->until = until;
    std::unique_lock lock(shared_->mutex);
    shared_->jobs.push_back(job);
    shared_->work.notify_all();
    shared_->changed.wait_until(lock, until, [&] { return job->done || shared_->failed_elsewhere(); });
    if (!job->done) return Ending::cut_short;
    if (!job->error) return Ending::complete;
    if (error) *error = job->error;
    return Ending::failed;
  }

  /// Publishes the failure of `rank` to every rank, unless a failure is already known. Blocks at most 1 s.
  void publish(int rank, const std::string& text) noexcept {
    tell(std::chrono::seconds(1),
         [own = shared_->rank, size = shared_->size, text = detail::formatted("rank {}: {}", rank, text)](
             const StorePtr& store) { detail::publish_failure(store, own, size, text); });
  }

  /// Announces to the other ranks that this rank has aborted a group. Blocks at most 1 s.
  void publish_abort(const GroupStatus& group, const std::string& text) noexcept {
    const auto at = std::chrono::duration_cast<Milliseconds>(Clock::now().time_since_epoch()).count();
    post(std::chrono::seconds(1),
         detail::formatted("aborted {} {} {} {}", group.name, shared_->rank, at, text));
  }

  /// Announces to every rank that this rank leaves a group gracefully. Blocks at most 1 s.
  void publish_departure(const GroupStatus& group) noexcept {
    post(std::chrono::seconds(1),
         detail::formatted("departed {} {} {}", group.name, shared_->rank, group.text()));
  }

  /// Records in the store that this rank has made a communicator. Blocks at most 1 s.
  void publish_connected() noexcept {
    tell(std::chrono::seconds(1), [own = shared_->rank](const StorePtr& store) {
      store->set(store_keys::communicates(own), std::string("1"));
    });
  }

  void add(std::shared_ptr<const GroupStatus> group) {
    std::lock_guard lock(shared_->mutex);
    shared_->groups.push_back(std::move(group));
    shared_->noticed =
        shared_->failure.has_value();  // what the program has caught before is not of this group
  }
  void remove(const GroupStatus* group) noexcept {
    std::lock_guard lock(shared_->mutex);
    std::erase_if(shared_->groups, [&](const auto& known) { return known.get() == group; });
  }

  /// A request for the positions of the other ranks of a group. The constructor asks without blocking.
  /// Answers to another rank's question also count if this rank read that question at most `share` before.
  class Question {
   public:
    Question(FailureMonitor& monitor, const GroupStatus& group, Milliseconds share)
        : shared_(monitor.shared_), name_(group.name), since_(Clock::now()), oldest_(since_ - share) {
      for (const int rank : group.ranks)
        if (rank != shared_->rank) ranks_.push_back(rank);
      std::lock_guard lock(shared_->mutex);
      shared_->asked = since_;
      shared_->questions.push_back(this);
      shared_->work.notify_all();
    }
    ~Question() {
      std::lock_guard lock(shared_->mutex);
      std::erase(shared_->questions, this);
    }
    Question(const Question&) = delete;
    Question& operator=(const Question&) = delete;

    /// Blocks until every rank has answered, another rank is known to have failed, or `timeout` expires.
    /// While answers still arrive, or the store is slow, as on a machine short of cores, `timeout` extends to
    /// `most`. Returns the answers so far.
    Answers await(Milliseconds timeout, Milliseconds most) const {
      std::unique_lock lock(shared_->mutex);
      for (;;) {
        const auto now = Clock::now();
        if (settled_by(now, timeout, most)) return answers_by(now, timeout);
        const auto end = since_ + (now < since_ + timeout ? timeout : most);
        shared_->changed.wait_until(lock, std::min<Clock::time_point>(end, now + trickle / 4));
      }
    }
    /// Non-blocking await(): returns std::nullopt where await() would block.
    [[nodiscard]] std::optional<Answers> poll(Milliseconds timeout, Milliseconds most) const {
      std::lock_guard lock(shared_->mutex);
      const auto now = Clock::now();
      if (!settled_by(now, timeout, most)) return std::nullopt;
      return answers_by(now, timeout);
    }

   private:
    friend struct Shared;
    // The longest pause between the answers of two live ranks.
    static constexpr Milliseconds trickle{400};

    // A rank without an answer counts as silent only if the store answers, this rank's own listener has read
    // a question at least as new, and several consecutive looks have found no rank's answer.
    [[nodiscard]] bool conclusive_by(Clock::time_point now, Milliseconds timeout) const {
      return now >= since_ + timeout && shared_->store_answered >= since_ &&
             shared_->heard_question_at >= oldest_ && now >= shared_->last_answer + trickle &&
             shared_->idle_looks >= 3;
    }
    [[nodiscard]] Answers answers_by(Clock::time_point now, Milliseconds timeout) const {
      Answers answers;
      answers.conclusive = conclusive_by(now, timeout);
      answers.store_answers = shared_->store_answered >= since_;
      answers.store_left = shared_->host_has_left();
      for (const int rank : ranks_)
        if (shared_->answered_since(rank, since_)) {
          const std::string& status = shared_->statuses[rank].text;
          answers.positions[rank] = position_in(status, name_);
          for (const auto& group : shared_->groups)
            if (Position position = position_in(status, group->name);
                group->name != name_ && position.sequence > group->sequence.load())
              answers.elsewhere.try_emplace(rank, Elsewhere{group->name, std::move(position)});
        }
      return answers;
    }
    [[nodiscard]] bool settled_by(Clock::time_point now, Milliseconds timeout, Milliseconds most) const {
      if (shared_->failed_elsewhere() || now >= since_ + most) return true;
      if (conclusive_by(now, timeout)) return true;
      return std::all_of(ranks_.begin(), ranks_.end(),
                         [&](int rank) { return shared_->answered_since(rank, since_); });
    }

    std::shared_ptr<Shared> shared_;
    std::string name_;
    std::vector<int> ranks_;
    Clock::time_point since_;
    Clock::time_point oldest_;  // the earliest time at which a shared question may have been read
  };

  /// Asks the other ranks of a group for their positions and blocks until the question is settled.
  [[nodiscard]] Answers ask(const GroupStatus& group, Milliseconds share, Milliseconds timeout,
                            Milliseconds most) {
    return Question(*this, group, share).await(timeout, most);
  }

  /// Returns the first non-empty text of different_calls() over the groups and their ranks, an empty text if
  /// there is none. Blocks at most 1.5 s for each group.
  [[nodiscard]] std::string different_calls() {
    std::vector<std::shared_ptr<const GroupStatus>> groups;
    {
      std::lock_guard lock(shared_->mutex);
      groups = shared_->groups;
    }
    for (const auto& group : groups) {
      if (group->ranks.size() < 2) continue;
      const auto answers = ask(*group, Milliseconds(0), Milliseconds(1500), Milliseconds(1500));
      const auto own = group->snapshot();
      for (const auto& [rank, position] : answers.positions) {
        std::string text = detail::different_calls(shared_->rank, own.operation, own.served, rank, position);
        if (!text.empty()) return text;
      }
    }
    return {};
  }

  /// While it lives, aborts the wait for `message` when a failure or departure arrives, and when the listener
  /// next reads the clock after `due`. Gloo offers no other way to interrupt that wait.
  class Interruption {
   public:
    Interruption(FailureMonitor& monitor, c10::intrusive_ptr<c10d::Work> message, Clock::time_point due)
        : shared_(monitor.shared_), message_(std::move(message)) {
      std::lock_guard lock(shared_->mutex);
      shared_->messages[message_.get()] = due;
    }
    ~Interruption() {
      std::lock_guard lock(shared_->mutex);
      shared_->messages.erase(message_.get());
    }
    Interruption(const Interruption&) = delete;
    Interruption& operator=(const Interruption&) = delete;

   private:
    std::shared_ptr<Shared> shared_;
    c10::intrusive_ptr<c10d::Work> message_;
  };

 private:
  struct Job {
    std::function<void(const StorePtr&)> work;
    Clock::time_point until;
    bool done = false;
    std::exception_ptr error;
  };

  /// The latest status text of a rank.
  struct Status {
    std::int64_t question = 0;  // the newest question that it answers
    Clock::time_point asked;    // when this rank asked that question, or began to share another rank's
    std::string text;
  };

  void tell(Milliseconds timeout, std::function<void(const StorePtr&)> work) noexcept {
    try {
      {
        std::lock_guard lock(shared_->mutex);
        if (shared_->failed_elsewhere()) return;
        // Do not wait again for a store that has just left a question unanswered.
        const auto now = Clock::now(), asked = shared_->asked;
        if (shared_->store_answered < asked && now > asked + std::chrono::seconds(1) &&
            now < asked + std::chrono::seconds(10))
          timeout = std::min(timeout, Milliseconds(200));
      }
      perform(std::move(work), Clock::now() + timeout);
    } catch (...) {  // no memory: the other ranks see the connections close
    }
  }
  void post(Milliseconds timeout, std::string message) noexcept {
    tell(timeout, [own = shared_->rank, size = shared_->size, message = std::move(message)](
                      const StorePtr& store) { StoreMailbox(store, own, size).post(message); });
  }

  // Returns the position in `group` from a status text, which has a line "<group> <sequence> <operation>" for
  // each group.
  static Position position_in(const std::string& status, const std::string& group) {
    const std::string front = "\n" + group + " ";
    const auto found = status.find(front);
    if (found == std::string::npos) return {0, Position::none, {}, {}};
    const auto begin = found + front.size();
    return Position::parse(status.substr(begin, status.find('\n', begin) - begin));
  }

  /// The state that the monitor, its two threads and its questions share.
  struct Shared {
    Shared(int own_rank, int world_size, Connect connect_to_store)
        : rank(own_rank), size(world_size), connect(std::move(connect_to_store)) {}

    const int rank, size;
    const Connect connect;
    std::mutex mutex;
    std::condition_variable changed;  // wakes threads that wait for failures, departures, answers and jobs
    std::condition_variable work;     // wakes the sender
    std::atomic<std::uint64_t> version{0};
    bool stopping = false, noticed = false;
    int threads_ended = 0;
    std::optional<Failure> failure;
    std::map<std::string, std::map<int, Position>> departed;
    std::map<std::string, Abort> aborted;  // groups, by another rank
    std::map<int, Abort> reasons;          // of the ranks' last aborts
    std::vector<std::shared_ptr<const GroupStatus>> groups;
    std::map<c10d::Work*, Clock::time_point> messages;
    std::deque<std::shared_ptr<Job>> jobs;
    std::vector<const Question*> questions;
    std::map<int, Status> statuses;
    Clock::time_point asked;  // when this process last asked a question
    Clock::time_point store_answered, last_answer;
    int idle_looks = 0;               // looks for answers since the last answer
    std::int64_t heard_question = 0;  // the newest question that the listener has read
    Clock::time_point heard_question_at;
    std::set<std::string> refused;  // the processes that rank 0 has told about; used by the listener alone

    // The timeout of one store operation.
    static constexpr Milliseconds operation_timeout{3000};
    // The longest time between two looks of the listener. It bounds how long a store that ends or falls
    // silent goes unnoticed.
    static constexpr Milliseconds period{5000};
    // The ranks of a large world spread their questions over this time, so that most share an earlier one.
    static constexpr Milliseconds spread{30};

    // Returns whether both threads have ended within a second.
    bool end_threads() {
      std::unique_lock lock(mutex);
      stopping = true;
      messages.clear();
      changed.notify_all();
      work.notify_all();
      return changed.wait_for(lock, std::chrono::seconds(1), [&] { return threads_ended == 2; });
    }

    template <class Thread>
    void run(Thread&& thread) noexcept {
      try {
        thread();
      } catch (...) {  // no memory, or no store: the other ranks see the connections close
      }
      std::lock_guard lock(mutex);
      ++threads_ended;
      changed.notify_all();
    }

    // True if nothing more can be learned. The store may then disappear at any moment.
    [[nodiscard]] bool failed_elsewhere() const { return failure && failure->rank != rank; }

    [[nodiscard]] bool answered_since(int other, Clock::time_point since) const {
      const auto found = statuses.find(other);
      return found != statuses.end() && found->second.asked >= since;
    }

    // ---- The listener.

    void listen() {
      std::optional<StoreMailbox> mailbox;
      StorePtr store;
      bool lost = false;  // the connection was closed by the other side
      Milliseconds hole_pause{20};
      for (;;) {
        auto start = Clock::now();
        Milliseconds timeout = lost ? std::chrono::seconds(1) : operation_timeout;
        try {
          if (!store) {
            store = connect(timeout);
            store->setTimeout(operation_timeout);
            if (mailbox)
              mailbox->reconnect(store);
            else
              mailbox.emplace(store, rank, size);
            mailbox->set_status(status_text(0));
            lost = false;
          }
          bool woken = true;  // messages may have arrived before this thread began
          for (;;) {
            start = Clock::now();
            timeout = operation_timeout;
            hear(*store, *mailbox, woken);
            if (over()) break;
            if (woken) std::this_thread::sleep_for(mailbox->pause());
            hole_pause = mailbox->incomplete() ? std::min(2 * hole_pause, period) : Milliseconds(20);
            start = Clock::now();
            timeout = mailbox->incomplete() ? hole_pause : period;
            woken = mailbox->sleep(timeout);
            interrupt_due();
          }
          break;
        } catch (const CommunicationError& damage) {  // the mailbox stays unreadable
          std::unique_lock lock(mutex);
          note({-1, damage.what()}, lock);
          break;
        } catch (const std::exception&) {
          store.reset();
          std::unique_lock lock(mutex);
          if (stopping) return;
          if (lost) {
            if (host_has_left()) return;
            note({0, store_lost}, lock);
            break;
          }
          // An operation that runs into its timeout found a silent store; one that ends earlier lost its
          // connection. A new connection shows whether the store is gone.
          lost = Clock::now() - start < timeout - timeout / 10;
          changed.wait_for(lock, Milliseconds(50), [&] { return stopping; });
          if (stopping) return;
        }
        interrupt_due();
      }
      end_unless_noticed();
    }

    [[nodiscard]] bool over() {
      std::lock_guard lock(mutex);
      return stopping || failed_elsewhere();
    }

    void hear(c10d::Store& store, StoreMailbox& mailbox, bool woken) {
      const auto news = mailbox.news();
      bool look = !woken;  // the rank that posted a failure may have died before it notified anyone
      std::int64_t asked = 0;
      for (const Message& message : news) {
        if (message.kind == "asked") asked = std::max(asked, message.number);
        look = look || message.kind == "look";
      }
      if (asked > 0) {
        mailbox.set_status(status_text(asked));
        std::lock_guard lock(mutex);
        heard_question = std::max(heard_question, asked);
        heard_question_at = Clock::now();
        work.notify_all();
      }
      if (look)
        if (const auto text = published_failure(store)) learn(*text);
      for (const Message& message : news) learn(message);
    }

    [[nodiscard]] std::string status_text(std::int64_t question) {
      std::string text = std::to_string(question);
      std::lock_guard lock(mutex);
      for (const auto& group : groups) text += detail::formatted("\n{} {}", group->name, group->text());
      return text;
    }

    void learn(const std::string& published) {
      std::unique_lock lock(mutex);
      if (!failure) note(Failure::parse(published), lock);
    }

    void learn(const Message& message) {
      if (message.kind == "aborted") {
        std::unique_lock lock(mutex);
        const Abort abort{std::atoi(message.word(1).c_str()), std::atoll(message.word(2).c_str()),
                          printable(message.rest(3))};
        if (!abort.text.empty()) reasons[abort.rank] = abort;
        if (abort.rank != rank && !failure) aborted.try_emplace(message.word(0), abort);
        announce(lock);
      } else if (message.kind == "departed") {
        std::unique_lock lock(mutex);
        departed[message.word(0)][std::atoi(message.word(1).c_str())] = Position::parse(message.rest(2));
        announce(lock);
      } else if (message.kind == "refused" && rank == 0 && refused.insert(message.text).second) {
        Log(rank).warning("a process that tried to join this run was refused: {}", printable(message.text));
      }
    }

    // Keeps the first failure.
    void note(Failure found, std::unique_lock<std::mutex>& lock) {
      if (!failure) failure = std::move(found);
      announce(lock);
    }

    void announce(std::unique_lock<std::mutex>&) {
      version.fetch_add(1, std::memory_order_release);
      for (const auto& [message, due] : messages) message->abort();
      changed.notify_all();
      work.notify_all();
    }

    void interrupt_due() {
      std::lock_guard lock(mutex);
      for (const auto& [message, due] : messages)
        if (Clock::now() >= due) message->abort();
    }

    // Without a launcher rank 0 hosts the store. The store may disappear once rank 0 has left, gracefully,
    // every group that it shares with this rank.
    [[nodiscard]] bool host_has_left() const {
      return std::all_of(groups.begin(), groups.end(), [&](const auto& group) {
        if (std::find(group->ranks.begin(), group->ranks.end(), 0) == group->ranks.end()) return true;
        const auto left = departed.find(group->name);
        return left != departed.end() && left->second.contains(0);
      });
    }

    // Ends this process if it has not noticed another rank's failure: a rank busy outside collectives would
    // otherwise outlive the other ranks.
    void end_unless_noticed() {
      std::unique_lock lock(mutex);
      if (!failure || failure->rank == rank) return;
      const bool told = changed.wait_for(lock, std::chrono::seconds(2), [&] { return stopping || noticed; });
      if (!told) fail_process(describe(std::make_exception_ptr(PeerError(failure->sentence()))));
    }

    // ---- The sender.

    /// A question of this rank, or a shared question of another rank.
    struct Round {
      std::int64_t number = 0;
      Clock::time_point asked;
      Milliseconds pause{2};
    };

    void send() {
      StorePtr store;
      Round round;
      std::unique_lock lock(mutex);
      for (;;) {
        work.wait(lock, [&] { return stopping || !jobs.empty() || !unanswered().empty(); });
        if (stopping && jobs.empty()) break;
        std::shared_ptr<Job> job;
        if (!jobs.empty()) {
          job = jobs.front();
          jobs.pop_front();
        }
        const auto now = Clock::now();
        if (job && job->until <= now) continue;  // its caller no longer waits
        lock.unlock();
        std::exception_ptr error;
        Milliseconds pause{0};
        try {
          if (!store) store = connect(operation_timeout);
          store->setTimeout(job ? std::chrono::ceil<Milliseconds>(job->until - now) : operation_timeout);
          if (job)
            job->work(store);
          else
            pause = ask_once(store, round);
        } catch (...) {
          error = std::current_exception();
          store.reset();
          round = {};
          pause = Milliseconds(100);
        }
        lock.lock();
        if (job) {
          if (!error) store_answered = Clock::now();
          job->error = error;
          job->done = true;
          changed.notify_all();
        } else {
          work.wait_for(lock, pause, [&] { return stopping || !jobs.empty(); });
        }
      }
      if (threads_ended > 0) return;
      lock.unlock();
      // The listener blocks in the store until a message wakes it.
      if (!store) store = connect(std::chrono::milliseconds(500));
      store->setTimeout(std::chrono::milliseconds(500));
      StoreMailbox(store, rank, size).post("left");
    }

    // Returns the ranks that have not answered the newest question put to them.
    [[nodiscard]] std::vector<int> unanswered() const {
      std::vector<int> missing;
      for (const Question* question : questions)
        for (const int other : question->ranks_)
          if (!answered_since(other, question->since_)) missing.push_back(other);
      std::sort(missing.begin(), missing.end());
      missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
      return missing;
    }

    // Looks once for answers, after posting a new question if there is none to share. Returns the pause
    // before the next look.
    Milliseconds ask_once(const StorePtr& store, Round& round) {
      StoreMailbox mailbox(store, rank, size);
      std::vector<int> missing;
      bool post = false;
      {
        std::lock_guard lock(mutex);
        Clock::time_point newest{}, oldest{};
        for (const Question* question : questions) {
          newest = std::max(newest, question->since_);
          oldest = std::max(oldest, question->oldest_);
        }
        missing = unanswered();
        if (missing.empty()) return Milliseconds(0);
        if (round.number == 0 || round.asked < newest) {
          const auto now = Clock::now();
          if (heard_question > 0 && heard_question_at >= oldest) {
            round = {heard_question, now};
          } else if (now < newest + spread * rank / size) {
            return Milliseconds(2);
          } else {
            round = {0, now};
            post = true;
          }
          idle_looks = 0;
          round.pause = Milliseconds(2 + size / 8);
        }
      }
      if (post) round.number = mailbox.post("asked");
      const auto texts = mailbox.statuses(missing);
      std::lock_guard lock(mutex);
      store_answered = Clock::now();
      ++idle_looks;
      for (std::size_t i = 0; i < missing.size(); ++i) {
        if (!texts[i]) continue;
        const auto question = std::strtoll(texts[i]->c_str(), nullptr, 10);
        if (question < round.number) continue;
        statuses[missing[i]] = {question, round.asked, *texts[i]};
        last_answer = Clock::now();
        idle_looks = 0;
      }
      changed.notify_all();
      const auto pause = round.pause;
      round.pause = std::min(2 * round.pause, Milliseconds(100));
      return pause;
    }
  };

  const std::shared_ptr<Shared> shared_;
  std::thread listener_, sender_;
  const pid_t owner_ = getpid();
};

}  // namespace lockstep::detail
