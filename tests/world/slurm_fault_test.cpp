// Ranks under a real Slurm: a cluster of two nodes on this machine (slurm_cluster.sh).
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "examples/square_digits.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/torchrun.hpp"

namespace slurm_fault_test {

using namespace std::chrono_literals;
using namespace lockstep_test;
using Strings = std::vector<std::string>;

namespace {

// The cluster, which starts once and ends with this process.
struct Cluster {
  std::string folder = fmt::format("/tmp/lockstep_slurm_{}", getpid());
  std::string missing;
  Process script{{"bash", std::string(LOCKSTEP_SOURCE_FOLDER) + "/slurm_cluster.sh", folder,
                  std::to_string(free_port()), std::to_string(free_port()), std::to_string(free_port())},
                 {},
                 {}};

  Cluster() {
    if (script.wait_for_output("ready\n", 60s)) return;
    script.signal(SIGTERM);
    script.wait(20s);
    const auto at = script.out().find("SKIPPED: ");
    missing = at == std::string::npos ? "the cluster did not start within 60 s"
                                      : script.out().substr(at + 9, script.out().find('\n', at) - at - 9);
  }
  ~Cluster() {
    script.signal(SIGTERM);
    script.wait(30s);
  }
};

// The cluster; a null pointer, with the reason printed, where there can be none.
Cluster* cluster() {
  static Cluster started;
  if (started.missing.empty()) return &started;
  WARN("SKIPPED: " << started.missing);
  return nullptr;
}

Ended slurm(const Cluster& on, Strings command, Variables variables = {},
            std::chrono::milliseconds timeout = 90s) {
  variables["SLURM_CONF"] = on.folder + "/slurm.conf";
  variables.insert({"OMP_NUM_THREADS", ""});
  return run(std::move(command), std::move(variables), timeout);
}

std::string content(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Runs a batch script and returns its exit code and what it wrote to both streams.
struct Batch {
  int code;
  std::string out;
};
Batch batch(const Cluster& on, const Strings& options, const std::string& script) {
  const auto path = on.folder + "/batch.sh", out = on.folder + "/batch.out";
  std::ofstream(path) << "#!/bin/sh\n" << script << "\n";
  Strings command{"sbatch", "--wait", "--output=" + out};
  command.insert(command.end(), options.begin(), options.end());
  command.push_back(path);
  const auto ended = slurm(on, command);
  return {ended.code, content(out) + ended.error};
}

const std::string program = test_program("world_program");

// The path of a program of examples/; empty, with the reason printed, where it is not built.
std::string example(const std::string& name) {
  const char* folder = std::getenv("LOCKSTEP_EXAMPLES");
  const std::string path = fmt::format("{}/{}", folder ? folder : ".", name);
  if (access(path.c_str(), X_OK) == 0) return path;
  WARN("SKIPPED: no " << path);
  return {};
}

// The path of a batch script of examples/.
std::string batch_script(const std::string& name) {
  return std::string(LOCKSTEP_SOURCE_FOLDER) + "/../../examples/" + name;
}

// Waits until the file holds the text.
bool holds(const std::string& path, const std::string& text, std::chrono::milliseconds timeout = 60s) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (content(path).find(text) == std::string::npos) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(100ms);
  }
  return true;
}

}  // namespace

TEST_CASE("srun starts one rank per task, and rank 0 says what it found") {
  const Cluster* on = cluster();
  if (on == nullptr) return;
  const auto result = slurm(*on, {"srun", "-N", "2", "-n", "3", program, "well"});
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  for (const char* line :
       {"rank 0 of 3, local 0 of 2", "rank 1 of 3, local 1 of 2", "rank 2 of 3, local 0 of 1"})
    CHECK(count(result.out, fmt::format("[rank {}] {}\n", line[5], line)) == 1);
  CHECK(
      result.error.starts_with("lockstep: 3 ranks on 2 hosts (n1: 2, n2: 1), started by srun (SLURM_PROCID, "
                               "SLURM_STEP_NUM_TASKS), rendezvous at tcp://n1:6"));
  CHECK(result.error.ends_with("; threads per rank: 1, from its share of the cores\n"));
  CHECK(count(result.error, "\n") == 1);
  CHECK(slurm(*on, {"srun", "-N", "2", "-n", "3", program, "well"}, {{"LOCKSTEP_LOG_LEVEL", "warning"}})
            .error.empty());
}

