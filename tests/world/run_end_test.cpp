#include "lockstep/world/detail/run_end.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/world/detail/run_state.hpp"
#include "support/catch.hpp"
#include "world/virtual_time.hpp"

namespace run_end_test {

using namespace std::chrono_literals;
using namespace lockstep::detail;
using lockstep::FailedCall;
using lockstep::Failure;
using lockstep::FailureKind;
using lockstep_test::VirtualTime;

// `asked`: a signal to its launcher asks the rank to end, which it does by an exception or a code of its own.
enum class Fault { throws, dies, returns_code, wrong_usage, asked };

// The starts of a run on several hosts in virtual time. The stores are RunStates, of which the first host's launcher keeps one
// at a time. The launchers are a model of launch_here and next_start, which decide by the same RunEnd, greeting and
// is_worth_a_restart; the ranks know each other by the store alone.
class Starts : VirtualTime {
 public:
  explicit Starts(std::uint64_t seed) : VirtualTime(seed) {
    const auto hosts = draw(1, 4);
    most_ = static_cast<int>(draw(0, 3));
    for (std::uint64_t i = 0; i < hosts; ++i) {
      const int ranks = static_cast<int>(draw(1, 3));
      hosts_.push_back(std::make_unique<Host>(Host{.first = size_, .ranks = ranks}));
      size_ += ranks;
    }
    const int bad = static_cast<int>(draw(0, 4));
    for (int start = 0; start < bad; ++start) {
      const bool mends = draw(0, 9) > 0;
      for (auto left = mends && draw(0, 4) == 0 ? 2 : 1; left > 0; --left)
        faults_[{start, static_cast<int>(draw(0, size_ - 1))}] =
            static_cast<Fault>(mends ? draw(0, 2) : draw(3, 4));
      last_ = start + 1;
      mends_ = mends;
      if (!mends) break;
    }
    for (auto& host : hosts_) at(milliseconds(0, 2'000), [this, host = host.get()] { start(*host); });
  }

  void run() {
    run_events(
        [this](Time time) {
          for (; store_ && store_->next() <= time; deliver()) {
            now_ = std::max(now_, store_->next());
            store_->tick(now_);
          }
        },
        [this] { deliver(); });
  }
  // All hosts have decided alike, and in time.
  void check() const {
    const bool given_up = !mends_ || last_ > most_;
    const int last = mends_ ? std::min(last_, most_) : std::min(last_ - 1, most_);
    for (const auto& host : hosts_) {
      CAPTURE(host->first, host->ranks, host->start, host->code, size_, last, most_);
      REQUIRE(host->done);
      // The last start may fail before a slow host comes to it: that one gives up after a while.
      const bool missed = given_up && host->start < last && host->code != 0;
      if (!missed) REQUIRE(host->start == last);
      REQUIRE(host->ended_at - begin_ < 15s * (last + 1) + (missed ? 25s : 0s));
      if (!given_up) REQUIRE(host->code == 0);
      for (int rank = host->first; given_up && rank < host->first + host->ranks; ++rank)
        if (faults_.contains({last, rank})) REQUIRE(host->code != 0);
    }
  }

 private:
  struct Rank {
    int number, start;
    std::uint64_t connection = 0;
    bool alive = true, told = false;
    Time heard = {};  // when its last news has come or comes
  };
  struct Host {
    int first, ranks;
    int start = -1;  // of its ranks
    std::vector<Rank*> alive = {};
    std::vector<Failure> failures = {};
    bool told = false;  // its launcher has told a failure
    Time tells_until = {};
    bool asked = false;  // to end
    bool done = false;
    int code = 0;
    Time ended_at = {};
  };

  // Calls `then` with the answer to the hello of a process of `start`, without one if nothing listens.
  void greet(int start, const std::function<void(std::optional<StoreStatus>)>& then) {
    at(2 * delay(), [this, start, then] {
      if (hosts_[0]->done) return then(std::nullopt);
      if (!store_) return at(5ms, [this, start, then] { greet(start, then); });  // the listener's queue
      then(greeting(start, hosts_[0]->start));
    });
  }
  // Serves a request of a connection to the store of `start`. Returns the reply, which is empty if there is none.
  std::string serve(int start, std::uint64_t connection, StoreOperation operation,
                    const std::function<void(FrameWriter&)>& fill) {
    if (!store_ || hosts_[0]->start != start) return {};  // the connection has closed
    FrameWriter out;
    fill(out);
    const std::string bytes(out.payload());
    FrameReader in(bytes);
    CHECK(store_->serve(connection, 1, operation, in, now_));
    std::string reply;
    for (auto& [to, frame] : store_->take_outgoing())
      for (const auto number : to) push(number, frame) ? void() : void(reply = frame);
    return reply;
  }
  void deliver() {
    if (!store_) return;
    for (const auto& [to, frame] : store_->take_outgoing())
      for (const auto number : to) push(number, frame);
  }
  // Returns false for what is a reply.
  bool push(std::uint64_t connection, const std::string& frame) {
    FrameReader in(std::string_view(frame).substr(4));
    if (in.integer() != push_id) return false;
    if (static_cast<StorePush>(in.byte()) == StorePush::event)
      if (const auto event = in.value<Event>(); event.kind == Event::failed)
        tell(*connections_.at(connection), event.failure);
    return true;
  }
  void publish(int start, std::uint64_t connection, const Event& event) {
    at(delay(), [=, this] {
      serve(start, connection, StoreOperation::publish, [&](FrameWriter& out) { out.value(event); });
    });
  }

  Host& host_of(const Rank& rank) {
    return **std::find_if(hosts_.begin(), hosts_.end(),
                          [&](const auto& host) { return rank.number < host->first + host->ranks; });
  }
  void start(Host& host) {
    if (&host == hosts_[0].get()) store_ = std::make_unique<RunState>(1500ms);
    host.failures.clear();
    host.told = false;
    for (int i = 0; i < host.ranks; ++i) {
      ranks_.push_back(std::make_unique<Rank>(Rank{host.first + i, host.start + 1}));
      host.alive.push_back(ranks_.back().get());
      at(milliseconds(0, 500), [this, rank = ranks_.back().get()] { join(*rank); });
    }
    ++host.start;
  }
  void join(Rank& rank) {
    greet(rank.start, [this, &rank](std::optional<StoreStatus> status) {
      if (!rank.alive) return;
      if (!status) return end(rank, Failure{.call = {.operation = rendezvous}, .message = "nothing listens"});
      if (*status == StoreStatus::late)
        return end(rank, Failure{.message = "started again without this one"});
      if (*status == StoreStatus::early) return at(milliseconds(5, 500), [this, &rank] { join(rank); });
      REQUIRE(hosts_[0]->start == rank.start);  // never a store of another start
      rank.connection = next_connection_++;
      connections_[rank.connection] = &rank;
      const RankIdentity me{.process = formatted("pid {}", rank.connection),
                            .host = formatted("host {}", host_of(rank).first)};
      serve(rank.start, rank.connection, StoreOperation::join,
            [&](FrameWriter& out) { out.value(rank.number).value(size_).value(me).value(true); });
      serve(rank.start, rank.connection, StoreOperation::subscribe,
            [&](FrameWriter& out) { out.value(rank.number); });
      at(milliseconds(0, 2'000), [this, &rank] { finish(rank); });
    });
  }
  // The rank's program ends.
  void finish(Rank& rank) {
    if (!rank.alive || rank.told) return;
    const auto fault = faults_.find({rank.start, rank.number});
    if (fault == faults_.end()) {
      publish(rank.start, rank.connection,
              {.kind = Event::ended, .rank = rank.number, .failure = {.code = 0}});
      return end(rank, std::nullopt);
    }
    const Fault kind = fault->second;
    const bool mends = kind != Fault::wrong_usage && kind != Fault::asked;
    Failure failure{.rank = rank.number, .message = "boom"};
    if (kind == Fault::wrong_usage) failure.kind = FailureKind::usage;
    if (kind == Fault::throws || (!mends && draw(0, 1) == 0))
      publish(rank.start, rank.connection, {.failure = failure});
    else if (kind != Fault::wrong_usage)
      failure.kind = FailureKind::died;
    if (kind == Fault::returns_code || (!mends && draw(0, 1) == 0))
      publish(rank.start, rank.connection,
              {.kind = Event::ended, .rank = rank.number, .failure = {.code = 3}});
    Host& host = host_of(rank);
    host.asked = kind == Fault::asked;
    for (Rank* other : host.alive)  // its other ranks are asked, too
      if (host.asked && other != &rank && !std::exchange(other->told, true))
        at(milliseconds(0, 30), [this, other, failure]() mutable {
          if (!other->alive) return;
          failure.rank = other->number;
          if (other->connection != 0) publish(other->start, other->connection, {.failure = failure});
          end(*other, failure);
        });
    end(rank, failure);
  }
  // Over the connection of the rank, which keeps the order.
  void tell(Rank& rank, const Failure& failure) {
    rank.heard = std::max(rank.heard, now_ + delay());
    at(rank.heard - now_, [this, &rank, failure] { learn(rank, failure); });
  }
  // Another rank has failed: this one ends by that, or is ended.
  void learn(Rank& rank, const Failure& first) {
    if (!rank.alive || first.rank == rank.number || std::exchange(rank.told, true)) return;
    at(milliseconds(1, draw(0, 3) == 0 ? 3'000 : 50), [this, &rank, first] {
      if (!rank.alive) return;
      publish(rank.start, rank.connection,
              {.kind = Event::ended, .rank = rank.number, .failure = {.code = 1}});
      end(rank, consequence_of(first, rank.number, {}));
    });
  }
  void end(Rank& rank, std::optional<Failure> failure) {
    rank.alive = false;
    at(2 * delay(), [this, start = rank.start, connection = rank.connection] {
      if (connections_.erase(connection) > 0 && store_ && hosts_[0]->start == start)
        store_->close(connection, now_);
    });
    Host& host = host_of(rank);
    std::erase(host.alive, &rank);
    if (failure) {
      failure->time = now_.time_since_epoch().count();
      host.failures.push_back(*failure);
      if (hosts_.size() > 1 && failure->kind != FailureKind::consequence && !std::exchange(host.told, true)) {
        const auto travels = &host == hosts_[0].get() ? Duration(0) : milliseconds(0, 60) + delay();
        host.tells_until = now_ + travels;
        at(travels, [this, start = host.start, first = *failure, &host]() mutable {
          first.host = formatted("host {}", host.first);
          if (host.asked) first.kind = FailureKind::stopped;
          serve(start, 1, StoreOperation::publish,
                [&](FrameWriter& out) { out.value(Event{.failure = first}); });
        });
      }
      if (failure->kind == FailureKind::consequence)
        *failure = {.kind = failure->cause_kind, .rank = failure->cause};
      for (Rank* other : std::vector(host.alive)) learn(*other, *failure);  // its launcher ends them
    }
    if (host.alive.empty())
      at(std::max(milliseconds(0, 100), host.tells_until - now_), [this, &host] { outlive(host); });
  }

  // As launch_here, once all ranks of the host have ended.
  void outlive(Host& host) {
    const bool hosting = &host == hosts_[0].get(), alone = hosts_.size() == 1;
    OwnEnd own{
        .well = host.failures.empty(), .hosts_store = hosting, .size = alone ? 0 : size_, .is_read = !alone};
    if (const Failure* first = first_failure(host.failures, 1h); first && !host.asked) own.failure = *first;
    const bool more = !alone && host.start < most_ && !host.asked;
    if (more) own.again = 23s;
    if (hosting) return follow(host, own, std::make_shared<RunEnd>(own, now_));
    if (!more || !own.asks()) return decide(host, own, RunEnd(own, now_));
    greet(host.start, [this, &host, own](std::optional<StoreStatus> status) {
      OwnEnd known = own;
      if (status == StoreStatus::done) return follow(host, own, std::make_shared<RunEnd>(own, now_));
      if (status == StoreStatus::late) known.failure = Failure{.message = "started again without this one"};
      decide(host, known, RunEnd(known, now_));
    });
  }
  // As outlive_ranks.
  void follow(Host& host, const OwnEnd& own, const std::shared_ptr<RunEnd>& end) {
    const auto name = [](FrameWriter& out) { out.value(std::optional<std::string>()); };
    const std::string reply = serve(host.start, 1, StoreOperation::summary, name);
    if (reply.empty()) {
      end->lose();
      return decide(host, own, *end);
    }
    const auto run = decoded<RunSummary>(std::string_view(reply).substr(13));
    const auto travels = own.hosts_store ? Duration(0) : delay();
    at(travels, [this, &host, own, end, run] {
      if (end->look(run, now_)) return decide(host, own, *end);
      at(milliseconds(5, 50), [this, &host, own, end] { follow(host, own, end); });
    });
  }
  void decide(Host& host, const OwnEnd& own, const RunEnd& end) {
    const auto failure = end.to_mend();
    const int code = own.well ? 0 : own.failure ? own.failure->code : 1;
    if (!failure) return finish(host, code);
    const int given_up = own.well ? failure->code : code;
    if (!own.hosts_store) return next_start(host, host.start + 1, given_up, now_ + 23s);
    at(own.again ? Duration(reading_grace) : Duration(0), [this, &host, given_up] {
      close_store();
      if (host.start + 1 > most_) return finish(host, given_up);
      start(host);
    });
  }
  void next_start(Host& host, int next, int code, Time until) {
    if (next > most_) return finish(host, code);
    greet(next, [this, &host, next, code, until](std::optional<StoreStatus> status) {
      if (status == StoreStatus::late) return next_start(host, next + 1, code, until);
      if (status == StoreStatus::done) {
        host.start = next - 1;
        return start(host);
      }
      if (now_ >= until) return finish(host, code);
      at(milliseconds(5, 500), [=, this, &host] { next_start(host, next, code, until); });
    });
  }
  void close_store() {
    store_.reset();
    for (const auto& [connection, rank] : std::exchange(connections_, {}))
      tell(*rank, {.kind = FailureKind::died, .rank = -1});
  }
  void finish(Host& host, int code) {
    host.done = true;
    host.code = code;
    host.ended_at = now_;
    if (&host == hosts_[0].get()) close_store();
  }

  std::vector<std::unique_ptr<Host>> hosts_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  int size_ = 0, most_ = 0;
  std::map<std::pair<int, int>, Fault> faults_;  // of a start and a rank
  int last_ = 0;                                 // the first start without a fault
  bool mends_ = true;
  std::unique_ptr<RunState> store_;
  std::map<std::uint64_t, Rank*> connections_;
  std::uint64_t next_connection_ = 2;
};

void simulate(std::uint64_t seeds) {
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    CAPTURE(seed);
    Starts starts(seed);
    starts.run();
    starts.check();
  }
}

TEST_CASE(
    "in virtual time: all hosts start again together, no rank meets one of another start, and all end") {
  simulate(500);
}
TEST_CASE("the same with very many starts", "[.release]") {
  simulate(20'000);
}

}  // namespace run_end_test
