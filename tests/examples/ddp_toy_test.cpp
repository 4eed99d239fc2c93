// ddp_toy prints the lines of the tutorial's demos, one or all of them.
#include <algorithm>

#include "examples/output.hpp"
#include "support/by_hand.hpp"
#include "support/folder_watch.hpp"
#include "support/temporary_folder.hpp"

namespace ddp_toy_test {

using namespace lockstep_test;

namespace {

/// The line of each rank, in order.
std::vector<std::string> of_ranks(const std::string& line, int ranks) {
  std::vector<std::string> lines;
  for (int rank = 0; rank < ranks; ++rank) lines.push_back(line + " on rank " + std::to_string(rank) + ".");
  return lines;
}

/// The lines of `text` that name `rank`, in order.
std::vector<std::string> of_rank(const std::string& text, int rank) {
  auto lines = lines_of(text);
  std::erase_if(lines,
                [&](const std::string& line) { return !line.ends_with(fmt::format(" on rank {}.", rank)); });
  return lines;
}

// On the CPU, also where there are GPUs.
Ended run_demo(const std::vector<std::string>& arguments, Variables variables = {}) {
  variables.insert({"CUDA_VISIBLE_DEVICES", "-1"});
  return run_example(joined({test_program("ddp_toy")}, arguments), std::move(variables));
}

const std::string basic = "Running basic DDP example", checkpoint = "Running DDP checkpoint example",
                  model_parallel = "Running DDP with model parallel example";

/// The lines of a rank of all demos, in order.
std::vector<std::string> all_demos(int rank) {
  std::vector<std::string> lines;
  for (const auto& demo : {basic, checkpoint, model_parallel})
    lines.push_back(fmt::format("{} on rank {}.", demo, rank));
  return lines;
}

}  // namespace

TEST_CASE("ddp_toy runs the tutorial's demos in turn and removes the checkpoint") {
  const TemporaryFolder folder;
  FolderWatch watch(folder.path());
  // Without --nproc, one process for each two devices.
  const auto all = run_demo({"--cpu-devices", "5"}, {{"TMPDIR", folder.path().string()}});
  CHECK(all.code == 0);
  for (int rank : {0, 1}) CHECK(of_rank(all.out, rank) == all_demos(rank));
  CHECK(count(all.out, "\n") == 6);

  const auto made = watch.made();
  CHECK(std::any_of(made.begin(), made.end(),
                    [](const auto& name) { return name.starts_with("model.checkpoint"); }));
  CHECK(folder.files() == 0);
}

TEST_CASE("ddp_toy keeps the checkpoint's file until a rank that is late has loaded it") {
  const TemporaryFolder folder;
  const auto file = (folder / "a.checkpoint").string();
  Together ranks;
  const int port = free_port();
  for (int rank = 0; rank < 2; ++rank) {
    auto variables = by_hand(rank, 2, port);
    variables.insert({{"LOCAL_RANK", std::to_string(rank)},
                      {"LOCAL_WORLD_SIZE", "2"},
                      {"OMP_NUM_THREADS", "1"},
                      {"CUDA_VISIBLE_DEVICES", "-1"}});
    if (rank == 1)
      variables.insert({{"LD_PRELOAD", test_program("late_open.so")}, {"LOCKSTEP_TEST_LATE_OPEN", file}});
    ranks.add({test_program("ddp_toy"), "checkpoint", "--checkpoint", file}, variables);
  }
  const auto codes = ranks.wait(Milliseconds(60000));
  INFO(ranks[0].out() << ranks[0].error() << ranks[1].out() << ranks[1].error());
  CHECK(codes == std::vector<int>{0, 0});
  CHECK(count(ranks[1].error(), "opens late\n") == 1);
  CHECK(folder.files() == 0);
}

TEST_CASE("ddp_toy runs one demo under a launcher", "[.release]") {
  const TemporaryFolder folder;
  const auto file = (folder / "a.checkpoint").string();
  const auto saved = run_demo({"checkpoint", "--nproc", "2", "--checkpoint", file});
  CHECK(saved.code == 0);
  CHECK(sorted_lines(saved.out) == of_ranks(checkpoint, 2));
  CHECK(folder.files() == 0);

  const auto split = run_demo({"model-parallel", "--cpu-devices", "4"});
  CHECK(split.code == 0);
  CHECK(sorted_lines(split.out) == of_ranks(model_parallel, 2));

  // In a batch script of Slurm, which is no rank.
  const auto batch = run_demo({"basic", "--nproc", "2"},
                              {{"SLURM_JOB_ID", "7"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "3"}});
  CHECK(batch.code == 0);
  CHECK(sorted_lines(batch.out) == of_ranks(basic, 2));
}

TEST_CASE("ddp_toy refuses on one line what it cannot run") {
  const auto refused = [](const std::vector<std::string>& arguments, const std::string& error,
                          Variables variables = {}) {
    variables.insert({"CUDA_VISIBLE_DEVICES", "-1"});
    check_refused(joined({test_program("ddp_toy")}, arguments), error, variables);
  };
  const std::string missing =
      "error: Requires at least 2 GPUs to run, but got 0; --cpu-devices 2 takes CPUs as devices\n";
  refused({}, missing);
  refused({"model-parallel"}, missing);
  refused({"model-parallel", "--cpu-devices", "5", "--nproc", "3"},
          "Requires at least 6 devices to run, but got 5");
  refused({"basics"}, "demo");
  refused({"basic", "--checkpoint", ""}, "--checkpoint: the value is empty");
  refused({"basic", "--nproc", "5"},
          "--nproc 5 contradicts mpirun of Open MPI, which has started 2 of 2 ranks on this host",
          {{"OMPI_COMM_WORLD_RANK", "0"},
           {"OMPI_COMM_WORLD_SIZE", "2"},
           {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
           {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
}

}  // namespace ddp_toy_test