TEST_CASE("srun -m arbitrary ends at once with a remedy, and runs with it") {
  const Cluster* on = cluster();
  if (on == nullptr) return;
  const auto hosts = on->folder + "/arbitrary";
  std::ofstream(hosts) << "n2\nn1\n";
  const Strings command{"srun", "-N", "2", "-n", "2", "-m", "arbitrary", program, "well"};
  const auto refused = slurm(*on, command, {{"SLURM_HOSTFILE", hosts}}, 30s);
  INFO(refused.out << refused.error);
  CHECK(refused.code == 2);
  CHECK(count(refused.error, "srun -m arbitrary: set MASTER_ADDR to the host of rank 0") >= 1);
  const auto result = slurm(*on, command, {{"SLURM_HOSTFILE", hosts}, {"MASTER_ADDR", "n2"}});
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  CHECK(result.error.starts_with("lockstep: 2 ranks on 2 hosts (n2: 1, n1: 1), started by srun"));
}

TEST_CASE("srun starts launch once on each of two hosts, which starts the ranks there") {
  const Cluster* on = cluster();
  if (on == nullptr) return;
  const Strings once{"srun", "-N", "2", "--ntasks-per-node=1", program};
  const auto with = [&](Strings arguments) {
    arguments.insert(arguments.begin(), once.begin(), once.end());
    return slurm(*on, arguments);
  };
  const auto result = with({"well", "--nproc", "2"});
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  CHECK(result.left == 0);
  for (int rank = 0; rank < 4; ++rank)
    CHECK(count(result.out, fmt::format("[rank {0}] rank {0} of 4, local {1} of 2\n", rank, rank % 2)) == 1);
  CHECK(result.error.starts_with(
      "lockstep: 4 ranks on 2 hosts (n1: 2, n2: 2), started by srun with --nproc, rendezvous at tcp://n1:6"));
  CHECK(count(result.error, "\n") == 1);

  const auto failed = with({"throws", "--nproc", "2"});
  INFO(failed.out << failed.error);
  CHECK(failed.code == 1);
  CHECK(failed.left == 0);
  CHECK(count(failed.error, "error: rank 1 (pid ") >= 1);  // also where the other host notices it
  CHECK(count(failed.error, "failed: std::out_of_range: no such digit\n") >= 1);

  const auto differ = slurm(*on, {"srun", "-N", "2", "--ntasks-per-node=1", "sh", "-c",
                                  "exec '" + program + "' well --nproc $((1 + SLURM_NODEID))"});
  INFO(differ.error);
  CHECK(differ.code == 1);
  CHECK(count(differ.error, "the ranks disagree on their number: rank ") >= 1);
}

TEST_CASE("a task of srun gets the threads of its cores, unless OMP_NUM_THREADS is set") {
  const Cluster* on = cluster();
  if (on == nullptr) return;
  const int cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const auto threads = [&](const Strings& options, const Variables& variables = {}) {
    Strings command{"srun"};
    command.insert(command.end(), options.begin(), options.end());
    command.insert(command.end(), {program, "threads"});
    const auto result = slurm(*on, command, variables);
    INFO(result.out << result.error);
    CHECK(result.code == 0);
    return result.out;
  };
  CHECK(count(threads({"-N", "1", "-n", "2"}), "threads 1\n") == 2);
  CHECK(count(threads({"-N", "1", "-n", "2", "-c", "2"}), fmt::format("threads {}\n", std::min(2, cores))) ==
        2);
  CHECK(count(threads({"-N", "1", "-n", "2"}, {{"OMP_NUM_THREADS", "2"}}), "threads 2\n") == 2);
}

TEST_CASE("srun with PMI2 and with PMIx starts the ranks of Slurm's step") {
  const Cluster* on = cluster();
  if (on == nullptr) return;
  for (const std::string plugin : {"pmi2", "pmix"}) {
    const auto result = slurm(*on, {"srun", "--mpi=" + plugin, "-N", "2", "-n", "3", program, "well"});
    if (result.error.find("Invalid MPI type") != std::string::npos) {
      WARN("SKIPPED: this Slurm cannot load its plugin " << plugin << " (PMIx: the package libpmix-dev)");
      continue;
    }
    INFO(plugin << "\n" << result.out << result.error);
    CHECK(result.code == 0);
    for (const char* line :
         {"rank 0 of 3, local 0 of 2", "rank 1 of 3, local 1 of 2", "rank 2 of 3, local 0 of 1"})
      CHECK(count(result.out, fmt::format("[rank {}] {}\n", line[5], line)) == 1);
    CHECK(count(result.error,
                "lockstep: 3 ranks on 2 hosts (n1: 2, n2: 1), started by srun (SLURM_PROCID, "
                "SLURM_STEP_NUM_TASKS), rendezvous at tcp://n1:6") == 1);
  }
}

