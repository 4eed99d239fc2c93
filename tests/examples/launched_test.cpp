// Examples under mpirun, mpiexec and torchrun, which start their ranks.
#include <unistd.h>

#include <map>
#include <string>
#include <vector>

#include "examples/full_mnist.hpp"
#include "examples/small_mnist.hpp"
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

// A folder of 960 digits, and 200 to test.
std::string few_digits() {
  static const SmallMnist folder;
  return folder.path().string();
}

}  // namespace

TEST_CASE("examples under each launcher", "[.release]") {
  const auto [launcher, starter] = GENERATE(table<std::string, std::string>(
      {{"mpirun.openmpi", "mpirun of Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)"},
       {"mpiexec.hydra", "mpiexec (PMI_RANK, PMI_SIZE)"},
       {"torchrun", "torchrun (RANK, WORLD_SIZE)"}}));
  const auto command = two_ranks(launcher);
  if (command.empty()) return;
  const std::string digits = few_digits();
  // The program of each ends with 0, and its lines stand that often in the output of both ranks.
  struct Run {
    std::string program;
    std::vector<std::string> arguments;
    std::map<std::string, int> lines;
    bool saves = false;  // into the working folder
  };
  const Run ring{
      "ring_all_reduce", {"--elements", "1000"}, {{"] sent 4000 bytes: 1.0000 of the tensor's 4000\n", 2}}};
  const Run five_lines{"five_lines", {"--epochs", "2"}, {{"Epoch 1 | Batchsize: 32 | Steps: 32 | Loss ", 1}}};
  const Run resumable{"multigpu_torchrun",
                      {"1", "1", "--snapshot_path", "snapshot.pt"},
                      {{"[GPU0] Epoch 0 | Batchsize: 32 | Steps: 32\n", 1},
                       {"[GPU1] Epoch 0 | Batchsize: 32 | Steps: 32\n", 1},
                       {"Epoch 0 | Training snapshot saved at snapshot.pt\n", 1}},
                      true};
  const Run averaged{"average_gradients",
                     {"--epochs", "1", "-b", "10", "--test", "--data-dir", digits},
                     {{"Epoch [1/1], Step [50/96], Loss: ", 1}, {"Accuracy of the test: ", 1}}};
  const Run mnist{"mnist",
                  {"-e", "1", "-b", "16", "--lr", "0.05", "--data-dir", digits},
                  {{"begin training of epoch 1/1\n", 1}, {"begin testing\n", 1}, {"Accuracy is ", 1}}};
  const Run gan{"gan",
                {"--steps", "4", "--digits", "96"},
                {{"step 0: discriminator ", 1}, {"done: 4 steps of two models on 2 ranks\n", 1}}};
  const Run ddp_main{"ddp_main",
                     {"--epochs", "1", "-b", "16", "--data-dir", digits},
                     {{"begin training of epoch 1/1\n", 1}, {"Accuracy is ", 1}},
                     true};
  const Run imagenet{"imagenet",
                     {"--dummy", "--epochs", "1", "-b", "640", "-p", "1"},
                     {{"=> Dummy data is used!\n", 1},
                      {"Epoch: [0][1/1]\tTime ", 1},
                      {"Test: [1/1]\tTime ", 1},
                      {"Acc@1 ", 3}},
                     true};
  std::vector<Run> runs{ring, resumable, ddp_main, imagenet};
  if (launcher == "mpirun.openmpi")
    runs.insert(runs.end(),
                {averaged,
                 five_lines,
                 {"libtorch_mnist_ddp",
                  {"--samples", "320", "--epochs", "1", "--data-dir", full_mnist()},
                  {{"Train Epoch: 1 [    0/  320] Loss: ", 1}, {"Test set: Average loss: ", 1}}}});
  if (launcher == "mpiexec.hydra")
    runs.insert(runs.end(), {mnist,
                             gan,
                             {"average_gradients",
                              {"group"},
                              {{"world size:2. I'm rank 0.\n", 1}, {"world size:2. I'm rank 1.\n", 1}}},
                             {"ddp_toy",
                              {"--cpu-devices", "4", "--checkpoint", "toy.checkpoint"},
                              {{"Running basic DDP example on rank 1.\n", 1},
                               {"Running DDP with model parallel example on rank 0.\n", 1}}},
                             {"libtorch_dcgan_ddp",
                              {"--samples", "32", "--batch-size", "8", "--epochs", "1", "--checkpoint-every",
                               "2", "--data-dir", full_mnist()},
                              {{"[ 1/ 1][  2/  2] D_loss: ", 1}, {"-> checkpoint 1\n", 1}},
                              true}});
  if (launcher == "torchrun")
    runs.insert(
        runs.end(),
        {averaged,
         {"multigpu",
          {"1", "1"},
          {{"[GPU0] Epoch 0 | Batchsize: 32 | Steps: 32\n", 1},
           {"[GPU1] Epoch 0 | Batchsize: 32 | Steps: 32\n", 1}},
          true},
         {"ddp_toy",
          {"elastic"},
          {{"Start running basic DDP example on rank 0.\n", 1},
           {"Start running basic DDP example on rank 1.\n", 1}}},
         {"mingpt",
          {"gpt_config.n_layer=1", "gpt_config.n_head=2", "gpt_config.n_embd=16", "data_config.block_size=16",
           "data_config.truncate=0.1", "trainer_config.batch_size=16", "trainer_config.max_epochs=1",
           "trainer_config.save_every=1", "sample_config.number=1", "sample_config.length=10"},
          {{"[RANK0] Epoch 1 | Iter 0 | Train Loss 3.", 1},
           {"[RANK1] Epoch 1 | Iter 0 | Train Loss 3.", 1},
           {"\nEpoch 1 | Eval Loss ", 1},
           {"Snapshot saved at epoch 1\n", 1},
           {"--- sample 1 ---\n", 1}},
          true}});
  for (const auto& [program, arguments, lines, saves] : runs) {
    const TemporaryFolder folder;  // the working folder
    std::vector<std::string> all{"env", "--chdir=" + folder.path().string()};
    all.insert(all.end(), command.begin(), command.end());
    all.push_back(test_program(program));
    if (access(all.back().c_str(), X_OK) != 0) {
      WARN("SKIPPED: " << program << " is not built");
      continue;
    }
    all.insert(all.end(), arguments.begin(), arguments.end());
    const Ended ended = run(all, {{"OMP_NUM_THREADS", "1"}}, Milliseconds(120000));
    INFO(launcher << ", " << program << "\nout: " << ended.out << "\nerror: " << ended.error);
    CHECK(ended.code == 0);
    CHECK(ended.left == 0);
    CHECK(count(ended.error, "lockstep: 2 ranks on 1 host (") == 1);
    CHECK(count(ended.error, ", started by " + starter + ", rendezvous at tcp://") == 1);
    for (const auto& [line, times] : lines) {
      CAPTURE(line);
      CHECK(count(ended.out, line) == times);
    }
    CHECK((folder.files() > 0) == saves);
  }
}

}  // namespace launched_test
