#include "lockstep/world/detail/store_server.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <thread>

#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/run_end.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/supervisor.hpp"
#include "support/catch.hpp"
#include "support/refuses.hpp"

namespace store_server_test {

using namespace std::chrono_literals;
using namespace lockstep::detail;
using Strings = std::vector<std::string>;

namespace {

// What a StoreClient does, without LibTorch.
struct Client {
  explicit Client(const StoreEndpoint& endpoint, std::chrono::milliseconds timeout = 20s)
      : connection(endpoint, timeout), timeout(timeout) {}

  template <class... Arguments>
  std::string ask(StoreOperation operation, const Arguments&... arguments) {
    return connection.request(operation, StoreConnection::Clock::now() + timeout, nullptr, arguments...);
  }
  void set(const std::string& key, const std::string& value) {
    ask(StoreOperation::set, Strings{key}, Strings{value});
  }
  std::string get(const std::string& key) {
    const auto reply = ask(StoreOperation::get, Strings{key});
    return std::string(FrameReader(reply).text());
  }
  void wait(const Strings& keys) { ask(StoreOperation::wait, keys); }
  bool check(const Strings& keys) { return ask(StoreOperation::check, keys) == std::string(1, '\1'); }
  std::int64_t add(const std::string& key, std::int64_t amount) {
    return decoded<std::int64_t>(ask(StoreOperation::add, key, amount));
  }
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) {
    return ask(StoreOperation::compare_set, key, expected, desired);
  }

  [[nodiscard]] RunClient run() { return {connection, timeout}; }
  // Joins a run of 3 ranks as a process that will be killed.
  std::string join(int rank, const std::string& process) {
    return decoded<JoinAnswer>(ask(StoreOperation::join, rank, 3, RankIdentity{process}, true))
        .rank.identity->process;
  }

  StoreConnection connection;
  std::chrono::milliseconds timeout;
};

struct Served {
  explicit Served(std::string secret = "open sesame", std::chrono::milliseconds hello_timeout = 10s,
                  std::chrono::milliseconds end_grace = lockstep::detail::end_grace)
      : server(std::make_unique<StoreServer>(listen_on("127.0.0.1", 0), secret, hello_timeout, end_grace)),
        endpoint{"127.0.0.1", server->port(), std::move(secret)} {}

  // A connection that says nothing.
  [[nodiscard]] Descriptor stranger() const {
    auto attempt = try_connect(endpoint.host, endpoint.port, StoreConnection::Clock::now() + 10s);
    REQUIRE(attempt.fd.open());
    return std::move(attempt.fd);
  }

