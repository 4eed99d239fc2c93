// The sentences of errors, and the messages between ranks that they are made of, without a second process.
#include <sys/resource.h>

#include <atomic>
#include <barrier>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/comm/detail/backend_bytes.hpp"
#include "lockstep/comm/detail/backend_group.hpp"
#include "lockstep/comm/detail/group_state.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"

namespace messages_test {

using lockstep::detail::Call;
using lockstep::detail::FailureMonitor;
using lockstep::detail::GroupStatus;
using lockstep::detail::Position;
using lockstep::detail::StoreMailbox;
using namespace std::chrono_literals;

TEST_CASE("lateness names the late ranks and where they were") {
  const Call call{"all_reduce", 57, {}, 0, {}};
  const std::vector<int> ranks{0, 1, 2, 3};
  const Position here{57, "all_reduce"};
  CHECK(lateness(call, {{1, {56, "all_reduce"}}, {2, here}, {3, here}}, ranks, 0, "6 s") ==
        "rank 1 has not entered all_reduce #57 after 6 s; last at all_reduce #56");
  CHECK(
      lateness(call, {{1, {56, "all_reduce"}}, {2, {0, ""}}, {3, here}}, ranks, 0, "6 s") ==
      "ranks 1 and 2 have not entered all_reduce #57 after 6 s; last at all_reduce #56; rank 2 at the start");
  CHECK(lateness(call, {{1, here}, {3, here}}, ranks, 0, "6 s") ==
        "rank 2 has not reported a position after 6 s of all_reduce #57: dead, stopped or cut off");
  CHECK_THAT(lateness(call, {{1, here}, {2, here}, {3, here}}, ranks, 0, "6 s"),
             ContainsSubstring("although every rank has entered it"));
  CHECK(lateness(call, {{1, here}, {2, {57, "barrier"}}, {3, here}}, ranks, 0, "6 s") ==
        "all_reduce #57 is not complete after 6 s: rank 2 called barrier instead");
}

TEST_CASE("errors name the public calls of the ranks") {
  using lockstep::detail::CallScope;
  using lockstep::detail::served_call;
  const auto collective = [](const char* name) { return Call{name, 57, {}, 0, {}, served_call}; };
  CHECK(collective("barrier").text() == "barrier #57");
  const CallScope outer("Trainer::fit");
  CHECK(collective("barrier").text() == "barrier #57 of Trainer::fit");
  {
    const CallScope middle("evaluate"), inner("agree");
    CHECK(collective("barrier").text() == "barrier #57 of Trainer::fit (agree)");
    const CallScope callback(lockstep::detail::ServedCall{});
    CHECK(served_call.name == nullptr);
  }
  const Call call = collective("all_reduce");
  CHECK(lateness(call, {{1, {56, "all_reduce", "Trainer::fit", "evaluate"}}}, {0, 1}, 0, "6 s") ==
        "rank 1 has not entered all_reduce #57 of Trainer::fit after 6 s; last at all_reduce #56 of "
        "Trainer::fit "
        "(evaluate); every rank must call Trainer::fit");
  CHECK(lateness(call, {{1, {57, "barrier", "evaluate"}}}, {0, 1}, 0, "6 s") ==
        "all_reduce #57 of Trainer::fit is not complete after 6 s: rank 0 is in Trainer::fit, rank 1 in "
        "evaluate; "
        "call both on every rank, and equally often");
  CHECK(lateness(call, {{1, {0, "nothing"}}}, {0, 1}, 0, "6 s",
                 {{1, {"lockstep/comm/1", {3, "barrier", "Trainer::evaluate", "agree"}}}}) ==
        "rank 1 has not entered all_reduce #57 of Trainer::fit after 6 s; at the start; every rank must call "
        "Trainer::fit. Rank 1 has entered barrier #3 of Trainer::evaluate (agree) in the communicator "
        "'lockstep/comm/1', and rank 0 has not: every rank must make the calls of all communicators in the "
        "same order");
  CHECK_THAT(lateness(call, {{1, {57, "all_reduce"}}}, {0, 1}, 0, "6 s"),
             ContainsSubstring("although every rank has entered it"));
  CHECK_THAT(lateness(call, {{0, {57, "barrier"}}}, {0, 1}, 1, "6 s"),
             ContainsSubstring("rank 0 is in a call of barrier, rank 1 in Trainer::fit; call both"));

  GroupStatus status;
  status.enter(3, "broadcast", served_call);
  CHECK(status.text() == "3 broadcast|Trainer::fit");
  const auto position = Position::parse(status.text() + "|agree");
  CHECK(position.text() == "broadcast #3 of Trainer::fit (agree)");
  CHECK(Position::parse("3 broadcast").text() == "broadcast #3");
}

TEST_CASE("ranks in several calls are listed by call") {
  using lockstep::detail::different_calls;
  CHECK(different_calls({"a", "", "a"}, {0, 1, 2}).empty());
  CHECK(different_calls({"a", "b", "a", ""}, {0, 2, 5, 7}) ==
        "ranks 0 and 5 are in a, rank 2 in b; call both on every rank, and equally often");
  CHECK(different_calls({"a", "b", "c"}, {0, 1, 2}) ==
        "rank 0 is in a, rank 1 in b, rank 2 in c; call all of them on every rank, and equally often");
}

TEST_CASE("lateness of a message names its peer alone") {
  const Call call{"recv", 0, 1, 5, {}};
  CHECK(lateness(call, {{7, {3, "broadcast"}}}, {0, 7, 9}, 0, "250 ms") ==
        "recv from rank 1 (tag 5) is not complete after 250 ms: rank 7 is last at broadcast #3");
}

TEST_CASE("what Gloo says is cut to its sentence") {
  const auto words = [](const std::string& text) {
    return lockstep::detail::backend_error_text(std::make_exception_ptr(std::runtime_error(text)));
  };
  CHECK(words("[/a/b/pair.cc:553] Connection closed by peer [127.0.0.1]:41. This is typically caused by "
              "x\nmore") == "Connection closed by peer [127.0.0.1]:41");
  CHECK(words("[./gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:1: Reset") ==
        "Read error [127.0.0.1]:1: Reset");
  CHECK(words("[enforce fail at /a/b/pair.cc:446] op.preamble.length <= op.nbytes. 60 vs 20") ==
        "the ranks gave it tensors of different sizes (a part of 60 vs 20 bytes)");
  CHECK(words("[127.0.0.1]:1] is a peer") == "[127.0.0.1]:1] is a peer");
  CHECK(words("plain") == "plain");
}

TEST_CASE("the status of a group that is entered meanwhile is one of its pairs") {
  GroupStatus status;
  const char* operations[] = {"zero", "one", "two", "three", "four"};
  std::atomic<bool> over{false};
  std::thread writer([&] {
    for (std::uint64_t number = 1; number < 2'000'000; ++number) status.enter(number, operations[number % 5]);
    over = true;
  });
  int torn = 0;
  while (!over) {
    const auto text = status.text();
    const auto number = std::stoull(text);
    if (number > 0 && text != fmt::format("{} {}", number, operations[number % 5])) ++torn;
  }
  writer.join();
  CHECK(torn == 0);
}

TEST_CASE("a message that is written long after it was counted is read then") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  StoreMailbox sender(store, 0, 2), reader(store, 1, 2);
  c10d::PrefixStore raw("lockstep/mailbox", store);
  const auto late = raw.add("count", 1);  // as a sender does that is stopped before it writes
  const auto second = sender.post("departed a");
  auto news = reader.news();
  REQUIRE(news.size() == 1);
  CHECK(news[0].number == second);
  CHECK(reader.incomplete());
  CHECK(reader.news().empty());
  raw.set(fmt::format("message/{}", late), std::string("failed 0 boom"));
  news = reader.news();
  REQUIRE(news.size() == 1);
  CHECK(news[0].kind == "failed");
  CHECK(news[0].rest(1) == "boom");
  CHECK(!reader.incomplete());
}

