#include "lockstep/world/detail/run_state.hpp"

#include <algorithm>
#include <functional>
#include <memory>
#include <set>

#include "support/catch.hpp"
#include "world/virtual_time.hpp"

namespace run_state_test {

using namespace std::chrono_literals;
using namespace lockstep::detail;
using lockstep::FailedCall;
using lockstep::Failure;
using lockstep::FailureKind;
using Time = RunState::Time;
using Duration = Time::duration;
using Fill = std::function<void(FrameWriter&)>;

constexpr Duration heartbeat = 20s;

enum class Fault {
  none,
  killed,
  stopped,
  cut,
  throws,
  other_call,
  exits_after_other_call,
  leaves,
  never_joins,
  ends_early,
  late
};
constexpr Fault faults[] = {Fault::none,
                            Fault::killed,
                            Fault::stopped,
                            Fault::cut,
                            Fault::throws,
                            Fault::other_call,
                            Fault::exits_after_other_call,
                            Fault::leaves,
                            Fault::never_joins,
                            Fault::ends_early,
                            Fault::late};

// Writes the request of a rank that comes to a meeting.
Fill meets(const std::string& name, bool lasts, const std::vector<int>& ranks = {}) {
  return [=](FrameWriter& out) { out.text(name).value(ranks).value(lasts); };
}

// One run in virtual time: the store, its ranks, and a network that keeps the order of each connection alone.
// The store is RunState itself. The ranks are a model of ControlPlane and CallWatch, which decide by the same RankView,
// Question and Silence.
class Simulation : lockstep_test::VirtualTime {
 public:
  Simulation(std::uint64_t seed, int size, Fault fault, int calls = 6)
      : VirtualTime(seed), size_(size), calls_(calls), fault_(fault), state_(1500ms) {
    culprit_ = static_cast<int>(draw(0, size - 1));
    fault_call_ = draw(1, calls);
    gloo_ = draw(0, 1) == 1;
    slow_ = draw(0, 9) == 0;
    exits_ = draw(0, 3) == 0;
    mixes_ = draw(0, 1) == 1;
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(std::make_unique<Rank>(rank));
      const bool is_late = fault_ == Fault::late && rank == culprit_;
      if (fault_ == Fault::never_joins && rank == culprit_) continue;
      at(milliseconds(0, 100) + (is_late ? Duration(30s) : Duration(0)),
         [this, rank] { start(*ranks_[at_(rank)]); });
    }
    ranks_[at_(culprit_)]->culprit = fault_ != Fault::none && fault_ != Fault::late;
    if (fault_ == Fault::never_joins)  // its launcher sees it end, as that of a program that returns at once
      at(10s, [this] { take({.kind = Event::ended, .rank = culprit_, .failure = {.code = 0}}); });
  }

  void run() {
    run_events([this](Time time) { tick_until(time); }, [this] { deliver(); });
    tick_until(now_ + 10s);
  }

  // What must hold whatever has happened.
  void check() {
    const RunSummary summary = summarize();
    const Failure first = summary.failure.value_or(Failure{});
    CAPTURE(culprit_, static_cast<int>(first.kind), first.rank, first.message);
    for (const auto& rank : ranks_) {
      CAPTURE(rank->number);
      const bool gone = rank->culprit && (fault_ == Fault::killed || fault_ == Fault::stopped ||
                                          fault_ == Fault::cut || fault_ == Fault::never_joins);
      if (!gone) REQUIRE(rank->ended);
      if (rank->ended && fault_at_) REQUIRE(rank->ended_at - *fault_at_ < heartbeat + 20s);
      // Calls that differ may be found after the last: then the run ends by the summary's failure.
      const bool late = fault_ == Fault::other_call || (mixes_ && fault_call_ == calls_);
      if (rank->ended && !(calls_differ() && late))
        REQUIRE((rank->code != 0) == (fails() && !(rank->culprit && ends_well())));
    }
    // The others may have gone on, and end since the culprit has left before they have told the store of its last call.
    if (fault_ == Fault::exits_after_other_call && mixes_ && fault_call_ < calls_ && !summary.failure) return;
    REQUIRE(summary.failure.has_value() ==
            (fails() && fault_ != Fault::never_joins && (!ends_well() || calls_differ())));
    if (!summary.failure) return;
    if (summary.failure->kind == FailureKind::mismatch)
      REQUIRE((summary.failure->rank == culprit_ || summary.failure->cause == culprit_));
    else
      REQUIRE(summary.failure->rank == culprit_);
    REQUIRE((summary.failure->kind == FailureKind::mismatch) == calls_differ());
  }

