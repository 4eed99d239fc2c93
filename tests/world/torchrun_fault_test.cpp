#include <chrono>
#include <string>
#include <thread>

#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/reported.hpp"
#include "support/torchrun.hpp"
#include "support/two_hosts.hpp"

namespace torchrun_fault_test {

using namespace std::chrono_literals;
using namespace lockstep_test;
using Strings = std::vector<std::string>;

namespace {

const std::string program = test_program("world_program");

Strings command(Strings options, Strings arguments) {
  Strings all{torchrun(), "--no-python"};
  all.insert(all.end(), options.begin(), options.end());
  all.push_back(program);
  all.insert(all.end(), arguments.begin(), arguments.end());
  return all;
}

Strings one_node(int nproc) {
  return {fmt::format("--nproc-per-node={}", nproc), fmt::format("--master-port={}", free_port())};
}

}  // namespace

TEST_CASE("under torchrun launch is one worker") {
  if (torchrun().empty()) return;
  const auto result = run(command(one_node(3), {"well"}), {}, 120s);
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  for (int rank = 0; rank < 3; ++rank)
    CHECK(count(result.out, fmt::format("[rank {0}] rank {0} of 3, local {0} of 3\n", rank)) == 1);
  for (const char* noise : {"warning", "Warning", "TCPStore", ".cpp:"})  // of c10d's
    CHECK(result.error.find(noise) == std::string::npos);
  CHECK(result.left == 0);
}

TEST_CASE("under torchrun rank 0 says what it found, and who has set the threads", "[.release]") {
  if (torchrun().empty()) return;
  const auto said = [](int nproc, const std::string& threads) {
    return run(command(one_node(nproc), {"well"}), {{"OMP_NUM_THREADS", threads}}, 120s).error;
  };
  const auto start = fmt::format(
      "lockstep: 2 ranks on 1 host ({}: 2), started by torchrun (RANK, WORLD_SIZE), rendezvous at tcp://",
      host_name());
  auto error = said(2, "");
  INFO(error);
  CHECK(count(error, start) == 1);
  CHECK(count(error, "; threads per rank: 1, from OMP_NUM_THREADS\n") == 1);
  error = said(1, "1");
  CHECK(count(error, fmt::format("lockstep: 1 rank on 1 host ({}: 1), started by torchrun (RANK, "
                                 "WORLD_SIZE); threads per rank: 1, from OMP_NUM_THREADS\n",
                                 host_name())) == 1);
  error = said(2, "2");
  CHECK(count(error, "; threads per rank: 2, from OMP_NUM_THREADS\n") == 1);
}

TEST_CASE("torchrun shows the rank that failed and what it said", "[.release]") {
  if (torchrun().empty()) return;
  const auto result = run(command(one_node(3), {"throws"}), {}, 120s);
  INFO(result.out << result.error);
  CHECK(result.code == 1);
  CHECK(count(result.error, "error: rank 1 failed: std::out_of_range: no such digit\n") == 1);
  const auto root = result.error.find("Root Cause");
  REQUIRE(root != std::string::npos);
  for (const char* words : {"rank      : 1 (local_rank: 1)", "no such digit"})
    CHECK_THAT(result.error.substr(root), ContainsSubstring(words));
  CHECK(result.left == 0);
}

TEST_CASE("no worker survives a killed agent of torchrun") {
  if (torchrun().empty()) return;
  auto agent = start(command(one_node(2), {"waits"}));
  for (const char* rank : {"rank 0 of 2", "rank 1 of 2"}) REQUIRE(agent.wait_for_output(rank, 120s));
  CHECK(processes_left(agent.marker(), 0s) >= 3);
  agent.signal(SIGKILL);
  REQUIRE(agent.wait(20s));
  CHECK(processes_left(agent.marker(), 20s) == 0);
}

TEST_CASE("bad input under torchrun is said once", "[.release]") {
  if (torchrun().empty()) return;
  const auto result = run(command(one_node(2), {"usage after meeting"}), {}, 120s);
  INFO(result.out << result.error);
  CHECK(count(result.error, "error: --epochs -1 is too small: it must be 0 or more\n") == 1);
}

TEST_CASE(
    "a second attempt of torchrun does not meet in the store of the first, which its agent still names") {
  if (torchrun().empty()) return;
  const auto file = fmt::format("/tmp/lockstep_attempt_{}", new_marker());
  auto options = one_node(3);
  options.push_back("--max-restarts=1");
  const auto result = run(command(options, {"fails once", file}), {}, 120s);
  std::remove(file.c_str());
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  CHECK(count(result.out, " of 3, local ") == 3);
  CHECK(result.left == 0);
}

TEST_CASE("under torchrun a SIGTERM of a host is told as such") {
  if (torchrun().empty()) return;
  const auto port = fmt::format("--master-port={}", free_port());
  const auto node = [&](int rank) {
    return start(command({"--nnodes=2", fmt::format("--node-rank={}", rank), "--master-addr=127.0.0.1", port,
                          "--nproc-per-node=1"},
                         {"waits for failure"}));
  };
  auto a = node(0), b = node(1);
  REQUIRE(a.wait_for_output("rank 0 of 2", 120s));
  REQUIRE(b.wait_for_output("rank 1 of 2", 120s));
  b.signal(SIGTERM);
  REQUIRE(a.wait(60s));
  INFO(a.error());
  const auto said = reported(a.error());
  CHECK(said.errors == 1);
  CHECK(said.failure.rank == 1);
  CHECK(said.failure.code == 128 + SIGTERM);
  CHECK(said.noticed_by == 0);
  REQUIRE(b.wait(60s));
  CHECK(count(b.error(), "error: ") == 0);
}

TEST_CASE("torchrun's agents on two hosts start 2 and 1 ranks, which train together", "[.release]") {
  const auto agent = torchrun();
  if (agent.empty()) return;
  const TwoHosts hosts;
  if (!hosts.missing().empty()) {
    WARN("SKIPPED: " << hosts.missing());
    return;
  }
  const auto backend = GENERATE(as<std::string>(), "static", "c10d");
  const int port = free_port();
  const auto marker = new_marker();
  const auto node = [&](const std::string& host) {
    const bool first = host == "A";
    Strings command{agent, "--no-python", "--nnodes=2", fmt::format("--nproc-per-node={}", first ? 2 : 1),
                    "--rdzv-backend=" + backend};
    if (backend == "static")
      command.insert(command.end(), {fmt::format("--node-rank={}", first ? 0 : 1), "--master-addr=10.177.0.1",
                                     fmt::format("--master-port={}", port)});
    else
      command.insert(command.end(),
                     {"--rdzv-id=two-hosts", fmt::format("--rdzv-endpoint=10.177.0.1:{}", port),
                      fmt::format("--rdzv-conf=is_host={}", first ? 1 : 0),
                      fmt::format("--local-addr=10.177.0.{}", first ? 1 : 2)});
    command.insert(command.end(), {test_program("collective_program"), "well"});
    return start(hosts.on(host, command), {{marker_variable, marker}});
  };
  auto a = node("A"), b = node("B");
  const bool ended = a.wait(120s) && b.wait(120s);
  INFO(backend << "\n" << a.out() << a.error() << b.out() << b.error());
  REQUIRE(ended);
  CHECK(a.exit_code() == 0);
  CHECK(b.exit_code() == 0);
  const auto out = a.out() + b.out();
  for (int rank = 0; rank < 3; ++rank)
    CHECK(count(out, fmt::format("rank {} has reached step 5\n", rank)) == 1);
  CHECK(count(out, "sum 1048576\n") == 1);
  const auto error = a.error() + b.error();
  CHECK(count(error, "lockstep: 3 ranks on 2 hosts (node") == 1);
  if (backend == "static") CHECK(count(error, "(nodeA: 2, nodeB: 1)") == 1);
  CHECK(processes_left(marker) == 0);
}

}  // namespace torchrun_fault_test
