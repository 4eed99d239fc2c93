#include <signal.h>

#include <chrono>
#include <string>

#include "support/by_hand.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/reported.hpp"
#include "support/store_news.hpp"
#include "support/two_hosts.hpp"

namespace collective_fault_test {

using namespace std::chrono_literals;
using lockstep::FailureKind;
using namespace lockstep_test;
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
  auto process = start({program, mode, "--nproc", std::to_string(nproc)});
  REQUIRE(process.wait_for_output("has reached step 5", 60s));
  const auto begin = Clock::now();
  REQUIRE(process.wait(60s));
  const auto took = Clock::now() - begin;
  return {process.exit_code(), process.out(), process.error(), took, processes_left(process.marker())};
}

}  // namespace

TEST_CASE("collectives run and end well") {
  const auto result = launched("well", 3);
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  CHECK(result.error.empty());
  CHECK(result.out.ends_with("sum 1048576\n"));
  CHECK(result.left == 0);
}

TEST_CASE("a communicator that an exception has ended is not the world: the next one works") {
  for (const std::string mode : {"retries", "retries after one", "retries late"})
    for (const int nproc : {2, 3}) {
      const auto check = [&](const std::string& out, int rank) {
        if (mode != "retries late") CHECK(count(out, "attempt 0: caught ") >= 1);
        CHECK(count(out, fmt::format("attempt 1: rank {} has {}\n", rank, nproc)) == 1);
      };
      auto launched = start({program, mode, "--nproc", std::to_string(nproc)});
      CHECK(launched.wait(30s));
      INFO(mode << " of " << nproc << "\n" << launched.out() << launched.error());
      CHECK(launched.exit_code() == 0);
      for (int rank = 0; rank < nproc; ++rank) check(launched.out(), rank);
      Together ranks({program, mode}, nproc);
      CHECK(ranks.wait(30s) == std::vector<int>(static_cast<std::size_t>(nproc), 0));
      for (int rank = 0; rank < nproc; ++rank) check(ranks[rank].out(), rank);
    }
}

