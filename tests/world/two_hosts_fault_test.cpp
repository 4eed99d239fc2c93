// Bad input on two hosts: each of them ends on one line that names variable, value and remedy, in under 10 s where
// that can be known, and says within 10 s for whom it waits where it cannot.
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "support/by_hand.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/reported.hpp"
#include "support/two_hosts.hpp"

namespace two_hosts_fault_test {

using namespace std::chrono_literals;
using namespace lockstep_test;

namespace {

constexpr int port = 29617;  // of the namespaces alone

Variables rank_at(const std::string& address, int rank, int size, const Variables& more = {}) {
  auto variables = by_hand(rank, size, port);
  variables["MASTER_ADDR"] = address;
  variables["OMP_NUM_THREADS"] = "1";
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

/// Programs on the two hosts, and how long they took.
struct Hosts {
  TwoHosts hosts;
  Together ranks;
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();

  /// False, with the reason printed, where there are no two hosts.
  bool there() const {
    if (!hosts.missing().empty()) WARN("SKIPPED: " << hosts.missing());
    return hosts.missing().empty();
  }
  void start(const std::string& host, const Variables& variables, const std::vector<std::string>& more = {}) {
    std::vector<std::string> command{test_program("world_program"), "well"};
    command.insert(command.end(), more.begin(), more.end());
    ranks.add(hosts.on(host, command), variables);
  }
  /// Waits for all. Checks the exit code, that it took less than 10 s, and that each host wrote one error of one
  /// line that contains `text`.
  void all_end_with(int code, const std::string& text) {
    const auto codes = ranks.wait(60s);
    CHECK(std::chrono::steady_clock::now() - begin < 10s);
    CHECK(codes == std::vector<int>(ranks.all.size(), code));
    for (const auto& process : ranks.all) {
      INFO(process->out() << process->error());
      CHECK(reported(process->error()).alone);
      CHECK_THAT(process->error(), ContainsSubstring(text));
    }
    CHECK(processes_left(ranks.marker) == 0);
  }
};

}  // namespace

TEST_CASE("ranks that wait for a host say so within 10 s, and in the end with variables and remedy",
          "[.release]") {
  Hosts on;
  if (!on.there()) return;
  const Variables soon{{"LOCKSTEP_RENDEZVOUS_TIMEOUT", "8"}};
  // Nobody serves the address: a host without rank 0, and one that does not exist.
  const std::vector<std::string> addresses{"nodeA", "10.177.0.9"};
  for (const std::string& address : addresses) on.start("B", rank_at(address, 1, 2, soon));
  // Another run, whose second host does not come.
  auto variables = rank_at("10.177.0.1", 0, 4, soon);
  variables["MASTER_PORT"] = "29618";
  on.start("A", variables, {"--nproc", "2"});

  for (auto& process : on.ranks.all) REQUIRE(process->wait_for_output("gives up in", 10s));
  CHECK(std::chrono::steady_clock::now() - on.begin < 10s);
  CHECK(on.ranks.wait(60s) == std::vector<int>(3, 1));
  for (const int which : {0, 1}) {
    const auto& error = on.ranks[which].error();
    INFO(error);
    const auto where = fmt::format("{0}:{1} (MASTER_ADDR={0}, MASTER_PORT={1})",
                                   addresses[static_cast<std::size_t>(which)], port);
    CHECK(error.find("warning: waiting for the store of rank 0 at tcp://" + where + ": ") < 10);
    CHECK(reported(error).failure.message.starts_with("no store at " + where + " after 8 s: "));
    CHECK(count(error, "\n") == 2);
  }
  INFO(on.ranks[2].error());
  CHECK(reported(on.ranks[2].error()).failure.message ==
        "ranks 2 and 3 of 4 did not join within 8 s: start them with the MASTER_ADDR, MASTER_PORT and "
        "WORLD_SIZE of the others");
}

TEST_CASE("hosts that disagree on the world size are both told within 10 s") {
  for (const char* size : {"2", "3x"}) {  // numbers that the second host refuses by itself
    Hosts on;
    if (!on.there()) return;
    on.start("A", rank_at("10.177.0.1", 0, 3));
    auto wrong = rank_at("10.177.0.1", 2, 2);
    wrong["WORLD_SIZE"] = size;
    on.start("B", wrong);
    const auto codes = on.ranks.wait(60s);
    CHECK(std::chrono::steady_clock::now() - on.begin < 10s);
    CHECK(codes == std::vector<int>{1, 2});
    INFO(on.ranks[0].error() << on.ranks[1].error());
    const auto fault = reported(on.ranks[1].error()).failure.message;
    CHECK(fault.size() > 20);
    CHECK(on.ranks[0].error().ends_with(" cannot join: " + fault + "\n"));
  }
  Hosts on;
  if (!on.there()) return;
  on.start("A", rank_at("10.177.0.1", 0, 4), {"--nproc", "2"});
  on.start("B", rank_at("10.177.0.1", 2, 5), {"--nproc", "2"});
  on.all_end_with(1, "the ranks disagree on their number: rank ");
}

TEST_CASE("a rank that two hosts claim is named on both within 10 s, also rank 0", "[.release]") {
  for (const int rank : {0, 1}) {
    CAPTURE(rank);
    Hosts on;
    if (!on.there()) return;
    if (rank == 1) on.start("A", rank_at("10.177.0.1", 0, 3));
    // Rank 0 of the host that MASTER_ADDR does not name comes first and hosts a store of its own.
    on.start("B", rank_at("10.177.0.1", rank, 3));
    if (rank == 0) std::this_thread::sleep_for(1s);
    on.start("A", rank_at("10.177.0.1", rank, 3));
    on.all_end_with(1, fmt::format(", the latter with RANK={}: give every process its own RANK, and", rank));
    for (const auto& process : on.ranks.all)
      for (const char* claimant : {"nodeA pid ", "nodeB pid "}) CHECK(count(process->error(), claimant) == 1);
  }
}

TEST_CASE("variables that contradict each other end both hosts with exit code 2 within 10 s") {
  struct Case {
    Variables variables;
    std::string text;
  };
  for (const auto& [variables, text] : std::vector<Case>{
           {{{"RANK", "2"}}, "RANK=2 is out of range: with WORLD_SIZE=2 it must be in 0 to 1"},
           {{{"RANK", ""},
             {"WORLD_SIZE", ""},
             {"MASTER_ADDR", ""},
             {"SLURM_JOB_ID", "7"},
             {"SLURM_STEP_ID", "0"},
             {"SLURM_PROCID", "0"},
             {"SLURM_STEP_NUM_TASKS", "2"},
             {"SLURM_STEP_NODELIST", "n[09-"}},
            "SLURM_STEP_NODELIST=n[09- cannot be parsed: set MASTER_ADDR to the host of rank 0"}}) {
    CAPTURE(text);
    Hosts on;
    if (!on.there()) return;
    for (const char* host : {"A", "B"})
      on.start(host, rank_at("10.177.0.1", *host == 'A' ? 0 : 1, 2, variables));
    on.all_end_with(2, text);
  }
}

TEST_CASE("pods of Kubeflow's PyTorchJob train together, and rank 0 says what it found") {
  Hosts on;
  if (!on.there()) return;
  for (const char* host : {"A", "B"}) {
    const std::string rank = *host == 'A' ? "0" : "1";
    const auto variables = rank_at("nodeA", *host - 'A', 2,
                                   {{"PYTHONUNBUFFERED", "0"},
                                    {"PET_MASTER_ADDR", "nodeA"},
                                    {"PET_MASTER_PORT", std::to_string(port)},
                                    {"PET_NNODES", "2"},
                                    {"PET_NODE_RANK", rank},
                                    {"PET_NPROC_PER_NODE", "auto"}});
    on.start(host, variables);
  }
  const auto codes = on.ranks.wait(60s);
  INFO(on.ranks[0].out() << on.ranks[0].error() << on.ranks[1].out() << on.ranks[1].error());
  CHECK(codes == std::vector<int>{0, 0});
  CHECK(count(on.ranks[0].error(),
              "lockstep: 2 ranks on 2 hosts (nodeA: 1, nodeB: 1), started by hand (RANK, WORLD_SIZE), "
              "rendezvous at tcp://") == 1);
  CHECK(count(on.ranks[0].error(), "; threads per rank: 1, from OMP_NUM_THREADS\n") == 1);
}

}  // namespace two_hosts_fault_test