  [[nodiscard]] bool fails() const { return fault_ != Fault::none && fault_ != Fault::late; }
  // The culprit ends with exit code 0 while the others still wait for it.
  [[nodiscard]] bool ends_well() const {
    return fault_ == Fault::leaves || fault_ == Fault::ends_early || fault_ == Fault::exits_after_other_call;
  }
  [[nodiscard]] bool calls_differ() const {
    return fault_ == Fault::other_call || fault_ == Fault::exits_after_other_call;
  }
  // Messages and bytes to and from one rank, the most of any, and of the store.
  struct Traffic {
    std::uint64_t messages = 0, bytes = 0, running = 0;  // running: messages since it is in the communicator
  };
  [[nodiscard]] Traffic most_of_a_rank() const {
    Traffic most;
    for (const auto& rank : ranks_) {
      most.messages = std::max(most.messages, rank->traffic.messages);
      most.running = std::max(most.running, rank->traffic.running);
      most.bytes = std::max(most.bytes, rank->traffic.bytes);
    }
    return most;
  }
  [[nodiscard]] Traffic of_the_store() const { return all_; }
  [[nodiscard]] Duration length() const { return now_ - begin_; }

 private:
  struct Rank {
    explicit Rank(int number) : number(number), view{number} {}
    int number;
    RankView view;
    std::uint64_t connection = 0, next_id = 1;
    Time last_up{}, last_down{};  // when the last message of a direction arrives
    std::map<std::uint64_t, std::function<void(std::string_view)>> replies;
    bool culprit = false, alive = true, open = false, joined = false, reads = true, ended = false,
         waits = false, met = false, in_group = false;
    int code = 0;
    Time ended_at{};
    std::uint64_t call = 0, hash = 0, reported = ~std::uint64_t{0};
    std::vector<RecordedCall> history;
    Silence silence;
    Traffic traffic;
    std::vector<std::string> held;  // what a stopped rank has not read
  };

  static std::size_t at_(int rank) { return static_cast<std::size_t>(rank); }
  void tick_until(Time time) {
    while (state_.next() <= time) {
      now_ = std::max(now_, state_.next());
      state_.tick(now_);
      deliver();
    }
  }
  void send(Rank& rank, StoreOperation operation, const Fill& fill,
            std::function<void(std::string_view)> reply = nullptr) {
    if (!rank.open) return;
    FrameWriter out;
    fill(out);
    const std::uint64_t id = rank.next_id++;
    if (reply) rank.replies[id] = std::move(reply);
    count(rank, out.payload().size() + 13);
    rank.last_up = std::max(rank.last_up, now_ + delay());
    at(rank.last_up - now_,
       [this, number = rank.connection, id, operation, bytes = std::string(out.payload())] {
         FrameReader in(bytes);
         if (operation == StoreOperation::cancel && connections_.contains(number))
           return state_.cancel(number, in.integer());
         if (connections_.contains(number)) CHECK(state_.serve(number, id, operation, in, now_));
       });
  }
  void deliver() {
    for (auto& [to, frame] : state_.take_outgoing())
      for (const std::uint64_t number : to) {
        const auto found = connections_.find(number);
        REQUIRE(found != connections_.end());  // nothing is sent to who is not of this run
        Rank& rank = *found->second;
        count(rank, frame.size());
        rank.last_down = std::max(rank.last_down, now_ + delay());
        at(rank.last_down - now_, [this, &rank, frame = frame] { arrive(rank, frame); });
      }
  }
  void count(Rank& rank, std::size_t bytes) {
    for (Traffic* traffic : {&rank.traffic, &all_}) {
      ++traffic->messages;
      traffic->running += rank.in_group;
      traffic->bytes += bytes;
    }
  }
  void arrive(Rank& rank, const std::string& frame) {
    if (!rank.alive || rank.ended || !rank.open) return;
    if (!rank.reads) return rank.held.push_back(frame);
    FrameReader in(std::string_view(frame).substr(4));
    const std::uint64_t id = in.integer();
    if (id == push_id) return take_push(rank, static_cast<StorePush>(in.byte()), in);
    in.byte();
    const auto found = rank.replies.extract(id);
    if (!found.empty()) found.mapped()(in.rest());
  }
  void take(const Event& event) {  // from a launcher, over a connection of its own
    const std::string bytes = std::string(FrameWriter().value(event).payload());
    FrameReader in(bytes);
    connections_[1] = launcher_.get();
    CHECK(state_.serve(1, 1, StoreOperation::publish, in, now_));
  }
  void publish(Rank& rank, const Event& event) {
    send(rank, StoreOperation::publish, [&](FrameWriter& out) { out.value(event); });
  }