  std::unique_ptr<StoreServer> server;
  StoreEndpoint endpoint;
};

// Returns whether the socket took all bytes. Makes no assertion, so that any thread may call it.
bool sends(const Descriptor& fd, const std::string& bytes) {
  return send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

// Whether the other end hangs up within 20 s.
bool hangs_up(const Descriptor& fd) {
  const auto until = StoreConnection::Clock::now() + 20s;
  char buffer[4096];
  while (poll_until(fd.get(), POLLIN, until)) {
    const auto length = recv(fd.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (length == 0 || (length < 0 && errno == ECONNRESET)) return true;
  }
  return false;
}

std::string hello(const std::string& secret) {
  return FrameWriter().raw(store_magic).value(std::int64_t{0}).raw(secret).take();
}

}  // namespace

TEST_CASE("the store keeps what its clients set") {
  const Served served;
  Client one(served.endpoint), other(served.endpoint);
  one.set("a", "1");
  CHECK(other.get("a") == "1");
  CHECK(other.check({"a"}));
  CHECK_FALSE(other.check({"a", "b"}));
  const std::string bytes("\0\xff\n", 3), large(5'000'000, 'x');
  one.set(bytes, large);
  CHECK(other.get(bytes) == large);
  CHECK(one.compare_set("c", "", "first") == "first");
  CHECK(other.compare_set("c", "", "second") == "first");
  CHECK(other.compare_set("c", "first", "second") == "second");
  CHECK(other.compare_set("d", "not there", "x") == "not there");
  CHECK_FALSE(other.check({"d"}));
  CHECK(one.add("n", 5) == 5);
  CHECK(other.add("n", -7) == -2);
  CHECK(one.get("n") == "-2");
  const auto erase = [&] { return one.ask(StoreOperation::erase, "a"); };
  CHECK(erase() == std::string(1, '\1'));
  CHECK(erase() == std::string(1, '\0'));
}

TEST_CASE("a wait is answered when the last of its keys is set, and stalls nobody else") {
  const Served served;
  Client waiting(served.endpoint), other(served.endpoint);
  std::atomic<bool> done{false};
  std::thread thread([&] {
    waiting.wait({"x", "y", "z"});
    done = true;
  });
  other.set("y", "");
  other.set("z", "");
  CHECK(other.get("z").empty());
  CHECK_FALSE(done);
  other.add("x", 1);
  thread.join();
  CHECK(done);
}

TEST_CASE("a wait that was given up leaves the connection in step") {
  const Served served;
  Client client(served.endpoint), other(served.endpoint);
  client.timeout = 30ms;
  for (int round = 0; round < 5; ++round) {
    CHECK_THROWS_AS(client.wait({fmt::format("late {}", round)}), StoreError);
    CHECK_THROWS_AS(client.get("never"), StoreError);
    other.set(fmt::format("late {}", round), "here");
  }
  client.timeout = 20s;
  other.set("k", "value");
  CHECK(client.get("k") == "value");
  CHECK(client.add("n", 3) == 3);
}

TEST_CASE("threads that share a connection do not wait for each other") {
  const Served served;
  Client shared(served.endpoint);
  std::vector<std::thread> waiting;
  for (int i = 0; i < 4; ++i) waiting.emplace_back([&, i] { shared.wait({fmt::format("late {}", i)}); });
  for (int i = 0; i < 4; ++i) {
    std::this_thread::sleep_for(20ms);
    shared.set(fmt::format("late {}", i), "");
  }
  for (std::thread& thread : waiting) thread.join();
  // A request whose thread no longer cares ends at once.
  std::atomic<bool> over{false};
  std::thread interrupted([&] {
    CHECK_THROWS_AS(shared.connection.request(
                        StoreOperation::wait, StoreConnection::Clock::now() + 20s,
                        [&] { return over.load(); }, Strings{"never"}),
                    StoreError);
  });
  std::this_thread::sleep_for(20ms);
  over = true;
  shared.connection.wake();
  interrupted.join();
  CHECK(shared.add("n", 1) == 1);
}

namespace {
// Takes what the server pushes until `enough` of it has come, or for so long, and returns it in words.
Strings pushed_to(Client& client, std::size_t enough, std::chrono::milliseconds most = 5s) {
  Strings words;
  client.connection.serve(
      [&](StorePush kind, FrameReader& in) {
        if (kind == StorePush::event) {
          const auto event = in.value<Event>();
          words.push_back(fmt::format("{} {}", static_cast<int>(event.kind), event.failure.message));
        } else {
          words.emplace_back(kind == StorePush::question ? "question" : "calls");
        }
      },
      StoreConnection::Clock::now() + most, [&] { return words.size() >= enough; });
  return words;
}
// Blocks until the rendezvous has ended. Returns the failure that has ended it.
lockstep::Failure failure_of_run(Client& client, int rank) {
  client.join(rank, "nodeA pid 7");
  const Meeting met = client.run().meet("", {}, true);
  CHECK(met.over());
  CHECK_FALSE(met.met());
  REQUIRE(met.end.has_value());
  CHECK(met.end->kind == Event::failed);
  return met.end->failure;
}
}  // namespace

TEST_CASE("subscribers are sent the events, of failures the first, in one order") {
  const Served served;
  Client publisher(served.endpoint), early(served.endpoint), late(served.endpoint);
  const auto subscribe = [](Client& client, std::uint64_t rank) {
    client.ask(StoreOperation::subscribe, rank);
  };
  const auto publish = [&](const Event& event) { return publisher.run().publish(event); };
  subscribe(early, 1);
  CHECK(publish({.kind = Event::departed, .rank = 3, .group = "g"}));  // whom nobody waits for
  CHECK(publish({.kind = Event::departed, .rank = 0, .group = "g"}));
  CHECK(publish({.failure = {.rank = 0, .message = "boom"}}));
  CHECK(!publish({.failure = {.rank = 2, .message = "another"}}));
  CHECK(!publish({.failure = {.rank = 4, .message = "boom"}}));  // ranks fail alike
  CHECK(publish({.kind = Event::aborted, .rank = 0, .group = "g"}));
  subscribe(late, 2);
  const Strings all{"2 ", "0 boom", "1 "};
  CHECK(pushed_to(early, 3) == all);
  CHECK(pushed_to(late, 3, 300ms) == Strings{"0 boom", "1 "});
  CHECK(late.run().summary().failure->rank == 0);
}

TEST_CASE("who asks gets the last reports with their ages, and the ranks are asked to report again, once") {
  const Served served;
  Client asked(served.endpoint), one(served.endpoint);
  asked.ask(StoreOperation::subscribe, 7);
  const std::vector<RankPosition> positions{{"g", {.operation = "barrier", .sequence = 3}}};
  asked.connection.post(StoreOperation::report, positions, std::vector<CallMarks>{});
  asked.check({"k"});  // the server has read it
  for (int times = 0; times < 2; ++times) {
    const auto reports = one.run().reports("g", {7, 9});
    REQUIRE(reports.size() == 2);
    CHECK((reports[0].age >= 0 && reports[0].age < 5000));
    REQUIRE(reports[0].positions.size() == 1);
    CHECK(reports[0].positions[0].position.sequence == 3);
    CHECK(reports[1].age == -1);  // nobody is rank 9
  }
  CHECK(pushed_to(asked, 2, 300ms) == Strings{"question"});
}

// Rank 1 has called all_reduce as collective `sequence`, and rank 2 another.
static void check_first_difference(const lockstep::Failure& failure, std::uint64_t sequence) {
  CHECK(failure.kind == lockstep::FailureKind::mismatch);
  CHECK(failure.rank == 1);
  CHECK(failure.cause == 2);
  CHECK(failure.call.operation == "all_reduce");
  CHECK(failure.call.sequence == sequence);
}

TEST_CASE(
    "ranks whose calls differ are asked for their last ones, and the first that differs fails the run") {
  const Served served;
  Client one(served.endpoint), two(served.endpoint);
  const auto report = [](Client& client, std::uint64_t rank, std::uint64_t hash) {
    client.ask(StoreOperation::subscribe, rank);
    const std::vector<CallMarks> marks{{"g", 2, {{5, 1}, {6, hash}}}};
    client.connection.post(StoreOperation::report, std::vector<RankPosition>{}, marks);
    client.check({"k"});  // the server has read it
  };
  const auto send = [](Client& client, const char* operation, std::uint64_t hash) {
    const std::vector<RecordedCall> calls{{1, "barrier", {.operation = "barrier", .sequence = 5}},
                                          {hash, operation, {.operation = operation, .sequence = 6}}};
    client.connection.post(StoreOperation::report, std::vector<RankPosition>{},
                           std::vector<CallMarks>{{"g", 2, {}, calls}});
  };
  report(one, 1, 7);
  report(two, 2, 8);
  CHECK(pushed_to(one, 1) == Strings{"calls"});
  CHECK(pushed_to(two, 1) == Strings{"calls"});
  send(one, "all_reduce", 7);
  send(two, "broadcast", 8);
  check_first_difference(failure_of_run(one, 1), 6);
}

TEST_CASE("a rank that has left and ended leaves its last calls here, whichever rank's report comes first") {
  const bool first = GENERATE(true, false);
  const Served served;
  const auto calls = [](const char* operation, std::uint64_t hash) {
    return std::vector<RecordedCall>{{hash, operation, {.operation = operation, .sequence = 1}}};
  };
  const auto leaves = [&] {
    Client gone(served.endpoint);
    gone.ask(StoreOperation::subscribe, 2);
    gone.connection.post(StoreOperation::report, std::vector<RankPosition>{},
                         std::vector<CallMarks>{{"g", 2, {{1, 8}}, calls("broadcast", 8)}});
    gone.run().publish({.kind = Event::departed, .rank = 2, .group = "g", .position = {.sequence = 1}});
  };
  Client one(served.endpoint);
  if (first) leaves();
  one.ask(StoreOperation::subscribe, 1);
  one.connection.post(StoreOperation::report, std::vector<RankPosition>{},
                      std::vector<CallMarks>{{"g", 2, {{1, 7}}}});
  one.check({"k"});  // the server has read it
  if (!first) leaves();
  CHECK(pushed_to(one, 1) == Strings{"calls"});
  one.connection.post(StoreOperation::report, std::vector<RankPosition>{},
                      std::vector<CallMarks>{{"g", 2, {}, calls("all_reduce", 7)}});
  check_first_difference(failure_of_run(one, 1), 1);
}

TEST_CASE("a counter that is no number or would overflow is refused") {
  const Served served;
  Client client(served.endpoint);
  client.set("text", "12 monkeys");
  client.set("empty", "");
  client.add("large", std::int64_t{1} << 62);
  CHECK_THROWS_AS(client.add("text", 1), StoreError);
  CHECK_THROWS_AS(client.add("empty", 1), StoreError);
  CHECK_THROWS_AS(client.add("large", std::int64_t{1} << 62), StoreError);
  CHECK(client.add("large", 0) == std::int64_t{1} << 62);
  CHECK(client.get("text") == "12 monkeys");
}

TEST_CASE("values that are too large are refused") {
  const Served served;
  Client client(served.endpoint);
  CHECK_THROWS_WITH(client.set("k", std::string(max_frame_bytes, 'v')), ContainsSubstring("is too large"));
  const Strings keys{"a", "b"};
  for (const std::string& key : keys) client.set(key, std::string(max_frame_bytes / 2, 'v'));
  CHECK_THROWS_WITH(client.ask(StoreOperation::get, keys),
                    ContainsSubstring("the store at 127.0.0.1:") && ContainsSubstring("are too large"));
  CHECK(client.get("b").size() == max_frame_bytes / 2);
}

TEST_CASE(
    "a store that is full refuses a request of several values whole, and takes others once there is room",
    "[.release]") {
  const Served served;
  Client client(served.endpoint);
  const std::string large(max_frame_bytes / 2, 'v');
  const std::size_t most = max_store_bytes / large.size() - 1;
  for (std::size_t i = 0; i < most; ++i) client.set(std::to_string(i), large);
  const Strings keys{"0", "new"}, values{"other", std::string(large.size(), 'w')};
  const auto set = [&] { client.ask(StoreOperation::set, keys, values); };
  client.set("last", std::string(large.size() / 2, 'v'));
  CHECK_THROWS_AS(set(), StoreError);
  CHECK(client.get("0") == large);
  CHECK_FALSE(client.check({"new"}));
  client.ask(StoreOperation::erase, "1");
  set();
  CHECK(client.get("0") == "other");
}

TEST_CASE("only who knows the secret is let in") {
  const Served served;
  for (const char* wrong : {"", "open sesam", "open sesame!", "OPEN SESAME"})
    CHECK_THROWS_AS(Client({served.endpoint.host, served.endpoint.port, wrong}), lockstep::RendezvousError);
  Client(served.endpoint).set("a", "1");
}

TEST_CASE("a store lets in the ranks of its own start alone, and ends those of an earlier one") {
  const auto at = [](const StoreServer& server, std::int64_t restart) {
    StoreEndpoint endpoint{"127.0.0.1", server.port()};
    endpoint.restart = restart;
    return endpoint;
  };
  Listener listener = listen_on("127.0.0.1", 0);
  const auto began = [](int restart) { return Event{.kind = Event::began, .restart = restart}; };
  std::optional<StoreServer> server(std::in_place, same_port(listener), "", 10s, 1s, began(1));
  Client rank(at(*server, 1));
  rank.join(0, "nodeA pid 5");
  refuses<lockstep::RendezvousError>([&] { Client(at(*server, 0)); },
                                     "without this process, which is of restart 0");
  CHECK_FALSE(rank.run().summary().failure);

  std::atomic<bool> waits = false;
  std::jthread next([&, endpoint = at(*server, 2)] {
    StoreConnection connection(endpoint, 20s, [&](const std::string&) {
      waits = true;
      waits.notify_all();
    });
    connection.request(StoreOperation::set, StoreConnection::Clock::now() + 20s, nullptr, Strings{"key"},
                       Strings{"value"});
  });
  waits.wait(false);
  CHECK_FALSE(rank.run().summary().failure);
  server.reset();
  server.emplace(std::move(listener), "", 10s, 1s, began(2));
  next.join();
  CHECK(Client(at(*server, 2)).check({"key"}));
}

TEST_CASE("the last client that was refused is noted with its address and the reason") {
  const Served served;
  Client client(served.endpoint);
  const auto reason = [&] { return client.run().summary().hints; };
  CHECK(reason().empty());
  CHECK_THROWS(Client({served.endpoint.host, served.endpoint.port, "another"}));
  CHECK(reason() ==
        "a process at 127.0.0.1 was refused because its LOCKSTEP_STORE_SECRET differs: give all ranks of a "
        "run one, or none");
  const auto stranger = served.stranger();
  REQUIRE(sends(stranger, FrameWriter().raw("lockstep store 5\n").take()));
  CHECK(hangs_up(stranger));
  CHECK(
      reason() ==
      "a process at 127.0.0.1 was refused because its version of lockstep differs: build all ranks with one");
}

TEST_CASE("a rank whose connection closes before its first communicator ends the run") {
  const Served served("", 10s, 100ms);
  Client other(served.endpoint);
  std::thread thread([&] {
    Client rank(served.endpoint);
    rank.join(1, "nodeB pid 811");
  });
  thread.join();
  const auto failure = failure_of_run(other, 0);
  CHECK(failure.kind == lockstep::FailureKind::died);
  CHECK(failure.rank == 1);
  CHECK(other.run().members({1}).at(0).lost);
  CHECK(other.join(1, "nodeB pid 812") == "nodeB pid 811");
}

TEST_CASE("a rank that may end, or whose failure is published, is not reported by the server") {
  enum class Case { ended, connected, left, failed, refused };
  for (const auto way : {Case::ended, Case::connected, Case::left, Case::failed, Case::refused}) {
    CAPTURE(static_cast<int>(way));
    const Served served("", 10s, 100ms);
    Client other(served.endpoint);
    {
      Client rank(served.endpoint);
      CHECK(rank.join(1, "nodeB pid 811") == "nodeB pid 811");
      if (way == Case::ended) rank.run().publish({.kind = Event::ended, .rank = 1, .failure = {.code = 0}});
      if (way == Case::connected) rank.run().publish({.kind = Event::connected, .rank = 1});
      if (way == Case::refused)
        rank.run().publish({.kind = Event::refused, .failure = {.message = "for a reason"}});
      if (way == Case::left) rank.connection.leave_at_end();
    }
    // A launcher reports the cause a moment later.
    if (way == Case::failed) other.run().publish({.failure = {.rank = 1, .code = 137}});
    std::this_thread::sleep_for(250ms);
    const auto failure = other.run().summary().failure;
    CHECK(failure.has_value() == (way == Case::failed));
    if (failure) CHECK(failure->code == 137);
    const KnownRank known = other.run().members({1}).at(0);
    CHECK(known.exit_code.has_value() == (way == Case::ended || way == Case::connected || way == Case::left));
    CHECK(known.exit_code.value_or(0) == (way == Case::connected || way == Case::left ? -1 : 0));
  }
}

TEST_CASE("a stranger's bytes stall neither the clients nor the end of the server") {
  Served served("", 10min);
  Client client(served.endpoint);
  std::vector<Descriptor> strangers;
  for (const auto& bytes : {std::string(1, '\0'), std::string("\x10"), hello("").substr(0, 9),
                            std::string("\x12\0\0\0lock", 8)}) {
    strangers.push_back(served.stranger());
    REQUIRE(sends(strangers.back(), bytes));
  }
  // One that was let in and stops in the middle of a request.
  strangers.push_back(served.stranger());
  REQUIRE(sends(strangers.back(), hello("") + std::string("\xff\xff\0\0half", 8)));
  client.set("a", "1");
  CHECK(Client(served.endpoint).get("a") == "1");
  served.server.reset();
  for (const auto& stranger : strangers) CHECK(hangs_up(stranger));
  CHECK_THROWS_AS(client.get("a"), StoreLost);
  CHECK_THROWS_AS(client.get("a"), StoreLost);
}

TEST_CASE("what is no hello or request is hung up on") {
  const Served served;
  for (const auto& bytes :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string("\xff\xff\xff\xff", 4),
        std::string("\x11\0\0\0lockstep stork 1\n", 21),
        hello(served.endpoint.secret) + std::string("\xff\xff\xff\xff", 4),
        hello(served.endpoint.secret) + std::string("\0\0\0\0", 4),
        hello(served.endpoint.secret) + std::string("\x09\0\0\0........\x77", 13),
        // 4 billion keys in a wait
        hello(served.endpoint.secret) + std::string("\x0d\0\0\0........\2\xff\xff\xff\xff", 17)}) {
    const auto stranger = served.stranger();
    REQUIRE(sends(stranger, bytes));
    CHECK(hangs_up(stranger));
  }
  Client(served.endpoint).set("a", "1");
}

TEST_CASE("a stranger that says nothing is hung up on in time") {
  const Served served("", 50ms);
  const auto stranger = served.stranger();
  CHECK(hangs_up(stranger));
  Client client(served.endpoint);
  std::this_thread::sleep_for(200ms);  // a client is not
  client.set("a", "1");
}

TEST_CASE("thousands of mute connections leave room for clients") {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const auto before = limit;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 8192);
  setrlimit(RLIMIT_NOFILE, &limit);
  {
    const Served served("", 10min);
    Client first(served.endpoint);
    std::vector<Descriptor> strangers;
    for (int i = 0; i < 3000 && strangers.size() + 600 < limit.rlim_cur; ++i) {
      auto attempt =
          try_connect(served.endpoint.host, served.endpoint.port, StoreConnection::Clock::now() + 10s);
      if (attempt.fd.open()) strangers.push_back(std::move(attempt.fd));
    }
    Client second(served.endpoint);
    second.set("a", "1");
    CHECK(first.get("a") == "1");
    CHECK(hangs_up(strangers.front()));
  }
  setrlimit(RLIMIT_NOFILE, &before);
}

