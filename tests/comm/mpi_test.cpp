#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/temporary_folder.hpp"
#include "support/two_hosts.hpp"

namespace mpi_test {

using namespace std::chrono_literals;
using namespace lockstep_test;
using Strings = std::vector<std::string>;

namespace {

// Whether the launcher is Open MPI's.
bool is_open_mpi(const std::string& path) {
  const std::string name = std::filesystem::canonical(path).filename();
  return name == "orterun" || name == "prterun" || name == "mpirun.openmpi";
}

Ended run_ranks(int ranks, const std::string& mode, const std::string& launcher = LOCKSTEP_MPIEXEC) {
  Strings command{launcher};
  // Open MPI refuses the user root, and more ranks than cores.
  if (is_open_mpi(launcher)) command.insert(command.end(), {"--allow-run-as-root", "--oversubscribe"});
  command.insert(command.end(), {"-n", std::to_string(ranks), test_program("mpi_program"), mode});
  return run(command, {{"LOCKSTEP_LOG_LEVEL", "warning"}}, 180s);
}

}  // namespace

TEST_CASE("MpiComm exchanges, reduces and trains with the ranks of mpirun") {
  const int ranks = GENERATE(1, 2, 4);
  const auto result = run_ranks(ranks, "all");
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  CHECK(result.left == 0);
  for (int rank = 0; rank < ranks; ++rank)
    CHECK(count(result.out, fmt::format("rank {0} of {1}, local {0} of {1}: well\n", rank, ranks)) == 1);
}

TEST_CASE("the program may have initialized MPI, also with MPI_THREAD_SERIALIZED, or call launch") {
  const std::string mode = GENERATE("serialized", "of_program", "launched");
  const auto result = run_ranks(3, mode);
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  CHECK(count(result.out, mode + ": well\n") == 3);
  if (mode == "of_program")
    CHECK(count(result.out, "the MPI communicator is rank 2 of 3, and the world is rank 0 of 3: ") == 1);
}

TEST_CASE("a rank leaves without waiting for the others, and MPI_Finalize completes what it has in flight") {
  const std::string mode = GENERATE("leaves", "leaves_serialized");
  const int ranks = GENERATE(2, 3);
  const auto result = run_ranks(ranks, mode);
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  CHECK(count(result.out, mode + ": well\n") == ranks);
}

TEST_CASE("an MPI that cannot be used is refused in one sentence") {
  const auto [mode, text] = GENERATE(table<std::string, std::string>(
      {{"funneled", "error: MPI provides MPI_THREAD_FUNNELED, and MpiComm needs MPI_THREAD_SERIALIZED or "},
       {"finalized", "error: MPI is finalized, and cannot be initialized again in this process: "},
       {"finalized_later", "error: MPI is finalized, and cannot be initialized again in this process: "},
       {"other_library", "error: the program was compiled with the headers of "}}));
  const auto result = run_ranks(1, mode);
  INFO(result.out << result.error);
  CHECK(result.code != 0);
  CHECK(count(result.out, text) == 1);
}

TEST_CASE("the launcher of another MPI library is named") {
  const std::string other =
      is_open_mpi(LOCKSTEP_MPIEXEC) ? "/usr/bin/mpiexec.hydra" : "/usr/bin/mpirun.openmpi";
  if (!std::filesystem::exists(other)) {
    WARN("SKIPPED: no " << other);
    return;
  }
  const auto result = run_ranks(2, "all", other);
  INFO(result.out << result.error);
  CHECK(result.code != 0);
  CHECK(count(result.out, "error: 2 processes were started (") >= 1);
  CHECK(count(result.out, "_SIZE=2), and each is rank 0 of 1 in MPI: the launcher is of another ") >= 1);
}

TEST_CASE("ranks on two hosts need no variable") {
  const TwoHosts hosts;
  if (!hosts.missing().empty()) {
    WARN("SKIPPED: " << hosts.missing());
    return;
  }
  const TemporaryFolder folder;
  const auto script = folder.write_script("agent.sh", hosts.remote_shell("B"));
  Strings command{LOCKSTEP_MPIEXEC};
  if (is_open_mpi(LOCKSTEP_MPIEXEC))
    command.insert(command.end(), {"--allow-run-as-root", "--oversubscribe", "--mca", "plm_rsh_agent", script,
                                   "--host", "nodeA:2,nodeB:1"});
  else
    command.insert(command.end(),
                   {"-launcher", "ssh", "-launcher-exec", script, "-hosts", "nodeA:2,nodeB:1"});
  command.insert(command.end(), {"-n", "3", test_program("mpi_program"), "all"});
  const auto result = run(hosts.on("A", command), {}, 180s);
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  CHECK(count(result.out, "rank 1 of 3, local 1 of 2: well\n") == 1);
  CHECK(count(result.out, "rank 2 of 3, local 0 of 1: well\n") == 1);
  CHECK(count(result.error, "3 ranks on 2 hosts (nodeA: 2, nodeB: 1)") == 1);
  CHECK(count(result.error, "rendezvous at tcp://10.177.0.1:") == 1);
}

TEST_CASE("an abort and a death of a rank end the collectives of the others") {
  const auto aborted = run_ranks(3, "abort");
  INFO(aborted.out << aborted.error);
  CHECK(count(aborted.out, "rank 0 failed first: enough\n") ==
        4);  // in flight and launched later, of two ranks
  CHECK(count(aborted.out, "later: the communicator was aborted: enough\n") == 1);
  const auto died = run_ranks(3, "dies");
  CHECK(died.code == 9);
  CHECK(aborted.left + died.left == 0);
}

}  // namespace mpi_test
