// Examples under mpirun, mpiexec and torchrun, which start their ranks.
#include <unistd.h>

#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/temporary_folder.hpp"
#include "support/torchrun.hpp"

namespace launched_test {

using namespace lockstep_test;

namespace {

// The launcher's command line for two ranks on this host; empty, with the reason printed, where it is missing.
std::vector<std::string> two_ranks(const std::string& launcher) {
  if (launcher == "torchrun") {
    const std::string path = torchrun();
    if (path.empty()) return {};
    return {path, "--standalone", "--no-python", "--nproc-per-node=2"};
  }
  const std::string path = "/usr/bin/" + launcher;
  if (access(path.c_str(), X_OK) != 0) {
    WARN("SKIPPED: no " << path);
    return {};
  }
  // Open MPI refuses the user root, and more ranks than cores.
  if (launcher == "mpirun.openmpi") return {path, "--allow-run-as-root", "--oversubscribe", "-n", "2"};
  return {path, "-n", "2"};
}

}  // namespace

TEST_CASE("examples under each launcher") {
  const std::string launcher = GENERATE(as<std::string>(), "mpirun.openmpi", "mpiexec.hydra", "torchrun");
  const auto command = two_ranks(launcher);
  if (command.empty()) return;
  const TemporaryFolder folder;
  const auto started = [&](const std::string& name, const std::vector<std::string>& arguments) {
    std::vector<std::string> all{"env", "--chdir=" + folder.path().string()};
    all.insert(all.end(), command.begin(), command.end());
    all.push_back(test_program(name));
    all.insert(all.end(), arguments.begin(), arguments.end());
    const Ended ended = run(all, {{"OMP_NUM_THREADS", "1"}}, Milliseconds(120000));
    INFO(launcher << "\nout: " << ended.out << "\nerror: " << ended.error);
    CHECK(ended.left == 0);
    CHECK(count(ended.error, "lockstep: 2 ranks on 1 host") == (ended.code == 0 ? 1 : 0));
    return ended;
  };
  const auto ring = started("ring_all_reduce", {"--elements", "1000"});
  CHECK(ring.code == 0);
  CHECK(count(ring.out, "] sent 4000 bytes: 1.0000 of the tensor's 4000\n") == 2);

  const auto snapshot = (folder / "snapshot.pt").string();
  const auto trained = started("multigpu_torchrun", {"1", "1", "--snapshot_path", snapshot});
  CHECK(trained.code == 0);
  for (const char* rank : {"0", "1"})
    CHECK(count(trained.out, fmt::format("[GPU{}] Epoch 0 | Batchsize: 32 | Steps: 32\n", rank)) == 1);
  CHECK(folder.files() == 1);
  if (launcher != "torchrun") return;
  const auto series = started("multigpu", {"1", "1"});  // saves into the working folder
  CHECK(series.code == 0);
  for (const char* rank : {"0", "1"})
    CHECK(count(series.out, fmt::format("[GPU{}] Epoch 0 | Batchsize: 32 | Steps: 32\n", rank)) == 1);
  CHECK(folder.files() == 2);
  const auto elastic = started("ddp_toy", {"elastic"});
  CHECK(elastic.code == 0);
  for (const char* rank : {"0", "1"})
    CHECK(count(elastic.out, fmt::format("Start running basic DDP example on rank {}.\n", rank)) == 1);
  const auto main = started("ddp_main", {"--epochs", "1", "--samples", "256"});
  CHECK(main.code == 0);
}

TEST_CASE("programs that start processes of their own refuse a launcher") {
  const Variables launched{{"OMPI_COMM_WORLD_RANK", "0"},
                           {"OMPI_COMM_WORLD_SIZE", "2"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  for (const auto& command : {std::vector<std::string>{"average_gradients", "group"}, {"ddp_toy"}}) {
    auto all = command;
    all.front() = test_program(command.front());
    const Ended ended = run(all, launched);
    INFO(ended.error);
    CHECK(ended.code == 2);
    CHECK(ended.out.empty());
    CHECK_THAT(ended.error, ContainsSubstring("launcher"));
    CHECK(count(ended.error, "\n") == 1);
  }
}

}  // namespace launched_test
