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
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/detail/process_wide.hpp"
#include "lockstep/world/detail/printable.hpp"
#include "lockstep/world/detail/store_mailbox.hpp"
#include "lockstep/world/detail/worker.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// The last collective that this process has entered in one group.
///
/// Thread safety: one thread at a time may call `enter`; `text` may be called from any.
struct GroupStatus {
  std::string name;
  std::vector<int> ranks;  // global, by rank in the group
  std::atomic<std::uint64_t> sequence{0};
  std::atomic<const char*> operations[2] = {"", ""};  // of the last odd and the last even one

  void enter(std::uint64_t number, const char* operation) {
    // Orders the previous number before this operation: a reader that sees this operation in the slot of the
    // number before the previous one must also see that the number has changed.
    std::atomic_thread_fence(std::memory_order_release);
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

/// The answers of the other ranks of a group to the question how far they are.
struct Answers {
  bool store_answers = false;         // since the question was asked
  bool store_left = false;            // its host has left in good order, and may be gone
  bool conclusive = false;            // a rank that has not answered had time enough to
  std::map<int, Position> positions;  // by global rank; none of a rank that has not answered
};

/// Exchanges with the other ranks, through the store, what a process group cannot carry: that a rank has
/// failed, that it has left a group, and how far each rank is.
///
/// All store operations run on two threads of the monitor, each with a connection of its own. The listener
/// waits in the store for messages and answers questions. The sender posts messages and asks questions. The
/// threads of the program wait for the sender at most for a time that they state, whatever the store does. A
/// thread that a store holds up is left behind by the destructor.
///
/// A question costs each asking and each answering rank a constant number of store operations: it is a
/// message that every listener answers by replacing the status text of its rank, and ranks that ask at the
/// same time share one question.
///
/// All communicators of a world share one monitor. Thread safety: every function may be called from any
/// thread.
class FailureMonitor {
  struct Shared;

 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  /// Opens a connection to the store, every operation of which ends within `limit`.
  using Connect = std::function<StorePtr(Milliseconds limit)>;

  LOCKSTEP_PROCESS_WIDE static std::shared_ptr<FailureMonitor> of(const World& world) {
    static std::mutex mutex;
    static std::map<c10d::Store*, std::weak_ptr<FailureMonitor>> monitors;
    std::lock_guard lock(mutex);
    auto& known = monitors[world.store().get()];
    auto monitor = known.lock();
    if (!monitor) {
      monitor = std::make_shared<FailureMonitor>(
          world.rank(), world.size(), [world](Milliseconds limit) { return world.connect_again(limit); });
      known = monitor;
    }
    return monitor;
  }

  FailureMonitor(int rank, int size, Connect connect)
      : shared_(std::make_shared<Shared>(rank, size, std::move(connect))),
        listener_([shared = shared_] { shared->run([&] { shared->listen(); }); }),
        sender_([shared = shared_] { shared->run([&] { shared->send(); }); }) {}

  ~FailureMonitor() {
    std::unique_lock lock(shared_->mutex);
    shared_->stopping = true;
    shared_->messages.clear();
    shared_->changed.notify_all();
    shared_->work.notify_all();
    const bool ended =
        shared_->changed.wait_for(lock, std::chrono::seconds(1), [&] { return shared_->threads_ended == 2; });
    lock.unlock();
    for (std::thread* thread : {&listener_, &sender_}) ended ? thread->join() : thread->detach();
  }
  FailureMonitor(const FailureMonitor&) = delete;
  FailureMonitor& operator=(const FailureMonitor&) = delete;

  /// Grows whenever there is something new to know. Costs one atomic read.
  [[nodiscard]] std::uint64_t version() const noexcept {
    return shared_->version.load(std::memory_order_acquire);
  }

  [[nodiscard]] std::optional<Failure> failure() const {
    std::lock_guard lock(shared_->mutex);
    return shared_->failure;
  }

  /// Says that the program has been told of the failure. A process that has not been, within two seconds, is
  /// ended.
  void notice() {
    std::lock_guard lock(shared_->mutex);
    shared_->noticed = true;
    shared_->changed.notify_all();
  }

  /// Waits at most `timeout` for anything newer than version `known`.
  void await_news(std::uint64_t known, Milliseconds timeout) const {
    std::unique_lock lock(shared_->mutex);
    shared_->changed.wait_for(lock, timeout, [&] { return version() != known; });
  }

  /// Waits at most `timeout` for a failure, and as long again for its words if it is vague.
  std::optional<Failure> await_failure(Milliseconds timeout) const {
    std::unique_lock lock(shared_->mutex);
    shared_->changed.wait_for(lock, timeout, [&] { return shared_->failure.has_value(); });
    if (shared_->failure) shared_->changed.wait_for(lock, timeout, [&] { return !shared_->failure->vague; });
    return shared_->failure;
  }

  /// Where the ranks were that have left this group in good order, by global rank.
  [[nodiscard]] std::map<int, Position> departed(const std::string& group) const {
    std::lock_guard lock(shared_->mutex);
    const auto found = shared_->departed.find(group);
    return found == shared_->departed.end() ? std::map<int, Position>() : found->second;
  }

  /// How a store operation on the sender's thread ended. `cut_short`: its time was over, or another rank had
  /// failed, before it was complete; it may still happen.
  enum class Ending { complete, failed, cut_short };

  /// Runs `work(store)` on the sender's thread and blocks until it is complete, `until` at most. `work` must
  /// own what it uses. `error`, if not null, gets what it threw.
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

  /// Tells every rank that `rank` has failed and why, unless a failure is known. Blocks for a second at most.
  void publish(int rank, const std::string& text) noexcept {
    tell(std::chrono::seconds(1),
         [own = shared_->rank, size = shared_->size, text = fmt::format("rank {}: {}", rank, text)](
             const StorePtr& store) { World::publish_failure(store, own, size, text); });
  }

  /// The same for this rank when the reason is not known yet: who hears it waits a moment for publish().
  void publish_vague(const std::string& text) noexcept {
    post(std::chrono::milliseconds(500), fmt::format("failed {} {}", shared_->rank, text));
  }

  /// Tells every rank that this one leaves a group in good order. Blocks for a second at most.
  void publish_departure(const GroupStatus& group) noexcept {
    post(std::chrono::seconds(1), fmt::format("departed {} {} {}", group.name, shared_->rank, group.text()));
  }

  void add(std::shared_ptr<const GroupStatus> group) {
    std::lock_guard lock(shared_->mutex);
    shared_->groups.push_back(std::move(group));
  }
  void remove(const GroupStatus* group) noexcept {
    std::lock_guard lock(shared_->mutex);
    std::erase_if(shared_->groups, [&](const auto& known) { return known.get() == group; });
  }

  /// The question how far the other ranks of a group are, asked by the constructor without blocking. The
  /// answers to another rank's question serve as well if that was heard no longer than `share` before.
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

    /// Blocks until every rank has answered, another rank is known to have failed, or `timeout` is over.
    /// While answers still arrive, or the store is slow, as on a machine that is short of cores, `timeout`
    /// is extended to `most`. Returns the answers as of that moment.
    Answers await(Milliseconds timeout, Milliseconds most) const {
      std::unique_lock lock(shared_->mutex);
      for (;;) {
        const auto now = Clock::now();
        if (settled_by(now, timeout, most)) return answers_by(now, timeout);
        const auto end = since_ + (now < since_ + timeout ? timeout : most);
        shared_->changed.wait_until(lock, std::min<Clock::time_point>(end, now + trickle / 4));
      }
    }
    /// The same without blocking: nothing where `await` would block.
    [[nodiscard]] std::optional<Answers> poll(Milliseconds timeout, Milliseconds most) const {
      std::lock_guard lock(shared_->mutex);
      const auto now = Clock::now();
      if (!settled_by(now, timeout, most)) return std::nullopt;
      return answers_by(now, timeout);
    }

   private:
    friend struct Shared;
    // No longer than this between two answers of ranks that are alive.
    static constexpr Milliseconds trickle{400};

    // A rank that has not answered is silent only where the store answers, where this rank's own listener has
    // answered a question that is as new, and where several looks in a row have found no answer of any rank.
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
        if (shared_->answered_since(rank, since_))
          answers.positions[rank] = position_in(shared_->statuses[rank].text, name_);
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
    Clock::time_point oldest_;  // when a question was heard whose answers serve for this one
  };

  /// Asks the other ranks of a group how far they are, and blocks until the question is settled.
  [[nodiscard]] Answers ask(const GroupStatus& group, Milliseconds share, Milliseconds timeout,
                            Milliseconds most) {
    return Question(*this, group, share).await(timeout, most);
  }

  /// While it lives, news abort the wait for `message`, which Gloo does not let us interrupt otherwise; so
  /// does the listener's next look at the clock after `due`.
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

  /// What a rank has last said of its groups.
  struct Status {
    std::int64_t question = 0;  // the newest that it answers
    Clock::time_point asked;    // when this rank asked that, or took over another rank's question
    std::string text;
  };

  void tell(Milliseconds limit, std::function<void(const StorePtr&)> work) noexcept {
    try {
      {
        std::lock_guard lock(shared_->mutex);
        if (shared_->failed_elsewhere()) return;
        // A store that has just left a question unanswered is not waited for again.
        if (shared_->store_answered < shared_->asked &&
            Clock::now() > shared_->asked + std::chrono::seconds(1))
          limit = std::min(limit, Milliseconds(200));
      }
      perform(std::move(work), Clock::now() + limit);
    } catch (...) {  // no memory: the others see the connections close
    }
  }
  void post(Milliseconds limit, std::string message) noexcept {
    tell(limit, [own = shared_->rank, size = shared_->size, message = std::move(message)](
                    const StorePtr& store) { StoreMailbox(store, own, size).post(message); });
  }

  // The position in a group that a status text names: a line "<group> <sequence> <operation>" for each group.
  static Position position_in(const std::string& status, const std::string& group) {
    const std::string front = "\n" + group + " ";
    const auto found = status.find(front);
    if (found == std::string::npos) return {0, "nothing"};
    const auto begin = found + front.size();
    return parse(status.substr(begin, status.find('\n', begin) - begin));
  }
  static Position parse(const std::string& text) {
    const auto space = text.find(' ');
    return {std::strtoull(text.c_str(), nullptr, 10),
            space == std::string::npos ? std::string() : printable(text.substr(space + 1))};
  }

  /// What the two threads and the program share.
  struct Shared {
    Shared(int own_rank, int world_size, Connect connect_to_store)
        : rank(own_rank), size(world_size), connect(std::move(connect_to_store)) {}

    const int rank, size;
    const Connect connect;
    std::mutex mutex;
    std::condition_variable changed;  // for those who wait for news, answers and jobs
    std::condition_variable work;     // for the sender
    std::atomic<std::uint64_t> version{0};
    bool stopping = false, noticed = false;
    int threads_ended = 0;
    std::optional<Failure> failure;
    std::map<std::string, std::map<int, Position>> departed;
    std::vector<std::shared_ptr<const GroupStatus>> groups;
    std::map<c10d::Work*, Clock::time_point> messages;
    std::deque<std::shared_ptr<Job>> jobs;
    std::vector<const Question*> questions;
    std::map<int, Status> statuses;
    Clock::time_point asked;  // the last question of this process
    Clock::time_point store_answered, last_answer;
    int idle_looks = 0;               // for answers, since the last one was found
    std::int64_t heard_question = 0;  // the newest that the listener has seen
    Clock::time_point heard_question_at;

    // Of one store operation.
    static constexpr Milliseconds operation_limit{3000};
    // Between two looks of a listener that nobody wakes: a store that ends or falls silent is noticed by
    // then.
    static constexpr Milliseconds period{5000};
    // Over which the ranks of a large world spread their questions, so that most find one to share.
    static constexpr Milliseconds spread{30};

    template <class Thread>
    void run(Thread&& thread) noexcept {
      try {
        thread();
      } catch (...) {  // no memory, or no store: the other ranks notice the closed connections
      }
      std::lock_guard lock(mutex);
      ++threads_ended;
      changed.notify_all();
    }

    // There is nothing more to learn then, and the store may be gone at any moment.
    [[nodiscard]] bool failed_elsewhere() const {
      return failure && !failure->vague && failure->rank != rank;
    }

    [[nodiscard]] bool answered_since(int other, Clock::time_point since) const {
      const auto found = statuses.find(other);
      return found != statuses.end() && found->second.asked >= since;
    }

    // ---- The listener.

    void listen() {
      std::optional<StoreMailbox> board;
      StorePtr store;
      bool lost = false;  // the connection was closed by the other side
      Milliseconds hole_pause{20};
      for (;;) {
        auto start = Clock::now();
        Milliseconds limit = lost ? std::chrono::seconds(1) : operation_limit;
        try {
          if (!store) {
            store = connect(limit);
            store->setTimeout(operation_limit);
            if (board)
              board->reconnect(store);
            else
              board.emplace(store, rank, size);
            board->set_status(status_text(0));
            lost = false;
          }
          bool woken = true;  // by what was posted before this thread began
          for (;;) {
            start = Clock::now();
            limit = operation_limit;
            hear(*store, *board, woken);
            if (over()) break;
            if (woken) std::this_thread::sleep_for(board->pause());
            hole_pause = board->incomplete() ? std::min(2 * hole_pause, period) : Milliseconds(20);
            start = Clock::now();
            limit = board->incomplete() ? hole_pause : period;
            woken = board->sleep(limit);
            interrupt_due();
          }
          break;
        } catch (const CommunicationError& damage) {  // the mailbox cannot be read, now or later
          std::unique_lock lock(mutex);
          note({0, false, damage.what()}, lock);
          break;
        } catch (const std::exception&) {
          store.reset();
          std::unique_lock lock(mutex);
          if (stopping) return;
          if (lost) {
            if (host_has_left()) return;
            note({0, false,
                  "the store in which the ranks meet is gone, so the process that hosts it has ended"},
                 lock);
            break;
          }
          // An operation that the store does not answer takes its whole time. One that ends before has lost
          // its connection; whether the store is gone is found out by a new one.
          lost = Clock::now() - start < limit - limit / 10;
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

    void hear(c10d::Store& store, StoreMailbox& board, bool woken) {
      const auto news = board.news();
      bool look = !woken;  // the rank that posted a failure may have died before it notified anyone
      std::int64_t asked = 0;
      for (const Message& notice : news) {
        if (notice.kind == "asked") asked = std::max(asked, notice.number);
        look = look || notice.kind == "look" || notice.kind == "failed";
      }
      if (asked > 0) {
        board.set_status(status_text(asked));
        std::lock_guard lock(mutex);
        heard_question = std::max(heard_question, asked);
        heard_question_at = Clock::now();
        work.notify_all();
      }
      if (look)
        if (const auto text = World::published_failure(store)) learn(*text);
      for (const Message& notice : news) learn(notice);
    }

    [[nodiscard]] std::string status_text(std::int64_t question) {
      std::string text = std::to_string(question);
      std::lock_guard lock(mutex);
      for (const auto& group : groups) text += fmt::format("\n{} {}", group->name, group->text());
      return text;
    }

    void learn(const std::string& published) {
      std::unique_lock lock(mutex);
      if (!failure || failure->vague) note(Failure::parse(published), lock);
    }

    void learn(const Message& notice) {
      if (notice.kind == "failed") {
        std::unique_lock lock(mutex);
        note({std::atoi(notice.word(0).c_str()), true, printable(notice.rest(1))}, lock);
      } else if (notice.kind == "departed") {
        std::unique_lock lock(mutex);
        departed[notice.word(0)][std::atoi(notice.word(1).c_str())] = parse(notice.rest(2));
        announce(lock);
      }
    }

    // The first failure counts, and its words come before its mere announcement.
    void note(Failure found, std::unique_lock<std::mutex>& lock) {
      if (!failure || (failure->vague && !found.vague)) failure = std::move(found);
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

    // Where no launcher hosts the store, rank 0 does: once it has left every group that it shares with this
    // rank in good order, the store may go.
    [[nodiscard]] bool host_has_left() const {
      return std::all_of(groups.begin(), groups.end(), [&](const auto& group) {
        if (std::find(group->ranks.begin(), group->ranks.end(), 0) == group->ranks.end()) return true;
        const auto left = departed.find(group->name);
        return left != departed.end() && left->second.contains(0);
      });
    }

    // A rank that is busy with something else than collectives would outlive the others by as long as that
    // takes.
    void end_unless_noticed() {
      std::unique_lock lock(mutex);
      if (!failure || failure->rank == rank) return;
      const bool told = changed.wait_for(lock, std::chrono::seconds(2), [&] { return stopping || noticed; });
      if (!told) fail_process(describe(std::make_exception_ptr(PeerError(failure->sentence()))));
    }

    // ---- The sender.

    /// A question of this rank, or of another whose answers serve as well.
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
          if (!store) store = connect(operation_limit);
          store->setTimeout(job ? std::chrono::ceil<Milliseconds>(job->until - now) : operation_limit);
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
      // The listener sleeps in the store.
      if (!store) store = connect(std::chrono::milliseconds(500));
      store->setTimeout(std::chrono::milliseconds(500));
      StoreMailbox(store, rank, size).post("left");
    }

    // The ranks that have not answered the newest of the questions that they are asked.
    [[nodiscard]] std::vector<int> unanswered() const {
      std::vector<int> missing;
      for (const Question* question : questions)
        for (const int other : question->ranks_)
          if (!answered_since(other, question->since_)) missing.push_back(other);
      std::sort(missing.begin(), missing.end());
      missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
      return missing;
    }

    // One look for answers, to a new question where there is a need for one. Returns when to look again.
    Milliseconds ask_once(const StorePtr& store, Round& round) {
      StoreMailbox board(store, rank, size);
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
      if (post) round.number = board.post("asked");
      const auto texts = board.statuses(missing);
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
};

}  // namespace lockstep::detail