  void start(Rank& rank) {
    rank.connection = static_cast<std::uint64_t>(rank.number) + 2;
    connections_[rank.connection] = &rank;
    rank.open = true;
    const RankIdentity identity{.process = formatted("node pid {}", 100 + rank.number), .host = "node"};
    send(rank, StoreOperation::join,
         [&](FrameWriter& out) { out.value(rank.number).value(size_).value(identity).value(true); });
    at(60s, [this, &rank] {  // the timeout of the rendezvous
      if (!rank.ended && rank.alive && !rank.joined)
        publish(rank, {.kind = Event::refused, .failure = {.message = "a rank did not join"}});
    });
    if (rank.culprit && fault_call_ == 1 && fault_ == Fault::killed)
      return fail(rank);  // before its first communicator
    send(rank, StoreOperation::meet, meets("", true), [this, &rank](std::string_view reply) {
      if (!decoded<Meeting>(reply).met()) return end(rank, 1);
      rank.joined = true;
      if (rank.culprit && fault_ == Fault::ends_early) {
        fault_at_ = now_;
        return end(rank, 0);
      }
      send(rank, StoreOperation::subscribe, [&](FrameWriter& out) { out.value(rank.number); });
      at(milliseconds(0, 100), [this, &rank] { meet(rank); });
    });
  }
  // The rank comes to make the communicator, waits a moment at a time, and asks in between who is missing.
  void meet(Rank& rank) {
    if (!acts(rank)) return;
    const std::uint64_t id = rank.next_id;
    const auto take = [this, &rank](const Meeting& found) {
      if (!acts(rank) || std::exchange(rank.met, true)) return;
      if (found.missing > 0) {
        REQUIRE(found.ended == culprit_);
        return end(rank, 1);
      }
      publish(rank, {.kind = Event::connected, .rank = rank.number});
      rank.in_group = true;
      report_often(rank);
      compute(rank);
    };
    send(rank, StoreOperation::meet, meets("g", true),
         [take](std::string_view reply) { take(decoded<Meeting>(reply)); });
    at(milliseconds(1, 200), [this, &rank, take, id] {
      if (!acts(rank) || rank.met) return;
      rank.replies.erase(id);  // the reply may be on its way
      send(rank, StoreOperation::cancel, [&](FrameWriter& out) { out.value(id); });
      const auto name = [](FrameWriter& out) { out.value(std::optional<std::string>("g")); };
      send(rank, StoreOperation::summary, name, [this, &rank, take](std::string_view reply) {
        const auto found = decoded<RunSummary>(reply).meeting;
        if (found.over()) return take(found);
        if (!rank.met) meet(rank);
      });
    });
  }
  void compute(Rank& rank) {
    at(milliseconds(1, slow_ ? 4000 : 50), [this, &rank] { enter(rank); });
  }
  void enter(Rank& rank) {
    if (!acts(rank)) return;
    if (rank.call == calls_) return leave(rank);
    if (rank.culprit && rank.call + 1 == fault_call_ && !calls_differ()) return fail(rank);
    const bool other = rank.culprit && calls_differ() && rank.call + 1 == fault_call_;
    if (other) fault_at_ = now_;
    const std::string content = other ? "broadcast" : "all_reduce";
    rank.hash = next_hash(hash_of(content, rank.hash), 0);
    ++rank.call;
    rank.history.push_back({rank.hash, content, {.operation = content, .sequence = rank.call}});
    if (other && fault_ == Fault::exits_after_other_call) return fail(rank);
    rank.waits = true;
    look(rank);
    if (rank.ended) return;
    const auto present = std::count_if(ranks_.begin(), ranks_.end(), [&](const auto& one) {
      return one->call >= rank.call && (mixes_ || one->history[rank.call - 1].hash == rank.hash);
    });
    if (present == size_) {
      for (auto& one : ranks_)
        if (one->waits && one->call == rank.call)
          at(milliseconds(1, 3), [this, one = one.get(), call = rank.call] {
            if (!acts(*one) || one->call != call) return;
            one->waits = false;
            compute(*one);
          });
      return;
    }
    if (gloo_ && std::any_of(ranks_.begin(), ranks_.end(), [](const auto& one) { return !one->alive; }))
      return break_off(rank);
    watch(rank, rank.call, 5s);
  }
  [[nodiscard]] bool acts(const Rank& rank) const {
    return rank.alive && !rank.ended && rank.reads && !rank.view.over();
  }

