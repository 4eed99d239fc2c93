#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>

#include "support/catch.hpp"
#include "support/process.hpp"

namespace mpirun_fault_test {

using namespace std::chrono_literals;
using lockstep_test::count;
using lockstep_test::run;
using lockstep_test::test_program;
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

TEST_CASE("a rank that fails ends the others under mpirun and mpiexec") {
  const auto launcher = GENERATE(as<std::string>(), "mpirun.openmpi", "mpiexec.hydra");
  const Strings command = started(launcher, 3, "throws");
  if (command.empty()) return;
  const auto result = run(command, {}, 120s);
  INFO(result.out << result.error);
  CHECK(result.code != 0);
  CHECK(count(result.error, "error: rank 1") >= 1);
  CHECK(result.left == 0);
}

}  // namespace mpirun_fault_test