TEST_CASE("groups that have failed with collectives in flight leave no thread and no connection") {
  auto ranks = start({program, "fails often", "--nproc", "3"});
  CHECK(ranks.wait(60s));
  INFO(ranks.out() << ranks.error());
  CHECK(ranks.exit_code() == 0);
  CHECK(count(ranks.out(), "has 3, 0 more descriptors, 0 more threads") == 3);
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

TEST_CASE("without launch, ranks that leave by a destructor log that they have made unequally many calls") {
  Together ranks({program, "level one leaves uneven"}, 3);
  CHECK(ranks.wait(30s) == std::vector<int>(3, 0));
  for (const int rank : {1, 2})
    CHECK(count(ranks[rank].error(), "rank 0 has left after broadcast #2, and rank ") == 1);
}

TEST_CASE(
    "without launch, ranks that leave by a destructor log that they have made other calls, equally many") {
  Together ranks({program, "level one leaves unlike"}, 2);
  CHECK(ranks.wait(30s) == std::vector<int>(2, 0));
  INFO(ranks[0].error() << ranks[1].error());
  CHECK(count(ranks[0].error() + ranks[1].error(), "different calls") +
            count(ranks[0].error() + ranks[1].error(), "the ranks disagree on collective #") >=
        1);
}

TEST_CASE("calls that differ just before std::exit(0) end the run with exit code 1") {
  for (const int nproc : {2, 3}) {
    auto launched =
        start({program, "exits differently", "--nproc", std::to_string(nproc), "--max-restarts", "3"});
    CHECK(launched.wait(30s));
    INFO(launched.out() << launched.error());
    CHECK(launched.exit_code() == 1);
    CHECK(count(launched.error(), "restart") == 0);
    Together ranks({program, "exits differently"}, nproc);  // rank 0 hosts the store
    CHECK(ranks.wait(30s)[0] == 1);
    INFO(ranks[0].error());
    for (const auto& error : {launched.error(), ranks[0].error()}) {
      const Reported said = reported(error);
      CHECK(said.failure.kind == FailureKind::mismatch);
      CHECK_FALSE(
          said.failure.call.operation.empty());  // the calls that differ, though their ranks have ended
    }
  }
}

TEST_CASE("a communicator's destructor waits for nobody, and the end of launch completes what it leaves") {
  auto ranks = start({program, "leaves a message", "--nproc", "3"});
  CHECK(ranks.wait(60s));
  INFO(ranks.out() << ranks.error());
  CHECK(ranks.exit_code() == 0);
  CHECK(count(ranks.out(), "has 0 of rank 0\n") == 1);
  CHECK(count(ranks.out(), "of rank 1\n") == 1);
}

TEST_CASE("a rank that has caught its exception is told that the others have ended by it") {
  Together ranks({program, "retries alone first"}, 3);
  CHECK(ranks.wait(30s) == std::vector<int>{0, 1, 1});
  CHECK_THAT(ranks[0].out(), ContainsSubstring(" has ended while rank 0 waits in the constructor of "));
  for (int rank : {1, 2}) {
    const Reported said = reported(ranks[rank].error());
    CHECK(said.failure.rank == 0);
    CHECK(said.failure.message.starts_with("an exception, which its own"));
    CHECK(said.noticed_by == rank);
  }
}

TEST_CASE("a child of a rank, forked without exec, speaks for nobody when it ends") {
  for (const std::string mode : {"a child before", "a child returns", "a child exits", "a child throws"}) {
    const auto begin = Clock::now();
    const auto result = launched(mode, 2);
    INFO(mode << "\n" << result.out << result.error);
    CHECK(result.code == 0);
    CHECK(count(result.out, "sum 1048576\n") == 1);
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
  if (run(fmt::format("ip -n {0} link set lo up && ip -n {0} addr del 127.0.0.1/8 dev lo && ip -n {0} addr "
                      "show dev lo | grep ::1",
                      host))) {
    const std::vector<std::string> command{"ip", "netns", "exec", host, program, "well"};
    auto words = command;
    words.insert(words.end(), {"--nproc", "2"});
    auto launched = start(words);
    CHECK(launched.wait(60s));
    INFO(launched.error());
    CHECK(launched.exit_code() == 0);
    Together ranks;
    for (int rank : {0, 1}) {
      auto variables = by_hand(rank, 2, 29533);
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
  const int port = free_port();
  for (int rank : {0, 1}) ranks.add({program, "endless"}, by_hand(rank, 2, port));
  REQUIRE(ranks[0].wait_for_output("rank 0 has reached step 5", 60s));
  ranks.add({program, "endless"}, by_hand(2, 3, port));
  REQUIRE(ranks[2].wait(10s));
  CHECK(ranks[2].exit_code() == 1);
  const std::string told = "rank 2 says world size 3, rank ";
  CHECK(
      reported(ranks[2].error()).failure.message.starts_with("the ranks disagree on their number: " + told));
  CHECK(ranks[0].wait_for_output(
      "warning: a process that tried to join this run was refused: the ranks disagree on their number: " +
          told,
      10s));
  CHECK(!ranks[0].wait(500ms));  // the run goes on
  for (int rank : {0, 1}) ranks[rank].signal(SIGKILL);
  CHECK(ranks[0].wait(20s));
  CHECK(count(ranks[0].error(), told) == 1);
}

TEST_CASE("a failure between collectives ends all within 5 s, whatever the timeout, and is shown once") {
  for (const auto& [mode, kind] :
       std::vector<std::pair<std::string, FailureKind>>{{"killed", FailureKind::died},
                                                        {"throws", FailureKind::error},
                                                        {"throws in flight", FailureKind::error},
                                                        {"finishes early", FailureKind::left_early},
                                                        {"early exit", FailureKind::left_early}})
    for (const int nproc : {2, 3}) {
      const auto result = launched(mode, nproc);
      INFO(mode << " of " << nproc << "\n" << result.out << result.error);
      const Reported said = reported(result.error);
      CHECK(result.code == (kind == FailureKind::died ? 128 + SIGKILL : 1));
      CHECK(said.alone);
      CHECK(said.failure.kind == kind);
      CHECK(said.failure.rank == nproc - 1);
      if (kind == FailureKind::error) CHECK(said.failure.message == "a bad batch");
      CHECK(result.took < 5s);
      CHECK(result.left == 0);
    }
}

TEST_CASE("a rank that never comes to a collective is named at the timeout, and ended with the others") {
  for (const int nproc : {2, 3}) {
    const auto result = launched("never comes", nproc);
    INFO(result.out << result.error);
    const Reported said = reported(result.error);
    CHECK(result.code == 1);
    CHECK(said.alone);
    CHECK(said.failure.message.starts_with(fmt::format("rank {} has not entered all_reduce #", nproc - 1)));
    CHECK(result.took < 8s);
    CHECK(result.left == 0);
  }
}

TEST_CASE("no run whose ranks have made different calls ends well") {
  for (const std::string mode : {"other dtype", "other op", "other size", "other count"}) {
    const auto told = [&](const std::string& error, int culprit) {
      const lockstep::Failure said = reported(error).failure;
      if (mode == "other count")
        return said.kind == FailureKind::left_early || said.kind == FailureKind::mismatch;
      return said.kind == FailureKind::mismatch && said.cause == culprit && said.call.sequence == 3;
    };
    for (const int nproc : {2, 3}) {
      auto launched = start({program, mode, "--nproc", std::to_string(nproc)});
      REQUIRE(launched.wait(30s));
      INFO(mode << " of " << nproc << "\n" << launched.out() << launched.error());
      CHECK(launched.exit_code() == 1);
      CHECK(count(launched.error(), "error: ") == 1);
      CHECK(told(launched.error(), nproc - 1));
    }
    Together ranks({program, mode}, 2);
    const auto codes = ranks.wait(30s);
    INFO(mode << " by hand\n" << ranks[0].error() << ranks[1].error());
    CHECK((codes[0] == 1 || codes[1] == 1));
    CHECK((told(ranks[0].error(), 1) || told(ranks[1].error(), 1)));
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
      const Reported said = reported(error);
      CHECK(said.alone);
      CHECK(said.failure.rank == culprit);
      CHECK(said.failure.kind == (mode == "killed first" ? FailureKind::died : FailureKind::error));
      CHECK(said.noticed_by == (rank == culprit ? -1 : rank));
      if (mode == "never meets") CHECK(said.failure.message == "a bad batch");
    }
  }
}

TEST_CASE("a rank that is killed before the last one comes ends those that make a communicator") {
  Together ranks;
  const int port = free_port();
  for (int rank : {0, 1}) ranks.add({program, "well"}, by_hand(rank, 3, port));
  await_sign_in(port, {0, 1});
  ranks.add({program, "comes after a death"}, by_hand(2, 3, port));
  REQUIRE(ranks[2].wait_for_output("waits for a death", 30s));
  const auto begin = Clock::now();
  ranks[1].signal(SIGKILL);
  for (int rank : {0, 2}) {
    CHECK(ranks[rank].wait(20s));
    INFO(ranks[rank].error());
    CHECK(ranks[rank].exit_code() == 1);
    const Reported said = reported(ranks[rank].error());
    CHECK(said.alone);
    CHECK(said.failure.kind == FailureKind::died);
    CHECK(said.failure.rank == 1);
    CHECK(said.noticed_by == rank);
  }
  CHECK(Clock::now() - begin < 8s);
}

TEST_CASE("two hosts whose own names lead to their loopback meet and reduce", "[.release]") {
  const TwoHosts hosts;
  if (!hosts.missing().empty()) {
    WARN("SKIPPED: " << hosts.missing());
    return;
  }
  for (const std::string master : {"nodeA", "10.177.0.1"}) {
    Together ranks;
    for (const int rank : {0, 1, 2, 3}) {
      auto variables = by_hand(rank, 4, 29400);
      variables["MASTER_ADDR"] = master;
      variables["LOCKSTEP_RENDEZVOUS_TIMEOUT"] = "60";
      ranks.add(hosts.on(rank < 2 ? "A" : "B", {program, "well"}), variables);
    }
    const auto codes = ranks.wait(90s);
    std::string all;
    for (const auto& process : ranks.all) all += process->out() + process->error() + "---\n";
    INFO(master << "\n" << all);
    CHECK(codes == std::vector<int>(4, 0));
    CHECK(count(all, "sum 1048576\n") == 1);
  }
}

}  // namespace collective_fault_test