  // The rank does what its fault is.
  void fail(Rank& rank) {
    fault_at_ = now_;
    switch (fault_) {
      case Fault::throws:
        publish(rank, {.failure = {.rank = rank.number, .message = "boom"}});
        return end(rank, 1);
      case Fault::leaves:
        return leave(rank);
      case Fault::exits_after_other_call:
        end(rank, 0);
        break;
      case Fault::stopped:
        rank.reads = false;
        return;
      case Fault::cut:  // its connection to the store breaks: it ends
        close(rank);
        rank.alive = false;
        break;
      default:
        rank.alive = false;
        at(rank.last_up - now_ + delay(), [this, &rank] { close(rank); });
    }
    if (gloo_)
      for (auto& one : ranks_) at(45ms, [this, one = one.get()] { break_off(*one); });
  }
  void leave(Rank& rank) {
    if (!exits_) {
      report_end(rank);
      publish(rank, {.kind = Event::departed, .rank = rank.number, .group = "g", .position = position(rank)});
      rank.in_group = false;
    }
    // By hand the process that hosts the store outlives the others: here it is a launcher.
    end(rank, 0);
  }
  void end(Rank& rank, int code) {
    if (rank.ended || !rank.alive) return;
    std::vector<RankPosition> last;  // as of WorldState::end
    if (code == 0 && rank.in_group) {
      report_end(rank);
      last = {{"g", position(rank)}};
    }
    publish(rank, {.kind = Event::ended, .rank = rank.number, .failure = {.code = code}, .last = last});
    rank.ended = true;
    rank.code = code;
    rank.ended_at = now_;
    at(rank.last_up - now_ + 1us, [this, &rank] { close(rank); });
  }
  void close(Rank& rank) {
    if (!std::exchange(rank.open, false)) return;
    state_.close(rank.connection, now_);
    connections_.erase(rank.connection);
  }

  static FailedCall position(const Rank& rank) {
    return rank.history.empty() ? FailedCall{} : rank.history.back().call;
  }
  void report_often(Rank& rank) {
    if (!acts(rank)) return;
    report(rank);
    at(500ms, [this, &rank] { report_often(rank); });
  }
  // With the last calls, as GroupStatus does once its rank leaves.
  void report_end(Rank& rank) {
    rank.reported = rank.call;
    report(rank, {{"g", static_cast<std::uint64_t>(size_), {{rank.call, rank.hash}}, rank.history}});
  }
  void report(Rank& rank, std::vector<CallMarks> marks = {}) {
    if (std::exchange(rank.reported, rank.call) != rank.call)
      marks.push_back({"g", static_cast<std::uint64_t>(size_), {{rank.call, rank.hash}}});
    const std::vector<RankPosition> positions{{"g", position(rank)}};
    send(rank, StoreOperation::report, [&](FrameWriter& out) { out.value(positions).value(marks); });
  }
  void take_push(Rank& rank, StorePush kind, FrameReader& in) {
    if (kind == StorePush::question) return report(rank);
    if (kind == StorePush::calls)
      return report(rank, {{"g", static_cast<std::uint64_t>(size_), {}, rank.history}});
    rank.view.learn(in.value<Event>());
    if (rank.view.over()) return end(rank, 1);
    look(rank);
  }
  void look(Rank& rank) {
    if (!rank.waits) return;
    if (rank.view.left_before("g", {.operation = "all_reduce", .sequence = rank.call})) end(rank, 1);
  }

  // The rank waits in `call`: it looks after the others now and then, as CallWatch does.
  void watch(Rank& rank, std::uint64_t call, Duration after) {
    at(after, [this, &rank, call] {
      if (!acts(rank) || !rank.waits || rank.call != call) return;
      look(rank);
      if (rank.ended) return;
      ask(rank, 1500ms, 1500ms, [this, &rank, call](const std::set<int>& silent) {
        if (!rank.waits || rank.call != call) return;
        if (const auto found = rank.silence.add(silent, heartbeat / 4, heartbeat))
          publish(rank,
                  {.failure = {.kind = FailureKind::timed_out, .rank = found->first, .message = "silent"}});
        watch(rank, call, heartbeat / 4);
      });
    });
  }
  // The transport of a rank has failed: it looks for the reason, as Group::cause_of does.
  void break_off(Rank& rank) {
    if (!acts(rank) || !rank.waits) return;
    at(100ms, [this, &rank] {
      if (!acts(rank)) return;
      ask(rank, 1500ms, 5s, [this, &rank](const std::set<int>& silent) {
        if (!silent.empty())
          publish(rank,
                  {.failure = {.kind = FailureKind::died, .rank = *silent.begin(), .message = "is gone"}});
        at(1s, [this, &rank] {
          if (acts(rank)) end(rank, 1);
        });
      });
    });
  }
  void ask(Rank& rank, std::chrono::milliseconds timeout, std::chrono::milliseconds most,
           std::function<void(const std::set<int>& silent)> then) {
    std::vector<int> group;
    for (int other = 0; other < size_; ++other) group.push_back(other);
    report(rank);
    ask_again(rank, std::make_shared<Question>(Question{group, rank.number, now_, timeout, most}),
              std::make_shared<std::set<int>>(), std::move(then), 5ms);
  }
  void ask_again(Rank& rank, std::shared_ptr<Question> question, std::shared_ptr<std::set<int>> answered,
                 std::function<void(const std::set<int>& silent)> then, Duration pause) {
    send(
        rank, StoreOperation::ask,
        [&](FrameWriter& out) { out.text("g").value(question->ranks).value(true); },
        [this, &rank, question, answered, then, pause, asked = now_](std::string_view reply) {
          if (!acts(rank)) return;
          const auto read = [&](int other, const auto&) { answered->insert(other); };
          if (!question->take(decoded<std::vector<RankReport>>(reply), asked, now_, read))
            return at(pause, [=, this, &rank] {
              if (acts(rank)) ask_again(rank, question, answered, then, std::min<Duration>(2 * pause, 100ms));
            });
          std::set<int> silent;
          if (question->answers.conclusive)
            for (const int other : question->ranks)
              if (other != rank.number && !answered->contains(other) &&
                  !question->answers.left.contains(other))
                silent.insert(other);
          then(silent);
        });
  }
  RunSummary summarize() {
    const std::string bytes(FrameWriter().value(std::optional<std::string>("")).payload());
    FrameReader in(bytes);
    CHECK(state_.serve(1, 1, StoreOperation::summary, in, now_));
    const auto sent = state_.take_outgoing();
    return decoded<RunSummary>(std::string_view(sent.back().frame).substr(13));
  }