TEST_CASE("a damaged count of messages is an error, not an endless loop") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  c10d::PrefixStore("lockstep/mailbox", store).add("count", std::int64_t{1} << 62);
  StoreMailbox reader(store, 0, 2);
  CHECK_THROWS_WITH(reader.news(), ContainsSubstring("start the run again"));
  // Which the program hears of as a failure, since no other can be heard of any more.
  FailureMonitor monitor(0, 2, [store](auto) -> lockstep::detail::StorePtr { return store; });
  const auto failure = monitor.await_failure(20s);
  REQUIRE(failure);
  CHECK_THAT(failure->sentence(), ContainsSubstring("start the run again"));
}

TEST_CASE("the timeout of a program that sets none comes from the environment") {
  CHECK(lockstep::GlooOptions{}.timeout == 30min);
  setenv("LOCKSTEP_TIMEOUT", "90", 1);
  CHECK(lockstep::GlooOptions{}.timeout == 90s);
  CHECK(lockstep::GlooOptions{.timeout = 5s}.timeout == 5s);
  setenv("LOCKSTEP_TIMEOUT", "soon", 1);
  CHECK_THROWS_AS(lockstep::GlooOptions{}, lockstep::UsageError);
  unsetenv("LOCKSTEP_TIMEOUT");
}

