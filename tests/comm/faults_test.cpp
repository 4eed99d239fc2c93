// Ranks that fail while collectives are in flight: every process ends, with the right words.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/by_hand.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/reported.hpp"
#include "support/two_hosts.hpp"

namespace faults_test {

using namespace lockstep_test;

namespace {

struct RankEnd {
  int code;
  std::string out, error;
};

struct Outcome {
  std::vector<RankEnd> ranks;
  int left = 0;
  [[nodiscard]] const RankEnd& operator[](int rank) const { return ranks[static_cast<std::size_t>(rank)]; }
};

// How long the ranks may take from the fault to their end: a rank that nobody tells would wait for minutes.
constexpr Milliseconds after_fault(20000);

// Ranks started one by one, as by hand on several hosts: nobody watches over them.
Outcome started_by_hand(const std::string& fault, int culprit, bool with_launch = true) {
  Variables variables{{"OMP_NUM_THREADS", "1"}};
  if (!with_launch) variables["WITHOUT_LAUNCH"] = "1";
  Together ranks({test_program("comm_fault"), fault, std::to_string(culprit)}, 3, variables);
  Outcome outcome;
  REQUIRE(ranks[culprit].wait_for_output("now"));
  for (auto& rank : ranks.all) {
    const bool ended = rank->wait(after_fault);
    CAPTURE(fault, rank->error());
    REQUIRE(ended);
  }
  for (auto& rank : ranks.all) outcome.ranks.push_back({rank->exit_code(), rank->out(), rank->error()});
  outcome.left = processes_left(ranks.marker);
  return outcome;
}

// Of "TimeoutError after 3012 ms"; as good as for ever where it was not said.
int milliseconds_of_timeout(const std::string& error) {
  const auto found = error.find("TimeoutError after ");
  return found == std::string::npos ? 1 << 30 : std::atoi(error.c_str() + found + 19);
}

}  // namespace

TEST_CASE("a rank that fails is named by the others with its reason, whatever they do") {
  const auto [fault, culprit, own, reason] = GENERATE(table<std::string, int, std::string, std::string>({
      {"throw", 0, "std::runtime_error: boom", ""},
      {"throw", 2, "std::runtime_error: boom", ""},
      {"bytes", 0, "std::runtime_error: boom", ""},
      {"bytes", 2, "std::runtime_error: boom", ""},
      {"recv", 1, "std::runtime_error: boom", ""},
      {"absent", 2, "std::runtime_error: boom", "std::runtime_error: boom"},
      {"abort", 1, "the communicator was aborted: the disk is full", "the disk is full"},
      {"kill", 2, "", ""},
      {"kill", 0, "", ""},  // it hosts the store
      {"left", 0, "", ""},  // after a sub-group was left in order
  }));
  CAPTURE(fault, culprit);
  const auto outcome = started_by_hand(fault, culprit);
  CHECK(outcome.left == 0);
  for (int rank = 0; rank < 3; ++rank) {
    const RankEnd& end = outcome[rank];
    CAPTURE(rank);
    CAPTURE(end.error);
    CHECK(end.code == (rank == culprit && own.empty() ? 128 + SIGKILL : 1));
    if (rank == culprit && own.empty()) continue;
    const Reported said = reported(end.error);
    CHECK(said.alone);
    CHECK(said.failure.rank == culprit);
    CHECK(said.noticed_by == (rank == culprit ? -1 : rank));
    if (rank == culprit) CHECK(said.failure.message == own);
    if (rank != culprit && !reason.empty()) CHECK(said.failure.message == reason);
  }
}

TEST_CASE("a message from a rank that has left the communicator in good order is not waited for") {
  Process run(start({test_program("comm_fault"), "gone peer", "1", "--nproc", "2"},
                    {{"OMP_NUM_THREADS", "1"}, {"LOCKSTEP_HEARTBEAT_TIMEOUT", "2"}}));
  REQUIRE(run.wait(Milliseconds(40000)));
  CAPTURE(run.error());
  CHECK(run.exit_code() == 1);
  CHECK(reported(run.error()).failure.rank == 1);
  CHECK(processes_left(run.marker()) == 0);
}

TEST_CASE("an exception that passes communicators on its way waits for nothing") {
  const auto outcome = started_by_hand("catch", 2, false);
  CHECK(outcome.left == 0);
  for (const auto& end : outcome.ranks) CHECK(end.code == 3);
  CHECK(outcome[2].error.starts_with("rank 2 caught: boom\n"));
  for (int rank : {0, 1}) {
    CHECK(outcome[rank].error.starts_with(fmt::format("rank {} caught: rank 2 failed first: ", rank)));
    CHECK(count(outcome[rank].error, "again: ") == 0);
  }
}

TEST_CASE("a killed rank is named although helper processes of it live") {
  for (int culprit : {0, 2}) {  // rank 0 hosts the store
    Together ranks({test_program("comm_fault"), "helper", std::to_string(culprit)}, 3,
                   {{"OMP_NUM_THREADS", "1"}});
    for (int rank : {2 - culprit, 1}) {
      const bool ended = ranks[rank].wait(Milliseconds(20000));
      CAPTURE(culprit, rank, ranks[rank].error());
      REQUIRE(ended);
      CHECK(ranks[rank].exit_code() == 1);
      CHECK(reported(ranks[rank].error()).failure.rank == culprit);
      CHECK(reported(ranks[rank].error()).noticed_by == rank);
    }
    REQUIRE(ranks[culprit].wait(Milliseconds(1000)));
    const auto helpers = processes_with(ranks.marker);
    CHECK(helpers.size() == 2);
    for (pid_t helper : helpers) kill(helper, SIGKILL);
  }
}

TEST_CASE("the rank that hosts the store does not wait for a rank that dies while it leaves") {
  Together ranks({test_program("comm_fault"), "farewell", "1"}, 3, {{"OMP_NUM_THREADS", "1"}});
  for (int rank : {0, 2}) {
    const bool left = ranks[rank].wait_for_output("left", Milliseconds(20000));
    CAPTURE(rank, ranks[rank].error());
    CHECK(left);
  }
  for (auto& rank : ranks.all) rank->signal(SIGKILL);
}

// What keeps rank `culprit` from sharing memory: comm_fault knows `what`, and `start` is in front of its command.
struct Obstacle {
  std::string what;
  int culprit;
  bool shares;  // nevertheless
  std::vector<std::string> start = {};
};
Together with_obstacle(const Obstacle& obstacle) {
  Together ranks;
  const int port = free_port();
  for (int rank = 0; rank < 3; ++rank) {
    std::vector<std::string> command;
    if (rank == obstacle.culprit) command = obstacle.start;
    command.insert(command.end(), {test_program("comm_fault"), "unshared " + obstacle.what,
                                   std::to_string(obstacle.culprit)});
    auto variables = by_hand(rank, 3, port);
    variables["OMP_NUM_THREADS"] = "1";
    ranks.add(std::move(command), std::move(variables));
  }
  return ranks;
}
void check_sharing(Together ranks, bool shares) {
  const auto codes = ranks.wait(Milliseconds(60000));
  std::string said;
  for (const auto& rank : ranks.all) said += rank->out() + rank->error();
  CAPTURE(said);
  CHECK(codes == std::vector{0, 0, 0});
  CHECK(count(said, "right sum\n") == 3);
  CHECK(count(said, "use Gloo: ") == (shares ? 0 : 1));
  CHECK(count(said, "ShmComm: ") == (shares ? 0 : 3));
}
// Runs `script` in a mount namespace of its own, and then the command.
std::vector<std::string> with_mounts(const std::string& script) {
  return {"unshare", "--mount", "sh", "-c", "set -e; mount -t tmpfs " + script + "; exec \"$@\"", "sh"};
}

TEST_CASE("where ranks cannot share memory, CpuComm uses Gloo and says why once, and ShmComm throws on all") {
  for (const Obstacle& obstacle : std::vector<Obstacle>{{"limit", 0, false}, {"user", 2, false}}) {
    if (obstacle.what == "user" && geteuid() != 0) {
      WARN("SKIPPED: only root can start a rank as another user");
      continue;
    }
    CAPTURE(obstacle.what);
    check_sharing(with_obstacle(obstacle), obstacle.shares);
  }
}

TEST_CASE("limits, and memory that is full before or after the start, keep no sum from being right",
          "[.release]") {
  for (const Obstacle& obstacle : std::vector<Obstacle>{{"mapped", 1, false},
                                                        {"locked", 1, true},
                                                        {"memfd", 0, false},
                                                        {"full", 0, false},
                                                        {"full", 2, false},
                                                        {"later full", 1, true},
                                                        {"later limit", 1, true}}) {
    CAPTURE(obstacle.what, obstacle.culprit);
    check_sharing(with_obstacle(obstacle), obstacle.shares);
  }
}

TEST_CASE("a rank at the limit of its memory cgroup is not killed for its blocks", "[.release]") {
  const bool old = access("/sys/fs/cgroup/memory", F_OK) == 0;  // version 1
  const std::string group = fmt::format("/sys/fs/cgroup{}/lockstep-{}", old ? "/memory" : "", getpid());
  if (mkdir(group.c_str(), 0755) != 0) {
    WARN("SKIPPED: cannot create a memory cgroup");
    return;
  }
  // Of all blocks for the sum the rank would need 64 MiB.
  std::fstream limit(group + (old ? "/memory.limit_in_bytes" : "/memory.max"));
  if (limit << (40 << 20) << std::flush)
    check_sharing(with_obstacle({"later " + group, 1, true}), true);
  else
    WARN("SKIPPED: the cgroup limits no memory");
  CHECK(rmdir(group.c_str()) == 0);
}

TEST_CASE("ranks in other namespaces add up the right sum", "[.release]") {
  const TwoHosts hosts;
  if (!hosts.missing().empty()) {
    WARN("SKIPPED: " << hosts.missing());
    return;
  }
  for (const Obstacle& obstacle : std::vector<Obstacle>{
           {"", 1, true, {"unshare", "--pid", "--fork"}},
           {"", 0, true, {"unshare", "--user", "--map-root-user"}},
           {"", 1, true, {"unshare", "--ipc"}},
           {"", 0, true, with_mounts("-o size=1M shm /dev/shm")},
           {"", 2, false,
            with_mounts("group /sys/fs/cgroup; cd /sys/fs/cgroup; echo 1400000 >memory.max; "
                        "echo 0 >memory.current; cd -")},  // as a cgroup of version 2
       }) {
    CAPTURE(obstacle.start, obstacle.culprit);
    check_sharing(with_obstacle(obstacle), obstacle.shares);
  }
  Together ranks;  // which reach each other by TCP alone
  for (int rank = 0; rank < 3; ++rank) {
    auto variables = by_hand(rank, 3, 29503);
    variables["MASTER_ADDR"] = "10.177.0.1";
    variables["OMP_NUM_THREADS"] = "1";
    ranks.add(hosts.on(rank < 2 ? "A" : "B", {test_program("comm_fault"), "unshared ", "0"}), variables);
  }
  check_sharing(std::move(ranks), false);
  Together apart = with_obstacle({"network", 1, false});  // no connection at all but that to the store
  CHECK(apart.wait() == std::vector{1, 1, 1});
  for (const auto& rank : apart.all) CHECK(reported(rank->error()).failure.rank == 1);
}

TEST_CASE("a late rank and the collective are named in a warning long before the timeout") {
  Together ranks({test_program("comm_fault"), "slow", "1"}, 3, {{"OMP_NUM_THREADS", "1"}});
  REQUIRE(ranks[0].wait_for_output("rank 1 has not entered all_reduce #4 after "));
  CHECK(ranks[0].wait_for_output(" (the timeout is 12 s)\n"));
  CHECK(ranks[0].error().starts_with("[rank 0] warning: "));
  CHECK(ranks[2].error().empty());
  for (auto& rank : ranks.all) rank->signal(SIGKILL);
}

TEST_CASE("a rank that is stopped counts as failed long before the timeout, and ends once it goes on") {
  for (int culprit : {0, 1}) {
    Together ranks({test_program("comm_fault"), "stop", std::to_string(culprit)}, 3,
                   {{"OMP_NUM_THREADS", "1"}, {"LOCKSTEP_HEARTBEAT_TIMEOUT", "4"}});
    for (int rank : {2, 1 - culprit}) {
      const bool ended = ranks[rank].wait(Milliseconds(60000));
      CAPTURE(culprit, rank, ranks[rank].error());
      REQUIRE(ended);
      CHECK(ranks[rank].exit_code() == 1);
      const Reported said = reported(ranks[rank].error());
      CHECK(said.failure.rank == (culprit == 0 ? rank : culprit));
      CHECK(said.noticed_by == (culprit == 0 ? -1 : rank));
      CHECK_THAT(said.failure.message, ContainsSubstring(culprit == 0 ? "which rank 0 hosts, does not answer"
                                                                      : "it has not answered for"));
    }
    CHECK(process_state(ranks[culprit].pid()).state == 'T');
    ranks[culprit].signal(SIGCONT);
    REQUIRE(ranks[culprit].wait(Milliseconds(60000)));
    CAPTURE(culprit, ranks[culprit].error());
    CHECK(ranks[culprit].exit_code() == 1);
  }
}

TEST_CASE("no call outlasts its timeout while the rank that hosts the store is stopped", "[.release]") {
  for (const std::string call : {"reduce", "recv", "meet", "shutdown"}) {
    Together ranks({test_program("comm_fault"), "stopped " + call, "0"}, 3, {{"OMP_NUM_THREADS", "1"}});
    for (auto& rank : ranks.all) REQUIRE(rank->wait_for_output("now"));
    ranks[0].signal(SIGSTOP);
    for (int rank : {1, 2}) {
      const bool ended = ranks[rank].wait(Milliseconds(25000));
      CAPTURE(call, rank, ranks[rank].error());
      REQUIRE(ended);
      CHECK(ranks[rank].exit_code() == 1);
      CHECK(milliseconds_of_timeout(ranks[rank].error()) < 3000 + 2000);
    }
    CHECK(process_state(ranks[0].pid()).state == 'T');
  }
}

TEST_CASE("no call outlasts its timeout while the launcher, which hosts the store, is stopped") {
  for (const std::string call : {"reduce", "shutdown"}) {
    Process process({test_program("comm_fault"), "stopped " + call, "0", "--nproc", "3"},
                    {{"OMP_NUM_THREADS", "1"}}, {});
    REQUIRE(process.wait_for_output("now"));
    process.signal(SIGSTOP);
    const auto end = std::chrono::steady_clock::now() + Milliseconds(25000);
    while (zombies_of(process.pid()) < 2 && std::chrono::steady_clock::now() < end) usleep(10000);
    CHECK(zombies_of(process.pid()) == 2);
    process.signal(SIGCONT);
    REQUIRE(process.wait(Milliseconds(20000)));
    CAPTURE(call, process.out(), process.error());
    CHECK(milliseconds_of_timeout(process.error()) < 3000 + 2000);
  }
}

TEST_CASE("a rank that outlives the store compares its calls with those of the ranks that have left") {
  for (const bool differs : {false, true}) {
    Together ranks({test_program("comm_fault"), differs ? "outlives and differs" : "outlives", "0"}, 2,
                   {{"OMP_NUM_THREADS", "1"}});
    REQUIRE(ranks[0].wait_for_output("left"));
    usleep(500'000);  // it waits for the other rank
    REQUIRE(process_state(ranks[1].pid()).state != 'Z');
    ranks[0].signal(SIGKILL);
    static_cast<void>(ranks[0].wait(after_fault));
    REQUIRE(ranks[1].wait(after_fault));
    CAPTURE(ranks[1].error());
    CHECK(ranks[1].exit_code() == (differs ? 1 : 0));
    CHECK(count(ranks[1].error(), ", and rank 1 after broadcast #") == (differs ? 1 : 0));
  }
}

TEST_CASE("when the link between two hosts is cut both name what no longer answers", "[.release]") {
  const TwoHosts hosts;
  if (!hosts.missing().empty()) {
    WARN("SKIPPED: " << hosts.missing());
    return;
  }
  // By hand rank 0 hosts the store; where each host has a launcher, the first of them does.
  for (const bool launchers : {false, true}) {
    Together ranks;
    for (int host : {0, 1}) {
      const int each = launchers ? 2 : 1;
      auto variables = by_hand(host * each, 2 * each, 29500 + each);
      variables["MASTER_ADDR"] = "10.177.0.1";
      variables["OMP_NUM_THREADS"] = "1";
      std::vector<std::string> command{test_program("comm_fault"), "cut", "0"};
      if (launchers) command.insert(command.end(), {"--nproc", "2"});
      ranks.add(hosts.on(host == 0 ? "A" : "B", command), variables);
    }
    REQUIRE(ranks[0].wait_for_output("now"));
    hosts.link(false);
    const std::vector<std::string> named{
        launchers ? "ranks 2 and 3 have not reported a position" : "rank 1 has not reported a position",
        launchers ? "the store at 10.177.0.1:29502 does not answer"
                  : "the store at 10.177.0.1:29501, which rank 0 hosts, does not answer"};
    for (int host : {0, 1}) {
      const bool ended = ranks[host].wait(Milliseconds(40000));
      CAPTURE(launchers, host, ranks[host].error());
      REQUIRE(ended);
      CHECK(ranks[host].exit_code() == 1);
      CHECK_THAT(ranks[host].error(), ContainsSubstring(named[static_cast<std::size_t>(host)]));
      // A launcher that has read its rank's error may end the rank before it says how long it waited.
      if (!launchers || ranks[host].error().find("TimeoutError after ") != std::string::npos)
        CHECK(milliseconds_of_timeout(ranks[host].error()) < 4000 + 4000);
    }
    hosts.link(true);
  }
}

TEST_CASE("a rank that never enters a collective is named when the timeout expires") {
  const auto outcome = started_by_hand("never", 2);
  CHECK(outcome.left == 0);
  bool named = false;
  for (const auto& end : outcome.ranks) {
    CHECK(end.code == 1);
    named =
        named || end.error.find("rank 2 has not entered all_reduce #4 after 1 s; last at all_reduce #3") !=
                     std::string::npos;
  }
  CHECK(named);
}

TEST_CASE("a rank that finishes early is named") {
  for (int culprit : {0, 2}) {
    const auto outcome = started_by_hand("early", culprit);
    CHECK(outcome.left == 0);
    CAPTURE(outcome[1].error);
    CHECK(outcome[1].code == 1);
    const Reported said = reported(outcome[1].error);
    CHECK(said.failure.kind == lockstep::FailureKind::left_early);
    CHECK(said.failure.rank == culprit);
    CHECK(said.failure.call.operation == "all_reduce");
    CHECK(said.failure.call.sequence == 4);
    CHECK(said.noticed_by == 1);
  }
}

TEST_CASE("ranks in different collectives are told so, long before the timeout") {
  // The rank either waits, or leaves while its calls are in flight.
  const auto outcome = started_by_hand(GENERATE("differ", "differ and leave"), 2);
  CHECK(outcome.left == 0);
  const Reported said = reported(outcome[0].error);
  CAPTURE(outcome[0].error);
  CHECK(said.failure.kind == lockstep::FailureKind::mismatch);
  CHECK(said.failure.rank < 2);  // whichever of the two that agree the store has heard of first
  CHECK(said.failure.cause == 2);
  CHECK(said.failure.call.operation == "all_reduce");
  CHECK(said.failure.call.sequence == 4);
}

}  // namespace faults_test