  int size_, culprit_ = 0;
  std::uint64_t calls_, fault_call_ = 1;
  Fault fault_;
  bool gloo_ = false, slow_ = false;
  bool exits_ = false;  // ranks end without leaving the group before
  bool mixes_ = false;  // calls that differ complete
  RunState state_;
  std::optional<Time> fault_at_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::unique_ptr<Rank> launcher_ = std::make_unique<Rank>(-1);
  std::map<std::uint64_t, Rank*> connections_;
  Traffic all_;
};

void simulate(std::uint64_t seeds) {
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    const Fault fault = faults[seed % std::size(faults)];
    const int size = static_cast<int>(
        seed % 17 == 0 ? 2 + seed % 63 : 2 + seed % 7);  // each fault among few ranks and among many
    CAPTURE(seed, size, static_cast<int>(fault));
    Simulation simulation(seed, size, fault);
    simulation.run();
    simulation.check();
  }
}

TEST_CASE("in virtual time: nobody alive is blamed, the first cause wins, and every survivor ends in time") {
  simulate(500);
}
TEST_CASE("the same with very many seeds", "[.release]") {
  simulate(10'000);
}

// A store without a network: what it replies to connections, which are the ranks of those that join.
struct Store {
  using Replies = std::map<std::uint64_t, std::vector<std::pair<std::uint64_t, std::string>>>;

  explicit Store(const Event& began = {}) : state(1500ms, {}, began) {}

  // Serves request `id` of a connection. Returns whether it is well formed.
  bool serve(std::uint64_t connection, std::uint64_t id, StoreOperation operation, const Fill& fill) {
    FrameWriter out;
    fill(out);
    const std::string bytes(out.payload());
    FrameReader in(bytes);
    const bool good = state.serve(connection, id, operation, in, {});
    for (auto& [to, frame] : state.take_outgoing()) {
      FrameReader reply(std::string_view(frame).substr(4));
      const auto answered = reply.integer();
      for (const auto one : to) replies[one].push_back({answered, std::string(reply.rest().substr(1))});
    }
    return good;
  }
  void join(std::uint64_t connection, int rank, int size) {
    const auto fill = [&](FrameWriter& out) {
      out.value(rank).value(size).value(RankIdentity{.process = fmt::format("a pid {}", rank)}).value(true);
    };
    CHECK(serve(connection, 0, StoreOperation::join, fill));
    replies.clear();
  }
  bool meet(std::uint64_t connection, std::uint64_t id, const std::string& name, bool lasts,
            const std::vector<int>& ranks = {}) {
    replies.clear();
    return serve(connection, id, StoreOperation::meet, meets(name, lasts, ranks));
  }
  Meeting look(const std::string& name) {
    Replies before = std::exchange(replies, {});
    CHECK(serve(98, 1, StoreOperation::summary, [&](FrameWriter& out) { out.value(std::optional(name)); }));
    const auto found = decoded<RunSummary>(replies[98].at(0).second).meeting;
    replies = std::move(before);
    return found;
  }
  void publish(const Event& event) {
    replies.clear();
    serve(99, 1, StoreOperation::publish, [&](FrameWriter& out) { out.value(event); });
    replies.erase(99);
  }
  // The state of the meeting in the only reply to a connection.
  Meeting met(std::uint64_t connection) {
    REQUIRE(replies[connection].size() == 1);
    return decoded<Meeting>(replies[connection][0].second);
  }

  RunState state;
  Replies replies;
};

TEST_CASE("each rank is sent the number of its generation and what has ended the last one, before all else") {
  const Failure died{.kind = FailureKind::died, .rank = 1, .message = "died (SIGKILL)"};
  Store store({.kind = Event::began, .failure = died, .restart = 3});
  store.join(0, 0, 2);
  store.publish({.kind = Event::failed, .failure = {.rank = 0, .message = "no memory"}});
  for (const int rank : {0, 1}) {
    const auto connection = static_cast<std::uint64_t>(rank);
    store.serve(connection, 1, StoreOperation::subscribe, [&](FrameWriter& out) { out.value(rank); });
    const auto& told = store.replies[connection];
    REQUIRE(told.size() == 3);  // of the reply, too
    CHECK(decoded<Event>(told[1].second).restart == 3);
    CHECK(decoded<Event>(told[1].second).failure.message == died.message);
    CHECK(decoded<Event>(told[2].second).kind == Event::failed);
  }
}

TEST_CASE("a rank that gives up its connection has not come to make a communicator") {
  Store store;
  for (const int rank : {0, 1}) store.join(static_cast<std::uint64_t>(rank), rank, 2);
  CHECK(store.meet(0, 1, "group", true));
  CHECK(store.replies.empty());
  store.serve(0, 2, StoreOperation::leave, [](FrameWriter&) {});
  CHECK(store.meet(1, 1, "group", true));
  CHECK(store.met(1).missing == 1);
  CHECK(store.met(1).ended == 0);
  CHECK(store.met(1).over());
}

TEST_CASE("two threads of a rank wait in one meeting, over one connection or two") {
  Store store;
  store.join(10, 0, 2);
  store.join(11, 0, 2);
  CHECK(store.meet(10, 1, "", true));
  CHECK(store.meet(10, 2, "", true));
  CHECK(store.meet(11, 1, "", true));
  CHECK(store.replies.empty());
  store.state.cancel(10, 2);
  CHECK(store.look("").first_missing == std::vector<int>{1});
  CHECK(store.serve(12, 0, StoreOperation::join, [](FrameWriter& out) {
    out.value(1).value(2).value(RankIdentity{.process = "a pid 1"}).value(true);
  }));
  CHECK(store.met(10).met());
  CHECK(store.replies[10][0].first == 1);
  CHECK(store.met(11).met());
  CHECK(store.meet(12, 1, "", true));  // a late asker
  CHECK(store.met(12).met());
  for (const std::uint64_t connection : {10, 11}) CHECK(store.meet(connection, 4, "g", false));
  CHECK(store.replies.empty());
  CHECK(store.meet(12, 2, "g", false));
  for (const std::uint64_t connection : {10, 11, 12}) CHECK(store.met(connection).met());
}

TEST_CASE("only a rank that has joined comes to a meeting, and others may wait in that of all ranks") {
  Store store;
  store.join(10, 0, 2);
  CHECK_FALSE(store.meet(77, 1, "g", true));
  CHECK(store.meet(77, 2, "", true));
  const auto join = [&](std::uint64_t connection, bool stays) {
    return store.serve(connection, 0, StoreOperation::join, [&](FrameWriter& out) {
      out.value(1).value(2).value(RankIdentity{.process = "a pid 1"}).value(stays);
    });
  };
  CHECK(join(11, false));  // a process that joins to tell its failure alone
  CHECK_FALSE(store.meet(11, 1, "g", true));
  for (const std::uint64_t id : {2, 3}) CHECK(store.meet(11, id, "", true));
  CHECK(store.look("").missing == 1);
  store.state.cancel(11, 2);
  CHECK(store.replies.empty());
  CHECK(join(12, true));
  for (const std::uint64_t connection : {11, 77}) CHECK(store.met(connection).met());
}

TEST_CASE("the ranks of a group may be in any order, and one that is none of them is not counted") {
  Store store;
  for (int rank = 0; rank < 6; ++rank) store.join(static_cast<std::uint64_t>(rank), rank, 6);
  const std::vector<int> ranks{4, 1, 3};
  for (const std::uint64_t rank : {0, 5, 2, 3}) CHECK(store.meet(rank, 1, "g", true, ranks));
  CHECK(store.look("g").first_missing == std::vector<int>{4, 1});
  CHECK(store.meet(4, 1, "g", true, ranks));
  CHECK(store.look("g").first_missing == std::vector<int>{1});
  store.state.cancel(4, 1);
  CHECK(store.meet(1, 1, "g", true, ranks));
  for (const std::uint64_t rank : {0, 1, 2, 3, 5}) CHECK(store.met(rank).met());
  CHECK(store.look("g").met());
  CHECK(store.meet(4, 2, "g", true, ranks));  // it is known to be made
  CHECK(store.met(4).met());
}

TEST_CASE("a meeting in which nobody waits, and no coming lasts, is forgotten") {
  Store store;
  for (int rank = 0; rank < 3; ++rank) store.join(static_cast<std::uint64_t>(rank), rank, 3);
  CHECK(store.meet(0, 1, "g", false));
  CHECK(store.look("g").missing == 2);
  store.state.cancel(0, 1);
  CHECK(store.look("g").lowest == -1);
  CHECK(store.meet(1, 1, "g", true));
  store.state.cancel(1, 1);  // its coming lasts
  CHECK(store.look("g").lowest == 1);
  CHECK(store.look("g").first_missing == std::vector<int>{0, 2});
  // So is one that has ended without all ranks, each time.
  store.publish({.kind = Event::ended, .rank = 2, .failure = {.code = 3}});
  for (int times = 0; times < 70'000; ++times) {
    if (!store.meet(0, 2, fmt::format("throws {}", times), false)) FAIL("it is kept");
    if (store.replies[0].size() != 1) FAIL("it waits");
  }
  CHECK(store.met(0).ended == 2);
  CHECK(store.met(0).exit_code == 3);
}

TEST_CASE("a failure or a refusal ends the rendezvous, and the first end of it stays") {
  const Event failed{.failure = {.rank = 1, .message = "boom"}};
  const Event refused{.kind = Event::refused, .failure = {.cause = 2, .message = "it is late"}};
  const Event ended{.kind = Event::ended, .rank = 1, .failure = {.code = 0}};
  for (const auto& [first, second] : {std::pair(failed, refused), {refused, failed}, {ended, failed}}) {
    Store store;
    store.publish({.kind = Event::connected, .rank = 0});  // before any has joined
    store.join(10, 0, 3);
    CHECK(store.meet(10, 1, "", true));
    CHECK(store.replies.empty());
    store.publish(first);
    CHECK(store.met(10).over());
    CHECK_FALSE(store.met(10).met());
    CHECK(store.met(10).ended == (first.kind == Event::ended ? 1 : -1));
    store.publish(second);
    CHECK(store.replies.empty());
    store.join(11, 2, 3);
    CHECK(store.meet(11, 1, "", true));
    const auto late = store.met(11);
    CHECK(late.over());
    REQUIRE(late.end.has_value() == (first.kind != Event::ended));
    if (late.end) CHECK(late.end->failure.message == first.failure.message);
  }
  Store store;  // that it has not ended before any has joined
  store.publish(failed);
  store.join(10, 0, 3);
  CHECK(store.meet(10, 1, "", true));
  REQUIRE(store.met(10).end.has_value());
}

TEST_CASE(
    "once all ranks have joined, a process that is refused ends nothing, and the ranks are told of it") {
  Store store;
  for (int rank = 0; rank < 2; ++rank) store.join(static_cast<std::uint64_t>(rank), rank, 2);
  store.serve(0, 1, StoreOperation::subscribe, [](FrameWriter& out) { out.value(0); });
  store.publish({.kind = Event::refused, .failure = {.message = "a second rank 1"}});
  REQUIRE(store.replies[0].size() == 1);
  CHECK(store.replies[0][0].first == push_id);
  CHECK(store.meet(1, 1, "", true));
  CHECK(store.met(1).met());
}

// Two ranks that are in the communicator "g" after `calls` collectives each, of which the store has been told.
std::unique_ptr<Store> two_in_group(std::uint64_t calls) {
  auto store = std::make_unique<Store>();
  for (const int rank : {0, 1}) {
    const auto connection = static_cast<std::uint64_t>(rank);
    store->join(connection, rank, 2);
    store->serve(connection, 1, StoreOperation::subscribe, [&](FrameWriter& out) { out.value(rank); });
    store->serve(connection, 2, StoreOperation::report, [&](FrameWriter& out) {
      out.value(std::vector{RankPosition{"g", {.operation = "barrier", .sequence = calls}}})
          .value(std::vector{CallMarks{"g", 2, {{calls, 7}}}});
    });
  }
  return store;
}

TEST_CASE("ranks that end in a communicator after different numbers of calls are the run's failure") {
  for (const std::uint64_t calls : {3, 4}) {
    const auto store = two_in_group(3);
    const auto end = [&](int rank, std::uint64_t sequence) {
      store->publish({.kind = Event::ended,
                      .rank = rank,
                      .failure = {.code = 0},
                      .last = {{"g", {.operation = "barrier", .sequence = sequence}}}});
    };
    end(1, 3);
    CHECK(store->replies.empty());
    end(0, calls);
    std::vector<Failure> failures;
    for (const auto& [id, event] : store->replies[1])
      if (const auto pushed = decoded<Event>(event); pushed.kind == Event::failed)
        failures.push_back(pushed.failure);
    REQUIRE(failures.size() == (calls == 3 ? 0 : 1));
    if (calls == 3) continue;
    CHECK(failures[0].kind == FailureKind::mismatch);
    CHECK(failures[0].rank == 0);
    CHECK(failures[0].cause == 1);
  }
}

TEST_CASE("a rank that waits is told of one that has ended in the communicator before") {
  const auto store = two_in_group(3);
  store->publish({.kind = Event::ended,
                  .rank = 1,
                  .failure = {.code = 0},
                  .last = {{"g", {.operation = "barrier", .sequence = 2}}}});
  REQUIRE(store->replies[0].size() == 1);
  RankView view{0};
  view.learn(decoded<Event>(store->replies[0][0].second));
  const auto left = view.left_before("g", {.operation = "barrier", .sequence = 3});
  REQUIRE(left.has_value());
  CHECK(left->kind == FailureKind::left_early);
  CHECK(left->rank == 1);
}

TEST_CASE("calls in an aborted communicator are not compared") {
  const auto store = two_in_group(3);
  store->publish({.kind = Event::aborted, .rank = 0, .group = "g", .failure = {.rank = 0}});
  store->replies.clear();
  store->serve(1, 3, StoreOperation::report, [](FrameWriter& out) {
    out.value(std::vector<RankPosition>()).value(std::vector{CallMarks{"g", 2, {{3, 8}}}});
  });
  store->publish({.kind = Event::ended, .rank = 1, .failure = {.code = 0}, .last = {{"g", {.sequence = 9}}}});
  CHECK(store->replies.empty());
}

TEST_CASE("no request may name more ranks than a run has, and no event one that it cannot have") {
  Store store;
  store.join(0, 0, 1);
  const std::vector<int> many(most_ranks + 1);
  CHECK(!store.meet(0, 1, "group", true, many));
  CHECK(!store.serve(0, 2, StoreOperation::ask,
                     [&](FrameWriter& out) { out.text("g").value(many).value(true); }));
  for (const int rank : {-1, most_ranks}) store.publish({.kind = Event::ended, .rank = rank});
  CHECK(store.serve(0, 3, StoreOperation::summary,
                    [](FrameWriter& out) { out.value(std::optional<std::string>()); }));
  CHECK(decoded<RunSummary>(store.replies[0].at(0).second).ended == 0);
}

TEST_CASE("of many ranks that leave a communicator in which another waits, all are told of one") {
  constexpr int size = 64;
  RunState state(1500ms);
  const auto request = [&](int rank, StoreOperation operation, const Fill& fill) {
    FrameWriter out;
    fill(out);
    const std::string bytes(out.payload());
    FrameReader in(bytes);
    REQUIRE(state.serve(static_cast<std::uint64_t>(rank) + 1, 1, operation, in, {}));
  };
  const auto call = [](std::uint64_t sequence) {
    return lockstep::FailedCall{.operation = "all_reduce", .sequence = sequence};
  };
  for (int rank = 0; rank < size; ++rank)
    request(rank, StoreOperation::subscribe, [&](FrameWriter& out) { out.value(rank); });
  request(1, StoreOperation::report, [&](FrameWriter& out) {
    out.value(std::vector<RankPosition>{{"g", call(2)}}).value(std::vector<CallMarks>{{"g", size, {{2, 5}}}});
  });
  static_cast<void>(state.take_outgoing());
  for (int rank = 2; rank < size; ++rank)
    request(rank, StoreOperation::publish, [&](FrameWriter& out) {
      out.value(Event{.kind = Event::departed, .rank = rank, .group = "g", .position = call(1)});
    });
  std::size_t told = 0;
  for (const auto& [to, frame] : state.take_outgoing()) told += to.size();
  CHECK(told == size + size - 2);  // of the first; and the replies
}

TEST_CASE("messages and bytes of a rank and of the store, from 2 to 4096 ranks", "[.release]") {
  fmt::print("{:>6} {:>8} | {:>8} {:>8} {:>9} | {:>9} {:>12} | {:>6}\n", "ranks", "fault", "messages",
             "running", "bytes", "store's", "bytes", "s");
  for (const int size : {2, 8, 64, 512, 4096})
    for (const Fault fault : {Fault::none, Fault::throws, Fault::other_call, Fault::leaves}) {
      Simulation simulation(1, size, fault, 3);
      simulation.run();
      simulation.check();
      const auto rank = simulation.most_of_a_rank(), all = simulation.of_the_store();
      CHECK(rank.running < 50);
      CHECK(all.messages < 70 * static_cast<std::uint64_t>(size));
      fmt::print("{:>6} {:>8} | {:>8} {:>8} {:>9} | {:>9} {:>12} | {:>6.1f}\n", size, static_cast<int>(fault),
                 rank.messages, rank.running, rank.bytes, all.messages, all.bytes,
                 simulation.length() / 1.0s);
    }
}

}  // namespace run_state_test