TEST_CASE("a client that does not read its replies costs the server no more than one") {
  const Served served("");
  Client client(served.endpoint);
  client.set("large", std::string(8'000'000, 'x'));
  const auto greedy = served.stranger();
  REQUIRE(sends(greedy, hello("")));
  for (int i = 0; i < 200; ++i)
    REQUIRE(sends(
        greedy,
        FrameWriter().value(std::uint64_t{1}).value(StoreOperation::get).value(Strings{"large"}).take()));
  for (int i = 0; i < 20; ++i) client.set("a", std::to_string(i));
  CHECK(client.get("a") == "19");
}

TEST_CASE("random bytes from clients that were let in end nothing but their connections") {
  const Served served("");
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    std::string bytes = hello("");
    for (int frame = 0; frame < 4; ++frame) {
      std::string payload;
      const auto length = random() % 60;
      for (unsigned i = 0; i < length; ++i) payload.push_back(static_cast<char>(random() % (i < 9 ? 9 : 4)));
      bytes += FrameWriter().raw(payload).take();
    }
    const auto stranger = served.stranger();
    if (send(stranger.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) {
    }
  }
  Client client(served.endpoint);
  client.set("after", "all");
  CHECK(client.get("after") == "all");
}

TEST_CASE("many clients at once") {
  const Served served;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 32; ++rank)
    threads.emplace_back([&, rank] {
      Client client(served.endpoint);
      for (int i = 0; i < 50; ++i) client.add("sum", 1);
      client.set(fmt::format("done {}", rank), "");
      for (int other = 0; other < 32; ++other) client.wait({fmt::format("done {}", other)});
    });
  for (auto& thread : threads) thread.join();
  CHECK(Client(served.endpoint).add("sum", 0) == 32 * 50);
}

