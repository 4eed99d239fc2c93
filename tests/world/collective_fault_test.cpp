#include <signal.h>

#include <chrono>
#include <string>

#include "support/by_hand.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/two_hosts.hpp"

namespace collective_fault_test {

using namespace std::chrono_literals;
using lockstep_test::count;
using lockstep_test::test_program;
using lockstep_test::Together;
using Clock = std::chrono::steady_clock;

namespace {

const std::string program = test_program("collective_program");

// How long after the ranks had begun everything was over.
struct Result {
  int code;
  std::string out, error;
  Clock::duration took;
  int left;
};

Result launched(const std::string& mode, int nproc) {
  auto process = lockstep_test::start({program, mode, "--nproc", std::to_string(nproc)});
  REQUIRE(process.wait_for_output("has reached step 5", 60s));
  const auto begin = Clock::now();
  REQUIRE(process.wait(60s));
  const auto took = Clock::now() - begin;
  return {process.exit_code(), process.out(), process.error(), took,
          lockstep_test::processes_left(process.marker())};
}

}  // namespace

TEST_CASE("collectives run and end well") {
  const auto result = launched("well", 3);
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  CHECK(result.error.empty());
  CHECK_THAT(result.out, ContainsSubstring("sum 1048576"));
  CHECK(result.left == 0);
}

TEST_CASE("a communicator that an exception has ended is not the world: the next one works") {
  for (const std::string mode : {"retries", "retries after one", "retries late"})
    for (const int nproc : {2, 3}) {
      const auto check = [&](const std::string& out, int rank) {
        if (mode != "retries late") CHECK_THAT(out, ContainsSubstring("attempt 0: caught "));
        CHECK_THAT(out, ContainsSubstring(fmt::format("attempt 1: rank {} has {}", rank, nproc)));
      };
      auto launched = lockstep_test::start({program, mode, "--nproc", std::to_string(nproc)});
      CHECK(launched.wait(30s));
      INFO(mode << " of " << nproc << "\n" << launched.out() << launched.error());
      CHECK(launched.exit_code() == 0);
      for (int rank = 0; rank < nproc; ++rank) check(launched.out(), rank);
      Together ranks({program, mode}, nproc);
      CHECK(ranks.wait(30s) == std::vector<int>(static_cast<std::size_t>(nproc), 0));
      for (int rank = 0; rank < nproc; ++rank) check(ranks[rank].out(), rank);
    }
}

TEST_CASE("without launch a rank that ends is known by its connection") {
  for (const std::string mode : {"level one throws", "level one dies"}) {
    Together ranks({program, mode}, 3);
    CHECK(ranks.wait(30s) == std::vector<int>{1, mode == "level one dies" ? 128 + SIGABRT : 1, 1});
    for (const int rank : {0, 2}) {
      INFO(ranks[rank].error());
      CHECK(ranks[rank].out() == "consequence of rank 1\n");
    }
  }
}

TEST_CASE("without launch, rank 0 finds that the ranks have made unequally many calls when it leaves") {
  Together ranks({program, "level one uneven"}, 3);
  ranks.wait(30s);
  INFO(ranks[0].error());
  CHECK(ranks[0].exit_code() == 1);
  CHECK(ranks[0].out() == "mismatch\n");
}

TEST_CASE("a rank that has caught its exception is told that the others have ended by it") {
  Together ranks({program, "retries alone first"}, 3);
  CHECK(ranks.wait(30s) == std::vector<int>{0, 1, 1});
  CHECK_THAT(ranks[0].out(), ContainsSubstring("attempt 1: caught rank ") &&
                                 ContainsSubstring(" has ended while rank 0 waits in the constructor of "));
  for (int rank : {1, 2})
    CHECK_THAT(ranks[rank].error(), ContainsSubstring("rank 0 failed first: an exception, which its own"));
}

TEST_CASE("a child of a rank, forked without exec, speaks for nobody when it ends") {
  for (const std::string mode : {"a child before", "a child returns", "a child exits", "a child throws"}) {
    const auto begin = Clock::now();
    const auto result = launched(mode, 2);
    INFO(mode << "\n" << result.out << result.error);
    CHECK(result.code == 0);
    CHECK_THAT(result.out, ContainsSubstring("sum 1048576"));
    CHECK(count(result.error, "error: ") == 0);
    CHECK(result.left == 0);
    Together ranks({program, mode}, 2, {{"OMP_NUM_THREADS", "2"}});  // by hand rank 0 hosts the store
    for (auto& rank : ranks.all) {
      REQUIRE(rank->wait(30s));
      CHECK(rank->exit_code() == 0);
    }
    CHECK(Clock::now() - begin < 20s);
  }
}

TEST_CASE("ranks train on a host whose loopback has an address of IPv6 alone") {
  const std::string host = fmt::format("lockstep6_{}", getpid());
  const auto run = [](const std::string& command) {
    return std::system(("(" + command + ") > /dev/null 2>&1").c_str()) == 0;
  };
  if (geteuid() != 0 || !run("ip netns add " + host)) {
    WARN("SKIPPED: no root, or no network namespaces");
    return;
  }
  if (run(fmt::format("ip -n {0} link set lo up && ip -n {0} addr del 127.0.0.1/8 dev lo && "
                      "ip -n {0} addr show dev lo | grep ::1",
                      host))) {
    const std::vector<std::string> command{"ip", "netns", "exec", host, program, "well"};
    auto words = command;
    words.insert(words.end(), {"--nproc", "2"});
    auto launched = lockstep_test::start(words);
    CHECK(launched.wait(60s));
    INFO(launched.error());
    CHECK(launched.exit_code() == 0);
    Together ranks;
    for (int rank : {0, 1}) {
      auto variables = lockstep_test::by_hand(rank, 2, 29533);
      variables["MASTER_ADDR"] = "::1";
      ranks.add(command, variables);
    }
    CHECK(ranks.wait(60s) == std::vector<int>{0, 0});
  } else {
    WARN("SKIPPED: no IPv6");
  }
  run("ip netns del " + host);
}

TEST_CASE("rank 0 of a run is told of a process that tried to join it with another world size") {
  Together ranks;
  const int port = lockstep_test::free_port();
  for (int rank : {0, 1}) ranks.add({program, "endless"}, lockstep_test::by_hand(rank, 2, port));
  REQUIRE(ranks[0].wait_for_output("rank 0 has reached step 5", 60s));
  ranks.add({program, "endless"}, lockstep_test::by_hand(2, 3, port));
  REQUIRE(ranks[2].wait(10s));
  CHECK(ranks[2].exit_code() == 1);
  const std::string told = "rank 2 says world size 3, rank ";
  CHECK_THAT(ranks[2].error(), ContainsSubstring(told));
  CHECK(ranks[0].wait_for_output(
      "warning: a process that tried to join this run was refused: the ranks disagree "
      "on their number: " +
          told,
      10s));
  CHECK(!ranks[0].wait(500ms));  // the run goes on
  for (int rank : {0, 1}) ranks[rank].signal(SIGKILL);
  CHECK(ranks[0].wait(20s));
  CHECK(count(ranks[0].error(), told) == 1);
}

TEST_CASE("a failure between collectives ends all within 5 s, whatever the timeout, and is shown once") {
  struct Case {
    std::string mode, text;
    int code;
  };
  for (const auto& [mode, text, code] : std::vector<Case>{{"killed", "error: rank {} (pid ", 137},
                                                          {"throws", "failed: a bad batch", 1},
                                                          {"throws in flight", "failed: a bad batch", 1},
                                                          {"finishes early", "rank {} ", 1},
                                                          {"early exit", "rank {} ", 1},
                                                          {"never comes", "rank {} ", 1}})
    for (const int nproc : {2, 3}) {
      const auto result = launched(mode, nproc);
      INFO(mode << " of " << nproc << "\n" << result.out << result.error);
      CHECK(result.code == code);
      CHECK(result.error.starts_with("error: rank "));
      CHECK_THAT(result.error, ContainsSubstring(fmt::format(fmt::runtime(text), nproc - 1)));
      CHECK(count(result.error, "error: ") == 1);
      CHECK(count(result.error, "\n") == 1);
      CHECK(result.took < (mode == "never comes" ? 8s : 5s));
      CHECK(result.left == 0);
    }
}

TEST_CASE("no run whose ranks have made different calls ends well") {
  for (const std::string mode : {"other dtype", "other op", "other size", "other count"}) {
    const std::string text = mode == "other count" ? "every rank must make the same calls, and equally many"
                                                   : "the ranks disagree on collective #3: rank ";
    for (const int nproc : {2, 3}) {
      auto launched = lockstep_test::start({program, mode, "--nproc", std::to_string(nproc)});
      REQUIRE(launched.wait(30s));
      INFO(mode << " of " << nproc << "\n" << launched.out() << launched.error());
      CHECK(launched.exit_code() == 1);
      CHECK(count(launched.error(), "error: ") == 1);
      CHECK_THAT(launched.error(), ContainsSubstring(text));
    }
    Together ranks({program, mode}, 2);
    const auto codes = ranks.wait(30s);
    INFO(mode << " by hand\n" << ranks[0].error() << ranks[1].error());
    CHECK((codes[0] == 1 || codes[1] == 1));
    CHECK_THAT(ranks[0].error() + ranks[1].error(), ContainsSubstring(text));
  }
}

TEST_CASE("by hand the others hear of a rank that fails before it has met them, or that hosted the store") {
  for (const std::string mode : {"never meets", "never meets first", "killed first"}) {
    const auto begin = Clock::now();
    Together ranks({program, mode}, 3);
    const int culprit = mode == "never meets" ? 2 : 0;
    for (auto& rank : ranks.all) REQUIRE(rank->wait(30s));
    CHECK(Clock::now() - begin < 15s);
    for (int rank = 0; rank < 3; ++rank) {
      const auto error = ranks[rank].error();
      INFO(mode << ", rank " << rank << "\n" << error);
      CHECK(ranks[rank].exit_code() == (rank == culprit && mode == "killed first" ? 137 : 1));
      if (rank == culprit && mode == "killed first") continue;
      CHECK(error.starts_with("error: "));
      CHECK(count(error, "\n") == 1);
      if (mode == "never meets") CHECK_THAT(error, ContainsSubstring("a bad batch"));
      if (rank != culprit)
        CHECK_THAT(error,
                   ContainsSubstring(mode == "killed first" ? "rank 0 has ended, and the store with it"
                                                            : fmt::format("rank {} failed first", culprit)));
    }
  }
}

TEST_CASE("a rank that is killed before the last one comes ends those that make a communicator") {
  Together ranks;
  const int port = lockstep_test::free_port();
  for (int rank : {0, 1}) ranks.add({program, "well"}, lockstep_test::by_hand(rank, 3, port));
  lockstep_test::await_sign_in(port, {0, 1});
  ranks.add({program, "comes after a death"}, lockstep_test::by_hand(2, 3, port));
  REQUIRE(ranks[2].wait_for_output("waits for a death", 30s));
  const auto begin = Clock::now();
  ranks[1].signal(SIGKILL);
  for (int rank : {0, 2}) {
    CHECK(ranks[rank].wait(20s));
    INFO(ranks[rank].error());
    CHECK(ranks[rank].exit_code() == 1);
    CHECK_THAT(ranks[rank].error(), ContainsSubstring("rank 1 has ended before its first communicator ("));
    CHECK(count(ranks[rank].error(), "\n") == 1);
  }
  CHECK(Clock::now() - begin < 8s);
}

TEST_CASE("a failure by hand, without a launcher, ends all ranks") {
  for (const std::string mode : {"killed", "throws", "throws in flight"}) {
    Together ranks({program, mode}, 3);
    REQUIRE(ranks[0].wait_for_output("has reached step 5", 60s));
    const auto begin = Clock::now();
    for (auto& rank : ranks.all) REQUIRE(rank->wait(20s));
    INFO(mode << "\n" << ranks[0].error() << "---\n" << ranks[1].error() << "---\n" << ranks[2].error());
    CHECK(Clock::now() - begin < 7s);
    CHECK(ranks[0].exit_code() == 1);
    CHECK(ranks[1].exit_code() == 1);
    CHECK(ranks[2].exit_code() == (mode == "killed" ? 137 : 1));
    if (mode != "killed") {
      CHECK_THAT(ranks[2].error(), ContainsSubstring("error: rank 2 failed: a bad batch"));
      for (int survivor : {0, 1}) CHECK_THAT(ranks[survivor].error(), ContainsSubstring("a bad batch"));
    }
    for (int survivor : {0, 1}) {
      CHECK_THAT(ranks[survivor].error(), ContainsSubstring("rank 2"));
      CHECK(count(ranks[survivor].error(), "\n") == 1);
    }
    CHECK(lockstep_test::processes_left(ranks.marker) == 0);
  }
}

TEST_CASE("two hosts whose own names lead to their loopback meet and reduce", "[.release]") {
  const lockstep_test::TwoHosts hosts;
  if (!hosts.missing().empty()) {
    WARN("SKIPPED: " << hosts.missing());
    return;
  }
  // The host of the store by its name, by its address, and each rank started by itself.
  for (const std::string master : {"nodeA", "10.177.0.1"})
    for (const bool launched : {true, false}) {
      Together ranks;
      for (const int rank : {0, 2, 3}) {
        auto variables = lockstep_test::by_hand(rank, 4, 29400);
        variables["MASTER_ADDR"] = master;

        variables["LOCKSTEP_RENDEZVOUS_TIMEOUT"] = "60";
        const std::string host = rank < 2 ? "A" : "B";
        if (launched && rank < 3)
          ranks.add(hosts.on(host, {program, "well", "--nproc", "2"}), variables);
        else if (!launched)
          ranks.add(hosts.on(host, {program, "well"}), variables);
        if (!launched && rank == 0) {
          variables["RANK"] = "1";
          ranks.add(hosts.on(host, {program, "well"}), variables);
        }
      }
      const auto codes = ranks.wait(90s);

      std::string all;
      for (const auto& process : ranks.all) all += process->out() + process->error() + "---\n";
      INFO(master << (launched ? " launched" : " by hand") << "\n" << all);
      CHECK(codes == std::vector<int>(ranks.all.size(), 0));
      CHECK_THAT(all, ContainsSubstring("sum 1048576"));
    }
}

}  // namespace collective_fault_test