TEST_CASE("srun starts torchrun on each host, whose variables win") {
  const Cluster* on = cluster();
  const std::string agent = torchrun();
  if (on == nullptr || agent.empty()) return;
  const auto result = slurm(*on, {"srun", "-N", "2", "--ntasks-per-node=1", "-c", "2", agent, "--no-python",
                                  "--nnodes=2", "--nproc-per-node=2", "--rdzv-id=456", "--rdzv-backend=c10d",
                                  fmt::format("--rdzv-endpoint=n1:{}", free_port()), program, "well"});
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  for (int rank = 0; rank < 4; ++rank)
    CHECK(count(result.out, fmt::format("rank {} of 4, local {} of 2\n", rank, rank % 2)) == 1);
  CHECK(count(result.error, "lockstep: 4 ranks on 2 hosts (n") == 1);
  CHECK(count(result.error, "), started by torchrun (RANK, WORLD_SIZE), rendezvous at tcp://") == 1);
  CHECK(count(result.error, "; threads per rank: 1, from OMP_NUM_THREADS\n") == 1);
}

TEST_CASE("the tutorial's batch script runs its elastic demo on two hosts") {
  const Cluster* on = cluster();
  if (on == nullptr) return;
  const std::string demo = example("ddp_toy");
  if (demo.empty()) return;
  // Two ranks on each host: the command line wins over the script's eight.
  const auto out = on->folder + "/ddp_toy.out";
  const auto ended = slurm(*on, {"sbatch", "--wait", "--ntasks-per-node=2", "--gpus-per-node=2",
                                 "--output=" + out, batch_script("ddp_toy.slurm.sh"), demo});
  const auto all = content(out);
  INFO(ended.error << all);
  CHECK(ended.code == 0);
  for (int rank = 0; rank < 4; ++rank)
    CHECK(count(all, fmt::format("Start running basic DDP example on rank {}.\n", rank)) == 1);
  CHECK(count(all,
              "lockstep: 4 ranks on 2 hosts (n1: 2, n2: 2), started by srun (SLURM_PROCID, "
              "SLURM_STEP_NUM_TASKS), rendezvous at tcp://n1:6") == 1);
}

TEST_CASE("the batch script of the series starts torchrun on two hosts, which resume from a snapshot") {
  const Cluster* on = cluster();
  const std::string agent = torchrun();
  if (on == nullptr || agent.empty()) return;
  const std::string series = example("multigpu_torchrun");
  if (series.empty()) return;
  const auto out = on->folder + "/series.out", snapshot = on->folder + "/series.pt";
  const auto first =
      run({series, "1", "1", "--snapshot_path", snapshot, "--nproc", "2"}, {{"OMP_NUM_THREADS", "1"}});
  INFO(first.error);
  CHECK(first.code == 0);
  const auto ended =
      slurm(*on,
            {"sbatch", "--wait", "--nodes=2", "--gpus-per-task=1", "--cpus-per-task=2", "--output=" + out,
             batch_script("multigpu_torchrun.slurm.sh"), series, "2", "1", "--snapshot_path", snapshot},
            {{"RDZV_PORT", std::to_string(free_port())},
             {"PATH", agent.substr(0, agent.rfind('/')) + ":" + std::getenv("PATH")}});
  const auto all = content(out);
  INFO(ended.error << all);
  CHECK(ended.code == 0);
  CHECK(count(all, "), started by torchrun (RANK, WORLD_SIZE), rendezvous at tcp://") == 1);
  CHECK(count(all, "Resuming training from snapshot at Epoch 1\n") == 2);
  CHECK(count(all, "] Epoch 0 |") == 0);
  for (int rank : {0, 1})
    CHECK(count(all, fmt::format("[GPU{}] Epoch 1 | Batchsize: 32 | Steps: 32\n", rank)) == 1);
}

TEST_CASE("a task of srun that fails ends the others") {
  const Cluster* on = cluster();
  if (on == nullptr) return;
  const auto result = slurm(*on, {"srun", "-N", "2", "-n", "3", program, "throws"});
  INFO(result.out << result.error);
  CHECK(result.code == 1);
  CHECK(count(result.error, "error: rank 1 failed: std::out_of_range: no such digit\n") == 1);
  CHECK(count(result.error, "; noticed by rank ") == 2);
}