TEST_CASE("a client tells what is wrong at the other end") {
  for (const auto& [words, text] : std::vector<std::pair<std::string, std::string>>{
           {"", "does not answer as a store of lockstep"},  // somebody who listens and never answers
           {"SSH-2.0-OpenSSH_9.2\r\n", "is not a store of lockstep"},
           {std::string("\x12\0\0\0lockstep store 5\n\0", 22), "another version of lockstep"}}) {
    const auto listener = listen_on("127.0.0.1", 0);
    bool sent = false;
    std::thread other([&, &words = words] {
      const Descriptor fd(accept(listener.fd.get(), nullptr, nullptr));
      sent = sends(fd, words);
      hangs_up(fd);
    });
    CHECK_THROWS_WITH(Client({"127.0.0.1", listener.port}, words.empty() ? 300ms : 20000ms),
                      ContainsSubstring(text));
    other.join();
    CHECK(sent);
  }
}

TEST_CASE("a server that is stopped does not hold its client") {
  // The connection is in the queue of a listener that nobody serves once it was let in.
  const auto listener = listen_on("127.0.0.1", 0);
  bool sent = false;
  std::thread other([&] {
    const Descriptor fd(accept(listener.fd.get(), nullptr, nullptr));
    sent = sends(fd, FrameWriter().raw(store_magic).value(StoreStatus::done).take());
    hangs_up(fd);
  });
  {
    Client client({"127.0.0.1", listener.port});
    client.timeout = 50ms;
    CHECK_THROWS_AS(client.add("a", 1), StoreError);
    CHECK_THROWS_AS(client.set("a", std::string(30'000'000, 'x')), StoreError);
    CHECK_THROWS_AS(client.check({"a"}), StoreError);
  }
  other.join();
  CHECK(sent);
}

