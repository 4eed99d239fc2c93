#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>

#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/temporary_folder.hpp"
#include "support/two_hosts.hpp"

namespace mpirun_fault_test {

using namespace std::chrono_literals;
using namespace lockstep_test;
using Strings = std::vector<std::string>;

namespace {

// The command line of a launcher for `ranks` processes on this host; empty, with the reason printed, where it
// is not installed.
Strings started(const std::string& launcher, int ranks, const std::string& mode) {
  const std::string path = "/usr/bin/" + launcher;
  if (access(path.c_str(), X_OK) != 0) {
    WARN("SKIPPED: no " << path);
    return {};
  }
  Strings command{path};
  // Open MPI refuses the user root, and more ranks than cores.
  if (launcher == "mpirun.openmpi")
    for (const char* option : {"--allow-run-as-root", "--oversubscribe"}) command.emplace_back(option);
  for (const std::string& argument :
       {std::string("-n"), std::to_string(ranks), test_program("world_program"), mode})
    command.push_back(argument);
  return command;
}

}  // namespace

TEST_CASE("under mpirun and mpiexec launch is one worker") {
  const auto launcher = GENERATE(as<std::string>(), "mpirun.openmpi", "mpiexec.hydra");
  const Strings command = started(launcher, 3, "well");
  if (command.empty()) return;
  const auto result = run(command, {}, 120s);
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  for (int rank = 0; rank < 3; ++rank)
    CHECK(count(result.out, fmt::format("[rank {0}] rank {0} of 3, local {0} of 3\n", rank)) == 1);
  CHECK(result.left == 0);
}

TEST_CASE("mpirun and mpiexec start launch once on each host, which starts the ranks there") {
  const auto [launcher, local_rank, local_size] = GENERATE(table<std::string, std::string, std::string>(
      {{"mpirun.openmpi", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
       {"mpiexec.hydra", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}}));
  Strings command = started(launcher, 2, "well");
  if (command.empty()) return;
  // As on two hosts.
  const TemporaryFolder folder;
  const auto script = folder.write_script(
      "one.sh", fmt::format("#!/bin/sh\nexport {}=0 {}=1\nexec \"$@\"\n", local_rank, local_size));
  command.insert(command.end() - 2, script);
  command.insert(command.end(), {"--nproc", "2"});
  const auto result =
      run(command, {{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", std::to_string(free_port())}}, 120s);
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  for (int rank = 0; rank < 4; ++rank)
    CHECK(count(result.out, fmt::format("[rank {0}] rank {0} of 4, local {1} of 2\n", rank, rank % 2)) == 1);
  CHECK(count(result.error, " with --nproc, rendezvous at tcp://127.0.0.1:") == 1);
  CHECK(result.left == 0);
}

TEST_CASE("under mpirun and mpiexec rank 0 says what it found, and the cores are shared", "[.release]") {
  const auto [launcher, name, variables] = GENERATE(table<std::string, std::string, std::string>(
      {{"mpirun.openmpi", "mpirun of Open MPI", "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE"},
       {"mpiexec.hydra", "mpiexec", "PMI_RANK, PMI_SIZE"}}));
  Strings command = started(launcher, 3, "well");
  if (command.empty()) return;
  const std::string program = test_program("world_program");
  const auto said = run(command, {{"OMP_NUM_THREADS", ""}}, 120s);
  INFO(said.out << said.error);
  CHECK(count(said.error,
              fmt::format(
                  "lockstep: 3 ranks on 1 host ({}: 3), started by {} ({}), rendezvous at tcp://127.0.0.1:6",
                  host_name(), name, variables)) == 1);
  CHECK(count(said.error,
              fmt::format("; threads per rank: {}, from its share of the cores\n", share_of_cores(3))) == 1);
  CHECK(count(said.error, "lockstep: ") == 1);

  // One rank per core of two, bound or not; through a script; and as the user says.
  command = started(launcher, 2, "threads");
  const auto unbound = fmt::format("threads {}\n", share_of_cores(2));
  if (launcher == "mpirun.openmpi") {
    CHECK(count(run(command, {{"OMP_NUM_THREADS", ""}}, 120s).out, "threads 1\n") ==
          2);  // each bound to a core
    command.insert(command.begin() + 1, {"--bind-to", "none"});
  }
  CHECK(count(run(command, {{"OMP_NUM_THREADS", ""}}, 120s).out, unbound) == 2);
  CHECK(count(run(command, {{"OMP_NUM_THREADS", "2"}}, 120s).out, "threads 2\n") == 2);
  command.erase(command.end() - 2, command.end());
  for (const char* part : {"sh", "-c"}) command.emplace_back(part);
  command.push_back("'" + program + "' threads; true");
  CHECK(count(run(command, {{"OMP_NUM_THREADS", ""}}, 120s).out, unbound) == 2);
  command.back() = "'" + program + "' well; true";
  const auto joined = run(command, {{"LOCKSTEP_RENDEZVOUS_TIMEOUT", "60"}}, 120s);
  INFO(joined.out << joined.error);
  for (int rank = 0; rank < 2; ++rank)
    CHECK(count(joined.out, fmt::format("rank {0} of 2, local {0} of 2\n", rank)) == 1);
}

TEST_CASE("a rank that fails ends the others under mpirun and mpiexec", "[.release]") {
  const auto launcher = GENERATE(as<std::string>(), "mpirun.openmpi", "mpiexec.hydra");
  const Strings command = started(launcher, 3, "throws");
  if (command.empty()) return;
  const auto result = run(command, {}, 120s);
  INFO(result.out << result.error);
  CHECK(result.code != 0);
  CHECK(count(result.error, "error: rank 1") >= 1);
  CHECK(result.left == 0);
}

TEST_CASE("mpirun and mpiexec start 2 and 1 ranks on two hosts, which meet at MASTER_ADDR", "[.release]") {
  const auto [launcher, starter] = GENERATE(table<std::string, std::string>(
      {{"mpirun.openmpi", "mpirun of Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)"},
       {"mpiexec.hydra", "mpiexec (PMI_RANK, PMI_SIZE)"}}));
  const std::string path = "/usr/bin/" + launcher;
  if (access(path.c_str(), X_OK) != 0) {
    WARN("SKIPPED: no " << path);
    return;
  }
  const TwoHosts hosts;
  if (!hosts.missing().empty()) {
    WARN("SKIPPED: " << hosts.missing());
    return;
  }
  const TemporaryFolder folder;
  const auto script = folder.write_script("agent.sh", hosts.remote_shell("B"));
  const bool open_mpi = launcher == "mpirun.openmpi";
  const auto ended = [&](const Strings& variables, const std::string& started, const std::string& mode) {
    Strings command{path};
    if (open_mpi)
      command.insert(command.end(), {"--allow-run-as-root", "--oversubscribe", "--mca", "plm_rsh_agent",
                                     script, "--host", "nodeA:2,nodeB:1", "-n", "3"});
    else
      command.insert(command.end(),
                     {"-launcher", "ssh", "-launcher-exec", script, "-hosts", "nodeA:2,nodeB:1", "-n", "3"});
    command.insert(command.end(), variables.begin(), variables.end());
    command.insert(command.end(), {test_program(started), mode});
    auto result = run(hosts.on("A", command), {{"OMP_NUM_THREADS", "1"}}, 120s);
    CHECK(result.left == 0);
    return result;
  };
  // As docs/launching.md passes the address on.
  const auto address = open_mpi ? Strings{"-x", "MASTER_ADDR=nodeA", "-x", "MASTER_PORT=29500"}
                                : Strings{"-genv", "MASTER_ADDR", "nodeA", "-genv", "MASTER_PORT", "29500"};
  const auto result = ended(address, "collective_program", "well");
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  for (int rank = 0; rank < 3; ++rank)
    CHECK(count(result.out, fmt::format("rank {} has reached step 5\n", rank)) == 1);
  CHECK(count(result.out, "sum 1048576\n") == 1);
  CHECK(count(result.error, fmt::format("lockstep: 3 ranks on 2 hosts (nodeA: 2, nodeB: 1), started by {}, "
                                        "rendezvous at tcp://nodeA:29500; threads per rank: 1, from "
                                        "OMP_NUM_THREADS\n",
                                        starter)) == 1);

  const auto nowhere = ended({}, "world_program", "well");
  INFO(nowhere.error);
  CHECK(nowhere.code == 2);
  CHECK(nowhere.out.empty());
  CHECK(count(nowhere.error,
              fmt::format("error: {} has started ranks on several hosts and names no address: the "
                          "ranks need the address of their rendezvous. Set MASTER_ADDR ",
                          starter.substr(0, starter.find(" (")))) >= 1);
}

}  // namespace mpirun_fault_test