TEST_CASE("a batch script starts ranks by srun, and is no rank itself") {
  const Cluster* on = cluster();
  if (on == nullptr) return;
  auto result = batch(*on, {"-N", "2", "-n", "3"}, "srun '" + program + "' well");
  INFO(result.out);
  CHECK(result.code == 0);
  CHECK(count(result.out, " of 3, local ") == 3);
  CHECK(count(result.out, "started by srun") == 1);
  // A step of fewer tasks on the second host alone: the rendezvous is there, not on the first host of the job.
  result = batch(*on, {"-N", "2", "--ntasks-per-node=2"}, "srun -N 1 -n 2 -w n2 '" + program + "' well");
  INFO(result.out);
  CHECK(result.code == 0);
  CHECK(count(result.out, "2 ranks on 1 host (n2: 2)") == 1);

  result = batch(*on, {"-N", "2", "-n", "3"}, "'" + program + "' well");
  INFO(result.out);
  CHECK(result.code == 2);
  CHECK(count(result.out,
              "of 3 tasks (SLURM_NTASKS) but was not started by srun: start it as `srun PROGRAM`") == 1);
  result = batch(*on, {"-N", "1", "-n", "3"}, "'" + program + "' well --nproc 2");
  INFO(result.out);
  CHECK(result.code == 0);
  CHECK(count(result.out, " of 2, local ") == 2);
}

TEST_CASE("bad input under srun ends every task with exit code 2") {
  const Cluster* on = cluster();
  if (on == nullptr) return;
  for (const auto& [words, tasks, text] : std::vector<std::tuple<Strings, int, std::string>>{
           {{"-N", "2", "-n", "2", "env", "WORLD_SIZE=4", program, "well"},
            2,
            "error: WORLD_SIZE=4 contradicts srun, which has started 2 processes"},
           {{"-N", "1", "-n", "3", program, "well", "--nproc", "2"},
            3,
            "--nproc 2 contradicts srun, which has started 3 of 3 ranks on this host"}}) {
    Strings command{"srun"};
    command.insert(command.end(), words.begin(), words.end());
    const auto result = slurm(*on, command);
    INFO(result.out << result.error);
    CHECK(result.code == 2);
    CHECK(count(result.error, text) == tasks);
  }
}

TEST_CASE("scancel ends every task, and with --kill-on-bad-exit so does a killed one") {
  const Cluster* on = cluster();
  if (on == nullptr) return;
  const auto result =
      batch(*on, {"-N", "2", "-n", "3"},
            "srun '" + program + "' 'waits for failure' & sleep 5; scancel $SLURM_JOB_ID.0; wait $!");
  INFO(result.out);
  CHECK(result.code != 0);
  CHECK(slurm(*on, {"squeue", "--noheader", "--steps"}).out.find("world_program") == std::string::npos);

  const auto killed = slurm(*on, {"srun", "--kill-on-bad-exit=1", "-N", "2", "-n", "3", program, "killed"});
  INFO(killed.out << killed.error);
  CHECK(killed.code > 128);  // of the killed task, or of those that srun ends
  CHECK(count(killed.error, "task 2: Killed") == 1);
}

TEST_CASE("USR1 of Slurm stops a job, which puts itself into the queue again and goes on") {
  const Cluster* on = cluster();
  if (on == nullptr) return;
  const std::string stop = test_program("stop_program");
  const auto whole = slurm(*on, {"srun", "-N", "2", "--ntasks-per-node=2", stop, on->folder + "/none"});
  INFO(whole.out << whole.error);
  const auto at = whole.out.find("finished after ");
  REQUIRE(at != std::string::npos);
  const auto end = whole.out.substr(at, whole.out.find('\n', at) + 1 - at);

  // The script of the examples; two ranks on each host: the command line wins over the script's four.
  const auto out = on->folder + "/requeue.out";
  const auto slow_at_first =
      fmt::format("exec '{}' '{}/run.ckpt' $((50 * !${{SLURM_RESTART_COUNT:-0}}))", stop, on->folder);
  auto job = slurm(*on, {"sbatch", "--parsable", "--ntasks-per-node=2", "--output=" + out,
                         batch_script("resumable.slurm.sh"), "sh", "-c", slow_at_first})
                 .out;
  job.erase(job.find_last_not_of('\n') + 1);
  CHECK(holds(out, "step 10\n"));
  CHECK(slurm(*on, {"scancel", "--signal=USR1", job}).code == 0);
  CHECK(holds(out, "exit code 75\n"));
  // Slurm holds a requeued job back for two minutes, from when it has ended on all hosts: an earlier update is lost.
  for (int i = 0; i < 30 && !holds(out, "exit code 0\n", 2s); ++i)
    slurm(*on, {"scontrol", "update", "jobid=" + job, "StartTime=now"});
  CHECK(holds(out, "exit code 0\n", 0s));
  const auto all = content(out);
  INFO(all);
  CHECK(count(all, "warning: stopped after step ") == 1);
  CHECK(count(all, ", as SIGUSR1 on rank ") == 1);
  CHECK(count(all, "resumed\n") == 1);
  CHECK(count(all, end) == 1);  // bitwise as without the stop
}

