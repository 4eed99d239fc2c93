// The toy regression of the tutorials, in one process and with DistributedDataParallel.
#include <algorithm>
#include <string>
#include <vector>

#include "examples/output.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "support/temporary_folder.hpp"
#include "support/torchrun.hpp"

namespace multigpu_test {

using namespace lockstep_test;

namespace {

// The lines of a run in `folder`, sorted: those of several ranks come in any order.
std::vector<std::string> lines_of_run(const TemporaryFolder& folder, const std::string& program,
                                      const std::vector<std::string>& arguments) {
  return sorted_lines(
      out_of(joined({"env", "--chdir", folder.path().string(), test_program(program)}, arguments)));
}

// Removes the line with the loss, and returns the loss.
double take_loss(std::vector<std::string>& lines) {
  const std::string start = "Mean loss of the last epoch: ";
  const auto line =
      std::find_if(lines.begin(), lines.end(), [&](const auto& text) { return text.starts_with(start); });
  REQUIRE(line != lines.end());
  const double loss = std::stod(line->substr(start.size()));
  lines.erase(line);
  return loss;
}

}  // namespace

TEST_CASE("the toy regression prints the tutorial's lines on every rank and saves on rank 0") {
  const TemporaryFolder folder;
  auto lines = lines_of_run(folder, "multigpu", {"3", "2", "--nproc", "2"});
  take_loss(lines);
  CHECK(lines == std::vector<std::string>{
                     "Epoch 0 | Training checkpoint saved at checkpoint.pt",
                     "Epoch 2 | Training checkpoint saved at checkpoint.pt",
                     "[GPU0] Epoch 0 | Batchsize: 32 | Steps: 32",
                     "[GPU0] Epoch 1 | Batchsize: 32 | Steps: 32",
                     "[GPU0] Epoch 2 | Batchsize: 32 | Steps: 32",
                     "[GPU1] Epoch 0 | Batchsize: 32 | Steps: 32",
                     "[GPU1] Epoch 1 | Batchsize: 32 | Steps: 32",
                     "[GPU1] Epoch 2 | Batchsize: 32 | Steps: 32",
                 });
  CHECK(std::filesystem::exists(folder / "checkpoint.pt"));
  CHECK(folder.files() == 1);
}

TEST_CASE("an epoch of 2,048 samples has 64, 32 and 8 steps of 32 on 1, 2 and 9 ranks", "[.release]") {
  const TemporaryFolder folder;
  const auto steps = [&](int ranks) {
    std::vector<std::string> expected{"Epoch 0 | Training checkpoint saved at checkpoint.pt"};
    for (int rank = 0; rank < ranks; ++rank)
      expected.push_back(fmt::format("[GPU{}] Epoch 0 | Batchsize: 32 | Steps: {}", rank,
                                     ranks == 1   ? 64
                                     : ranks == 2 ? 32
                                                  : 8));
    auto lines =
        lines_of_run(folder, "multigpu", {"1", "1", "--batch_size", "32", "--nproc", std::to_string(ranks)});
    take_loss(lines);
    CHECK(lines == expected);
  };
  for (const int ranks : {1, 2, 9}) steps(ranks);
  auto lines = lines_of_run(folder, "single_gpu", {"1", "1"});
  take_loss(lines);
  CHECK(lines == std::vector<std::string>{"Epoch 0 | Training checkpoint saved at checkpoint.pt",
                                          "[GPU0] Epoch 0 | Batchsize: 32 | Steps: 64"});
}

TEST_CASE("ddp_gpus prints its tutorial's line on every rank, 32 and 8 steps on 2 and 9 ranks",
          "[.release]") {
  const TemporaryFolder folder;
  const auto expected = [](int ranks, int epochs, int batch, int steps) {
    std::vector<std::string> lines;
    for (int rank = 0; rank < ranks; ++rank)
      for (int epoch = 0; epoch < epochs; ++epoch)
        lines.push_back(
            fmt::format("[GPU: {}] Epoch: {} | Batchsize: {} | Steps: {}", rank, epoch, batch, steps));
    return lines;
  };
  CHECK(lines_of_run(folder, "ddp_gpus", {"--max_epochs", "2", "--nproc", "2"}) == expected(2, 2, 32, 32));
  CHECK(lines_of_run(folder, "ddp_gpus", {"--max_epochs", "1", "--batch_size", "32", "--nproc", "9"}) ==
        expected(9, 1, 32, 8));
  // A rank has 228 samples: the last of 8 batches of 32 has 4.
  CHECK(lines_of_run(folder, "ddp_gpus", {"--max_epochs", "1", "--batch_size", "2048", "--nproc", "9"}) ==
        expected(9, 1, 228, 1));
  CHECK(228 - 7 * 32 == 4);
  CHECK(folder.files() == 0);

  const std::string launcher = torchrun();
  if (launcher.empty()) return;
  const Ended ended = run_example({launcher, "--standalone", "--no-python", "--nproc-per-node=2",
                                   test_program("ddp_gpus"), "--max_epochs", "1", "--batch_size", "32"});
  INFO("out: " << ended.out << "\nerror: " << ended.error);
  CHECK(ended.code == 0);
  for (const std::string& line : expected(2, 1, 32, 32)) CHECK(count(ended.out, line + "\n") == 1);
  CHECK(count(ended.out, "\n") == 2);
}

TEST_CASE("the mean squared error falls, and the tutorial's cross-entropy is 0 from the start") {
  const TemporaryFolder folder;
  const auto loss = [&](const std::string& program, std::vector<std::string> arguments) {
    if (program == "multigpu") arguments.insert(arguments.end(), {"--nproc", "2"});
    auto lines = lines_of_run(folder, program, arguments);
    return take_loss(lines);
  };
  for (const std::string program : {"single_gpu", "multigpu"}) {
    CAPTURE(program);
    CHECK(loss(program, {"10", "10"}) < loss(program, {"1", "10"}) / 2);
    CHECK(loss(program, {"1", "10", "--loss", "cross-entropy"}) == 0);
  }

  // multigpu_torchrun prints no loss: its snapshot shows whether the model has learned.
  const auto weight = [&](const std::string& epochs, const std::string& loss) {
    const std::string snapshot = loss + epochs + ".pt";
    lines_of_run(folder, "multigpu_torchrun",
                 {epochs, "1", "--loss", loss, "--snapshot_path", snapshot, "--nproc", "2"});
    const auto file = lockstep::torch_load(folder / snapshot).toGenericDict();
    return file.at("MODEL_STATE").toGenericDict().at("weight").toTensor();
  };
  CHECK(torch::equal(weight("2", "cross-entropy"), weight("1", "cross-entropy")));
  CHECK(!torch::equal(weight("2", "mse"), weight("1", "cross-entropy")));

  // ddp_gpus prints neither loss nor model.
  CHECK(lines_of_run(folder, "ddp_gpus", {"--max_epochs", "1", "--nproc", "1", "--loss", "cross-entropy"}) ==
        std::vector<std::string>{"[GPU: 0] Epoch: 0 | Batchsize: 32 | Steps: 64"});
}

TEST_CASE("the toy regression refuses wrong arguments on one line") {
  const auto refused = [](const std::string& program, const std::vector<std::string>& arguments,
                          const std::string& why) {
    check_refused(joined({test_program(program)}, arguments), why);
  };
  for (const std::string program : {"single_gpu", "multigpu"}) {
    refused(program, {}, "total_epochs");
    refused(program, {"5", "0"}, "save_every");
    refused(program, {"5", "1", "--batch_size", "0"}, "--batch_size");
    refused(program, {"5", "1", "--loss", "l1"}, "--loss");
  }
  refused("ddp_gpus", {"--loss", "l1"}, "--loss");
  refused("multigpu_torchrun", {"5", "1", "--loss", "l1"}, "--loss");
  refused("multigpu_torchrun", {"1", "0"}, "save_every");
}

}  // namespace multigpu_test