namespace {
// A connection that counts its operations.
struct CountingStore : c10d::PrefixStore {
  CountingStore(lockstep::detail::StorePtr store, std::atomic<int>& operations)
      : PrefixStore("", std::move(store)), count(operations) {}
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return ++count, PrefixStore::add(key, value);
  }
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    ++count, PrefixStore::set(key, value);
  }
  std::vector<std::uint8_t> get(const std::string& key) override { return ++count, PrefixStore::get(key); }
  bool check(const std::vector<std::string>& keys) override { return ++count, PrefixStore::check(keys); }
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    return ++count, PrefixStore::multiGet(keys);
  }
  using PrefixStore::wait;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    ++count, PrefixStore::wait(keys, timeout);
  }
  std::atomic<int>& count;
};
}  // namespace

TEST_CASE("256 ranks that ask at once blame the dead rank alone, in a number of operations linear in them") {
  constexpr int size = 256, dead = 100;
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  const int port = lockstep_test::free_port();
  static std::atomic<int> operations;  // static: a thread that the store holds up outlives the test
  std::atomic<int> before{0}, wrong{0}, named{0}, unanswered{0};
  std::barrier all(size), alive(size - 1);
  std::chrono::steady_clock::time_point start;
  double seconds = 0;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.emplace_back([&, rank] {
      lockstep::Environment environment;
      environment.rank = environment.local_rank = rank;
      environment.size = environment.local_size = size;
      environment.rendezvous = fmt::format("tcp://127.0.0.1:{}", port);
      const lockstep::World world(environment);
      const auto joined = world.store();  // blocks until all have come
      auto status = std::make_shared<GroupStatus>();
      status->name = "group";
      for (int other = 0; other < size; ++other) status->ranks.push_back(other);
      status->enter(7, "all_reduce");
      std::optional<FailureMonitor> monitor;
      monitor.emplace(rank, size, [world](std::chrono::milliseconds timeout) -> lockstep::detail::StorePtr {
        return c10::make_intrusive<CountingStore>(world.connect_again(timeout), operations);
      });
      monitor->add(status);
      // Until every monitor has connected and answered once.
      while (monitor->ask(*status, 100ms, 60s, 60s).positions.size() < size - 1u) {
      }
      all.arrive_and_wait();
      if (rank == dead) monitor.reset();
      all.arrive_and_wait();
      std::this_thread::sleep_for(
          150ms);  // a question that the dead rank has answered may be shared for 100 ms
      if (rank == 0) before = operations.load(), start = std::chrono::steady_clock::now();
      all.arrive_and_wait();
      if (rank != dead) {
        // 255 ranks need a second for their answers, more on a busy machine.
        const auto answers = monitor->ask(*status, 100ms, 6s, 60s);
        if (!answers.conclusive) ++unanswered;
        for (int other = 0; other < size; ++other) {
          const auto found = answers.positions.find(other);
          const bool answered = found != answers.positions.end() && found->second.sequence == 7 &&
                                found->second.operation == "all_reduce";
          if (other == dead && !answered) ++named;
          if (other != dead && other != rank && !answered) ++wrong;
        }
        alive.arrive_and_wait();
      }
      if (rank == 0)
        operations -= before,
            seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      all.arrive_and_wait();
      monitor.reset();
      all.arrive_and_wait();  // rank 0 hosts the store
    });
  for (std::thread& rank : ranks) rank.join();
  CHECK(unanswered == 0);
  CHECK(wrong == 0);
  CHECK(named == size - 1);
  INFO(operations << " operations in " << seconds << " s");
  // A waiting rank looks some 20 times a second, the less often the busier the machine. One operation for each of the others
  // would already exceed this.
  CHECK(operations < size * (20 + 30 * seconds));
}

}  // namespace messages_test