TEST_CASE("examples under srun on two hosts") {
  const Cluster* on = cluster();
  if (on == nullptr) return;
  const SquareDigits digits(96, 50);
  const auto data = digits.path().string(), model = on->folder + "/ddp_main.pt";
  struct Run {
    std::string program;
    Strings arguments, lines;  // each line once
    std::string saved = {};
    std::uintmax_t parameters = 0;  // of the saved model
  };
  for (const auto& [name, arguments, lines, saved, parameters] : std::vector<Run>{
           {"ring_all_reduce", {"--elements", "999"}, {"3 ranks: the sums equal all_reduce's; "}},
           {"five_lines", {"--epochs", "1"}, {"Epoch 0 | Batchsize: 32 | Steps: 22 | Loss "}},
           {"gan", {"--steps", "2", "--digits", "96"}, {"done: 2 steps of two models on 3 ranks\n"}},
           {"mingpt",
            {"gpt_config.n_layer=1", "gpt_config.n_head=2", "gpt_config.n_embd=16",
             "data_config.block_size=16", "data_config.truncate=0.1", "trainer_config.max_epochs=1",
             "sample_config.number=0", "trainer_config.snapshot_path=" + on->folder + "/mingpt.pt"},
            {"[RANK0] Epoch 1 | Iter 0 | Train Loss 3.", "[RANK2] Epoch 1 | Iter 0 | Train Loss 3.",
             "\nEpoch 1 | Eval Loss "}},
           {"ddp_main",
            {"-e", "1", "-b", "16", "--scale-lr", "--data-dir", data, "--save", model},
            {"; global batch 48 = 16 x 3 ranks x 1)\n", "begin training of epoch 1/1\n", "begin testing\n",
             "Accuracy is "},
            model,
            29'034},
           {"imagenet",
            {"--dummy", "--epochs", "1", "-b", "330", "-p", "1", "--save-dir", on->folder},
            {"=> creating model 'resnet18'\n", "Epoch: [0][1/2]\tTime ", "Epoch: [0][2/2]\tTime ",
             "Test: [1/1]\tTime ", "\n *   Acc@1 "},
            on->folder + "/checkpoint.pt",
            11'689'512}}) {
    Strings command{"srun", "-N", "2", "-n", "3", example(name)};
    if (command.back().empty()) continue;
    command.insert(command.end(), arguments.begin(), arguments.end());
    const auto ended = slurm(*on, command);
    INFO(name << "\n" << ended.out << ended.error);
    CHECK(ended.code == 0);
    CHECK(ended.left == 0);
    CHECK(count(ended.error, "lockstep: 3 ranks on 2 hosts (n1: 2, n2: 1), started by srun (") == 1);
    for (const auto& line : lines) {
      CAPTURE(line);
      CHECK(count(ended.out, line) == 1);
    }
    if (saved.empty()) continue;
    std::error_code absent;
    CHECK(std::filesystem::file_size(saved, absent) > 4 * parameters);
    CHECK_FALSE(absent);
  }
  // A wrong argument ends every rank with exit code 2.
  const auto path = example("ddp_main");
  if (path.empty()) return;
  const auto refused = slurm(*on, {"srun", "-N", "2", "-n", "3", path, "--data-dir", "/absent"});
  INFO(refused.out << refused.error);
  CHECK(refused.code == 2);
  CHECK(refused.left == 0);
  CHECK(count(refused.error, "/absent") >= 1);
}

}  // namespace slurm_fault_test
