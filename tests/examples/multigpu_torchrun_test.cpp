// Training that is killed and started again ends where an undisturbed run ends.
#include <regex>
#include <string>
#include <vector>

#include "examples/output.hpp"
#include "lockstep/files.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "support/by_hand.hpp"
#include "support/temporary_folder.hpp"
#include "support/torchrun.hpp"
#include "support/two_hosts.hpp"

namespace multigpu_torchrun_test {

using namespace lockstep_test;

namespace {

// The command of a run in `folder`. Small batches make an epoch last long enough to be killed in.
std::vector<std::string> command(const TemporaryFolder& folder, const std::vector<std::string>& more,
                                 const std::vector<std::string>& launcher = {}) {
  const auto begin = joined({"env", "--chdir", folder.path().string()}, launcher);
  return joined(joined(begin, {test_program("multigpu_torchrun")}), more);
}
const std::vector<std::string> four_epochs_launched{"4", "1", "--batch_size", "2", "--momentum", "0.9"};
const auto four_epochs = joined(four_epochs_launched, {"--nproc", "2"});
const Variables one_thread{{"OMP_NUM_THREADS", "1"}};

// The snapshot of a run of four epochs that nothing disturbs.
const std::string& undisturbed_snapshot() {
  static const std::string snapshot = [] {
    const TemporaryFolder folder;
    const Ended whole = run_example(command(folder, four_epochs));
    INFO("undisturbed: " << whole.out << whole.error);
    REQUIRE(whole.code == 0);
    CHECK(count(whole.out, "Snapshot not found. Training model from scratch\n") == 1);
    return lockstep::read_file(folder / "snapshot.pt");
  }();
  return snapshot;
}

// The process of a rank, found by its environment.
pid_t process_of_rank(const std::string& marker, int rank) {
  for (const pid_t pid : processes_with(marker)) {
    const std::string variables = text_of_process(pid, "environ");
    if (variables.find(fmt::format("{}RANK={}{}", '\0', rank, '\0')) != std::string::npos) return pid;
  }
  return -1;
}

void kill_rank(const std::string& marker, int rank) {
  const pid_t process = process_of_rank(marker, rank);
  REQUIRE(process > 0);
  REQUIRE(kill(process, SIGKILL) == 0);
}

std::string saved_line(int epoch) {
  return fmt::format("Epoch {} | Training snapshot saved at snapshot.pt\n", epoch);
}

// How many epochs were saved: all of them, or those before the run was killed.
int saved_epochs(const std::string& out) {
  int saved = 0;
  while (out.find(saved_line(saved)) != std::string::npos) ++saved;
  REQUIRE(saved >= 1);
  REQUIRE(saved < 4);
  return saved;
}

// torchrun on host A or B of two.
std::vector<std::string> node(const std::string& agent, bool first, int ranks, int port) {
  return {agent,
          "--no-python",
          "--nnodes=2",
          fmt::format("--nproc-per-node={}", ranks),
          fmt::format("--local-addr=10.177.0.{}", first ? 1 : 2),
          "--rdzv-id=456",
          "--rdzv-backend=c10d",
          fmt::format("--rdzv-endpoint=10.177.0.1:{}", port),
          fmt::format("--rdzv-conf=is_host={}", first ? 1 : 0)};
}

std::string epoch_line(int rank, int epoch) {
  return fmt::format("[GPU{}] Epoch {} | Batchsize: 2 | Steps: 512\n", rank, epoch);
}

}  // namespace

TEST_CASE(
    "a run whose rank is killed resumes with the next epoch and ends with the bits of an undisturbed run") {
  const TemporaryFolder disturbed;
  Process killed = start(command(disturbed, four_epochs), one_thread);
  REQUIRE(killed.wait_for_output("[GPU0] Epoch 1 |", patience));
  kill_rank(killed.marker(), 1);
  REQUIRE(killed.wait(patience));
  CHECK(killed.exit_code() == 128 + SIGKILL);
  CHECK(processes_left(killed.marker()) == 0);
  // The snapshot is that of the last line of a save: nothing of the epoch that was killed is in it.
  INFO("killed: " << killed.out() << killed.error());
  const int saved = saved_epochs(killed.out());
  CHECK(disturbed.files() == 1);  // no part of a snapshot is left either

  const Ended resumed = run_example(command(disturbed, four_epochs));
  INFO("resumed: " << resumed.out << resumed.error);
  REQUIRE(resumed.code == 0);
  CHECK(count(resumed.out, "Loading snapshot\n") == 2);
  CHECK(count(resumed.out, fmt::format("Resuming training from snapshot at Epoch {}\n", saved)) == 2);
  // Each epoch is trained to its end exactly once over both runs, and the one that was killed from its start.
  for (int epoch = 0; epoch < 4; ++epoch) {
    CAPTURE(epoch);
    CHECK(count(killed.out() + resumed.out, saved_line(epoch)) == 1);
    for (const int rank : {0, 1})
      CHECK(count(resumed.out, epoch_line(rank, epoch)) == (epoch >= saved ? 1 : 0));
  }
  CHECK(lockstep::read_file(disturbed / "snapshot.pt").size() > 1000);
  CHECK(lockstep::read_file(disturbed / "snapshot.pt") == undisturbed_snapshot());

  // A finished run has nothing left to train.
  const Ended again = run_example(command(disturbed, four_epochs));
  CHECK(again.code == 0);
  CHECK(count(again.out, "Resuming training from snapshot at Epoch 4\n") == 2);
  CHECK(count(again.out, "| Batchsize") == 0);
}

TEST_CASE(
    "torchrun restarts a run whose rank is killed in a step, which ends with the bits of an undisturbed run",
    "[.release]") {
  const std::string agent = torchrun();
  if (agent.empty()) return;
  const TemporaryFolder folder;
  const std::vector<std::string> launcher{agent,
                                          "--no-python",
                                          "--nproc-per-node=2",
                                          "--rdzv-id=456",
                                          "--rdzv-backend=c10d",
                                          fmt::format("--rdzv-endpoint=localhost:{}", free_port()),
                                          "--max-restarts=3"};
  Process process = start(command(folder, four_epochs_launched, launcher), one_thread);
  REQUIRE(process.wait_for_output("[GPU0] Epoch 1 |", patience));
  kill_rank(process.marker(), 1);
  REQUIRE(process.wait(patience));
  INFO(process.out() << process.error());
  CHECK(process.exit_code() == 0);
  CHECK(processes_left(process.marker()) == 0);
  const int saved = saved_epochs(process.out().substr(0, process.out().find("Loading snapshot\n")));
  CHECK(count(process.out(), "Loading snapshot\n") == 2);
  CHECK(count(process.out(), fmt::format("Resuming training from snapshot at Epoch {}\n", saved)) == 2);
  for (int epoch = 0; epoch < 4; ++epoch) CHECK(count(process.out(), saved_line(epoch)) == 1);
  // Each attempt says what it found.
  CHECK(count(process.error(), "lockstep: 2 ranks on 1 host (") == 2);
  CHECK(count(process.error(), "started by torchrun (RANK, WORLD_SIZE), rendezvous at tcp://") == 2);
  CHECK(lockstep::read_file(folder / "snapshot.pt").size() > 1000);
  CHECK(lockstep::read_file(folder / "snapshot.pt") == undisturbed_snapshot());
}

// The order of the buckets decides the last bits of a sum over three and more ranks.
void check_resumes_at(const std::string& processes) {
  const auto train = [&](const TemporaryFolder& folder, const std::string& epochs) {
    const Ended ended =
        run_example(command(folder, {epochs, "1", "--momentum", "0.9", "--nproc", processes}));
    INFO(ended.out << ended.error);
    REQUIRE(ended.code == 0);
  };
  const TemporaryFolder resumed, undisturbed;
  for (const char* epochs : {"1", "2", "3", "27", "40"}) train(resumed, epochs);
  train(undisturbed, "40");
  CHECK(lockstep::read_file(resumed / "snapshot.pt") == lockstep::read_file(undisturbed / "snapshot.pt"));
}

TEST_CASE("three processes resume to the bits of an undisturbed run") {
  check_resumes_at("3");
}

TEST_CASE("four processes resume to the bits of an undisturbed run", "[.release]") {
  check_resumes_at("4");
}

TEST_CASE("a snapshot with a flipped bit is refused, and the tutorial's own snapshot is resumed",
          "[.release]") {
  const TemporaryFolder folder;
  const auto finish = [&](const std::vector<std::string>& more = {}) {
    return run_example(command(folder, joined({"2", "1", "--nproc", "2"}, more)));
  };
  REQUIRE(run_example(command(folder, {"1", "1", "--nproc", "2"})).code == 0);
  const std::string whole = lockstep::read_file(folder / "snapshot.pt");
  const auto saved = lockstep::torch_load(folder / "snapshot.pt").toGenericDict();
  CHECK(saved.at("EPOCHS_RUN").toInt() == 1);

  // A bit in the weight, whose value stays a number.
  const auto weight = saved.at("MODEL_STATE").toGenericDict().at("weight").toTensor();
  const auto at = whole.find(std::string(static_cast<const char*>(weight.const_data_ptr()), 80));
  REQUIRE(at != std::string::npos);
  std::string flipped = whole;
  flipped[at] = static_cast<char>(flipped[at] ^ 1);
  folder.write("snapshot.pt", flipped);
  const Ended damaged = finish();
  INFO("damaged: " << damaged.error);
  CHECK(damaged.code == 2);
  CHECK(damaged.error.starts_with("error: --snapshot_path: could not resume from 'snapshot.pt': "));
  CHECK(count(damaged.error, "\n") == 1);
  CHECK(count(damaged.out, "Epoch") == 0);
  CHECK(lockstep::read_file(folder / "snapshot.pt") == flipped);

  // torch.save({"MODEL_STATE": ..., "EPOCHS_RUN": 1}) of a DistributedDataParallel's state dict.
  c10::impl::GenericDict theirs(c10::StringType::get(), c10::AnyType::get());
  torch::nn::Linear model(20, 1);
  theirs.insert("MODEL_STATE", lockstep::dict_of(lockstep::state_dict(model, "module.")));
  const auto with = [&](const std::string& warning, const std::vector<std::string>& more) {
    lockstep::torch_save(c10::IValue(theirs), folder / "snapshot.pt");
    const Ended resumed = finish(more);
    INFO("resumed: " << resumed.out << resumed.error);
    CHECK(resumed.code == 0);
    CHECK(resumed.error == warning);
    CHECK(count(resumed.out, "Resuming training from snapshot at Epoch 1\n") == 2);
    CHECK(count(resumed.out, "| Batchsize") == 2);
  };
  lockstep::torch_save(c10::IValue(theirs), folder / "snapshot.pt");
  const Ended without_epoch = finish();
  CHECK(without_epoch.code == 2);
  CHECK(without_epoch.error ==
        "error: --snapshot_path: could not resume from 'snapshot.pt': it has no EPOCHS_RUN; remove it to "
        "train from scratch\n");
  theirs.insert("EPOCHS_RUN", std::int64_t{1});
  with("", {});
  with("warning: 'snapshot.pt' has no OPTIMIZER_STATE: the momentum starts from zero\n",
       {"--momentum", "0.9"});
}

TEST_CASE("4 and 2 processes on two hosts train together and number themselves through", "[.release]") {
  const TwoHosts hosts;
  if (!hosts.missing().empty()) {
    WARN("SKIPPED: " << hosts.missing());
    return;
  }
  const TemporaryFolder a, b;
  Together ranks;
  for (const bool first : {true, false}) {
    auto variables = by_hand(first ? 0 : 4, 6, 29603);
    variables["MASTER_ADDR"] = "10.177.0.1";
    variables["OMP_NUM_THREADS"] = "1";
    ranks.add(hosts.on(first ? "A" : "B", command(first ? a : b, {"2", "1", "--nproc", first ? "4" : "2"})),
              variables);
  }
  const auto codes = ranks.wait(patience);
  const std::string out = ranks[0].out() + ranks[1].out();
  INFO(out << ranks[0].error() << ranks[1].error());
  CHECK(codes == std::vector<int>{0, 0});
  for (int rank = 0; rank < 6; ++rank) {
    const auto& host = ranks[rank < 4 ? 0 : 1];
    for (const int epoch : {0, 1})  // 2,048 samples are 342 a rank: 10 batches of 32 and a rest
      CHECK(count(host.out(), fmt::format("[GPU{}] Epoch {} | Batchsize: 32 | Steps: 11\n", rank, epoch)) ==
            1);
  }
  CHECK(a.files() == 1);  // rank 0's host has the snapshot
  CHECK(b.files() == 0);

  // Rank 0 reads it for the other host as well: here under torchrun, started as in the tutorial.
  const std::string agent = torchrun();
  if (agent.empty()) return;
  Together resumed;
  for (const bool first : {true, false}) {
    const auto launcher = node(agent, first, first ? 4 : 2, 29604);
    resumed.add(hosts.on(first ? "A" : "B", command(first ? a : b, {"3", "1"}, launcher)),
                {{"OMP_NUM_THREADS", ""}});
  }
  const auto ended = resumed.wait(patience);
  INFO(resumed[0].out() << resumed[0].error() << resumed[1].out() << resumed[1].error());
  CHECK(ended == std::vector<int>{0, 0});
  CHECK(count(resumed[0].error(),
              "lockstep: 6 ranks on 2 hosts (nodeA: 4, nodeB: 2), started by torchrun (RANK, WORLD_SIZE), "
              "rendezvous at tcp://") == 1);
  CHECK(count(resumed[0].error(), "; threads per rank: 1, from OMP_NUM_THREADS\n") == 1);
  CHECK(count(resumed[1].out(), "Resuming training from snapshot at Epoch 2\n") == 2);
  for (int rank = 0; rank < 6; ++rank)
    CHECK(count(resumed[rank < 4 ? 0 : 1].out(),
                fmt::format("[GPU{}] Epoch 2 | Batchsize: 32 | Steps: 11\n", rank)) == 1);
}

TEST_CASE(
    "torchrun's agents on two hosts restart their ranks when one is killed, and the run ends with equal bits",
    "[.release]") {
  const std::string agent = torchrun();
  if (agent.empty()) return;
  const TwoHosts hosts;
  if (!hosts.missing().empty()) {
    WARN("SKIPPED: " << hosts.missing());
    return;
  }
  // Any host may have rank 0 after the restart: both see one folder.
  const TemporaryFolder folder, undisturbed;
  const std::vector<std::string> epochs{"4", "1", "--batch_size", "4", "--momentum", "0.9"};
  Together nodes;
  const int port = free_port();
  for (const bool first : {true, false}) {
    const auto launcher = joined(node(agent, first, first ? 2 : 1, port), {"--max-restarts=3"});
    nodes.add(hosts.on(first ? "A" : "B", command(folder, epochs, launcher)), one_thread);
  }
  // The rank of host B, whichever number it has.
  REQUIRE(nodes[1].wait_for_output("] Epoch 1 |", patience));
  const int rank = std::stoi(nodes[1].out().substr(nodes[1].out().find("[GPU") + 4));
  REQUIRE(nodes[rank == 0 ? 1 : 0].wait_for_output(saved_line(0), patience));
  kill_rank(nodes.marker, rank);
  const auto codes = nodes.wait(patience);
  const std::string out = nodes[0].out() + nodes[1].out(), error = nodes[0].error() + nodes[1].error();
  INFO(out << error);
  CHECK(codes == std::vector<int>{0, 0});
  CHECK(processes_left(nodes.marker) == 0);
  // Two attempts, each on both hosts.
  CHECK(count(error, "lockstep: 3 ranks on 2 hosts (node") == 2);
  CHECK(count(error, "), started by torchrun (RANK, WORLD_SIZE), rendezvous at tcp://") == 2);
  CHECK(count(out, "Snapshot not found. Training model from scratch\n") == 1);
  CHECK(count(nodes[0].out(), "Loading snapshot\n") == 2);
  CHECK(count(nodes[1].out(), "Loading snapshot\n") == 1);
  std::smatch resumed;
  REQUIRE(std::regex_search(out, resumed, std::regex("Resuming training from snapshot at Epoch ([1-3])\n")));
  CHECK(count(out, resumed.str()) == 3);
  for (int epoch = 0; epoch < 4; ++epoch) CHECK(count(out, saved_line(epoch)) == 1);

  const Ended whole = run_example(command(undisturbed, joined(epochs, {"--nproc", "3"})));
  INFO("undisturbed: " << whole.out << whole.error);
  CHECK(whole.code == 0);
  CHECK(lockstep::read_file(folder / "snapshot.pt").size() > 1000);
  CHECK(lockstep::read_file(folder / "snapshot.pt") == lockstep::read_file(undisturbed / "snapshot.pt"));
}

}  // namespace multigpu_torchrun_test