TEST_CASE("a listener binds what the address says") {
  const auto bound = [](const Listener& listener) {
    SocketAddress address;
    getsockname(listener.fd.get(), address.get(), &address.length);
    return address.text();
  };
  CHECK(bound(listen_on("127.0.0.1", 0)) == "127.0.0.1");
  CHECK(bound(listen_on("localhost", 0)) == "127.0.0.1");
  const auto all = bound(listen_on("", 0));
  CHECK((all == "::" || all == "0.0.0.0"));
  const auto elsewhere = listen_on("192.0.2.1", 0);  // an address for examples: nobody's
  CHECK(bound(elsewhere) == all);
  CHECK(elsewhere.host_is_elsewhere);
  CHECK_THROWS_AS(listen_on("no-such-host.invalid", 0), lockstep::RendezvousError);
}

TEST_CASE("a port that needs privileges is refused with the reason") {
  int first_free = 1024;
  std::ifstream("/proc/sys/net/ipv4/ip_unprivileged_port_start") >> first_free;
  if (first_free <= 81) {
    WARN("SKIPPED: every user may listen on port 81 here");
    return;
  }
  lockstep::detail::Pipe pipe = lockstep::detail::make_pipe();
  const pid_t child = fork();
  if (child == 0) {
    if (geteuid() == 0 && setuid(65534) != 0) _exit(1);
    std::string text;
    try {
      listen_on("127.0.0.1", 81);
    } catch (const lockstep::RendezvousError& error) {
      text = error.what();
    }
    _exit(write(pipe.write.get(), text.data(), text.size()) < 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (status != 0) {
    WARN("SKIPPED: this user cannot become another one");
    return;
  }
  std::string text(1000, '\0');
  text.resize(
      static_cast<std::size_t>(std::max<ssize_t>(0, read(pipe.read.get(), text.data(), text.size()))));
  CHECK(text == "cannot listen on port 81: permission denied: use one above 1023 on every rank");
}

TEST_CASE("control characters of another process are escaped") {
  CHECK(printable("plain, größer") == "plain, größer");
  CHECK(printable("\x1b[2J\nerror: rank 0\r\t\x7f") == "\\x1b[2J\\nerror: rank 0\\x0d\\t\\x7f");
  // Which is how an uncaught error that quotes another rank is shown.
  const lockstep::PeerError quoted("rank 3 failed first: \x1b[2J\nerror: all is well");
  CHECK(failure_of(std::make_exception_ptr(quoted)).message ==
        "rank 3 failed first: \\x1b[2J\\nerror: all is well");
  CHECK(printable("\xc2\x9b"
                  "31m") == "\\x9b31m");
}

}  // namespace store_server_test
