// Checkpoints that are written while training goes on.
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/files.hpp"
#include "lockstep/optim/averaging.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/train/checkpointer.hpp"
#include "support/ranks.hpp"
#include "train/common_folder.hpp"
#include "train/nets.hpp"

namespace checkpointer_ranks_test {

using lockstep::Checkpointer;
using lockstep::CheckpointError;
using namespace std::chrono_literals;

namespace {

lockstep::TrainerOptions options(std::int64_t epochs = 1) {
  return {.epochs = epochs, .batch_size = 2, .progress = false};
}
auto adam() {
  return lockstep::MakeOptimizer{[](std::vector<torch::Tensor> parameters) {
    return lockstep::Adam(std::move(parameters), {.lr = 0.01});
  }};
}
auto trainer_of(std::int64_t epochs) {
  torch::manual_seed(3);
  return lockstep::Trainer{test_world(), options(epochs), TinyNet(), adam()};
}
auto data() {
  return three_classes(12 * test_world().size());
}
// The names in the folder, on every rank.
std::set<std::string> names(CommonFolder& folder, const std::string& in) {
  std::ostringstream own;
  if (folder.comm.rank() == 0)
    for (const auto& entry : std::filesystem::directory_iterator(folder / in))
      own << entry.path().filename().string() << ' ';
  std::istringstream all(folder.comm.broadcast_bytes(own.str(), 0));
  return {std::istream_iterator<std::string>(all), {}};
}

// With two layers that share a weight, and so many numbers that writing takes longer than what follows.
struct LargeNetImpl : torch::nn::Module {
  LargeNetImpl() { last->register_parameter("weight", hidden->weight); }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::linear(hidden(x.repeat({1, 150})), hidden->weight).slice(1, 0, 3);
  }
  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(900, 900));
  torch::Tensor buffer = register_buffer("buffer", torch::ones(100'000));
  std::shared_ptr<torch::nn::Module> last =
      register_module("last", std::make_shared<torch::nn::Module>("last"));
};
TORCH_MODULE(LargeNet);

}  // namespace

TEST_CASE("what a Checkpointer writes is what save_checkpoint does, whatever the model becomes meanwhile") {
  CommonFolder folder(test_world());
  torch::manual_seed(5);
  lockstep::Trainer trainer{test_world(), options(), LargeNet(), adam()};
  lockstep::MovingAverage average(*trainer.model()), own(*trainer.model());
  Checkpointer checkpoints{trainer, folder / "run", {.keep = 3}, average, lockstep::PerRank{own}};
  const auto given = data();
  trainer.fit(given, cross_entropy_of, lockstep::OnStep{[&](const auto& step) {
                if (step.step != 2 && step.step != 4) return;  // the second copy uses the memory of the first
                trainer.save_checkpoint(folder / fmt::format("at {}", step.step + 1), average,
                                        lockstep::PerRank{own});
                checkpoints.save();
                const torch::NoGradGuard no_grad;
                for (auto& group : trainer.optimizer().param_groups())
                  for (auto& parameter : group.params()) parameter.add_(1);
                for (auto& buffer : trainer.model()->buffers()) buffer.add_(1);
                average.update();
                own.update();
              }});
  checkpoints.wait();
  for (const std::string at : {"3", "5"})
    CHECK((folder.comm.rank() > 0 || lockstep::read_file(folder / ("at " + at)) ==
                                         lockstep::read_file(folder / ("run/step-0000000" + at + ".ckpt"))));
}

TEST_CASE("a run goes on from the newest checkpoint that is whole, to the same bits") {
  CommonFolder folder(test_world());
  const auto given = data();
  auto straight = trainer_of(3);
  straight.fit(given, cross_entropy_of);
  {
    auto trainer = trainer_of(2);
    Checkpointer checkpoints{trainer, folder / "run", {.every_steps = 4, .keep = 3}};
    CHECK(!checkpoints.load_latest());
    trainer.fit(given, cross_entropy_of, checkpoints);
    CHECK(names(folder, "run") ==
          std::set<std::string>{"step-00000004.ckpt", "step-00000008.ckpt", "step-00000012.ckpt"});
  }
  if (folder.comm.rank() == 0) std::filesystem::resize_file(folder / "run/step-00000012.ckpt", 5000);
  auto trainer = trainer_of(3);
  Checkpointer checkpoints{trainer, folder / "run", {.every_epochs = 2}};
  REQUIRE(checkpoints.load_latest());
  CHECK(trainer.step() == 8);
  CHECK(names(folder, "run").contains("step-00000012.ckpt.damaged"));
  trainer.fit(given, cross_entropy_of, checkpoints);
  CHECK(names(folder, "run") ==
        std::set<std::string>{"step-00000012.ckpt", "step-00000012.ckpt.damaged", "step-00000018.ckpt"});
  CHECK(same_bits(trainer.model(), straight.model()));
}

TEST_CASE("a Checkpointer saves after steps, epochs and times") {
  CommonFolder folder(test_world());
  const auto given = data();
  const auto saved = [&](const std::string& name, lockstep::CheckpointerOptions when) {
    when.keep = 100;
    auto trainer = trainer_of(3);
    Checkpointer checkpoints{trainer, folder / name, when};
    trainer.fit(given, cross_entropy_of, checkpoints);
    return names(folder, name).size();
  };
  CHECK(saved("default", {}) == 3);
  CHECK(saved("steps", {.every_steps = 7}) == 3);
  CHECK(saved("epochs", {.every_epochs = 2}) == 2);
  CHECK(saved("seldom", {.interval = 1h}) == 1);
  CHECK(saved("always", {.interval = 1ms}) > 3);
  auto trainer = trainer_of(6);  // whose first step is not number 0
  Checkpointer checkpoints{trainer, folder / "always", {.interval = 1ms, .keep = 100}};
  REQUIRE(checkpoints.load_latest());
  trainer.fit(given, cross_entropy_of, checkpoints);
  CHECK(names(folder, "always").size() > 8);
}

TEST_CASE("a checkpoint that cannot be written is an error on every rank") {
  CommonFolder folder(test_world());
  auto trainer = trainer_of(1);
  if (folder.comm.rank() == 0) {
    lockstep::write_file_atomically(folder / "file", "x");
    std::filesystem::create_directories(folder / "run/step-00000000.ckpt");
  }
  folder.comm.barrier();
  Checkpointer elsewhere{trainer, folder / "file/run"};
  CHECK_THROWS_AS(elsewhere.save(), CheckpointError);
  Checkpointer other{
      trainer, folder / "run"};  // has a folder in the place of the file, as a checkpoint of a run before
  CHECK_THROWS_AS(other.save(), CheckpointError);
  Checkpointer blocked{trainer, folder / "new"};
  blocked.save();
  blocked.wait();
  if (folder.comm.rank() == 0) {
    std::filesystem::remove(folder / "new/step-00000000.ckpt");
    std::filesystem::create_directories(folder / "new/step-00000000.ckpt");
  }
  blocked.save();
  CHECK_THROWS_AS(blocked.wait(), CheckpointError);
  blocked.wait();  // told once
  CHECK_THROWS_AS((Checkpointer{trainer, "x", {.every_steps = 0}}), lockstep::UsageError);
  CHECK_THROWS_AS((Checkpointer{trainer, "x", {.interval = -1s}}), lockstep::UsageError);
  CHECK_THROWS_AS((Checkpointer{trainer, "x", {.keep = 0}}), lockstep::UsageError);
}

TEST_CASE("a folder of which no checkpoint is whole is an error, and what a killed run has left is removed") {
  CommonFolder folder(test_world());
  auto trainer = trainer_of(1);
  const auto write = [&](const std::string& name) {
    if (folder.comm.rank() == 0) {
      std::filesystem::create_directories((folder / name).parent_path());
      lockstep::write_file_atomically(folder / name, "PK\3\4 and no more");
    }
    folder.comm.barrier();
  };
  write("run/step-00000001.ckpt");
  write("run/step-00000002.ckpt");
  Checkpointer damaged{trainer, folder / "run"};
  for (int again = 0; again < 2; ++again) CHECK_THROWS_AS(damaged.load_latest(), CheckpointError);
  CHECK_THROWS_AS(damaged.save(), CheckpointError);
  CHECK(names(folder, "run") == std::set<std::string>{"step-00000001.ckpt", "step-00000002.ckpt"});
  write("new/step-00000003.ckpt.lockstep.tmp");
  Checkpointer checkpoints{trainer, folder / "new"};
  checkpoints.save();
  CHECK(checkpoints.load_latest());  // waits for it
  CHECK(names(folder, "new") == std::set<std::string>{"step-00000000.ckpt"});
  write("new/step-00000003.ckpt.lockstep.tmp");
  Checkpointer resumed{trainer, folder / "new"};
  CHECK(resumed.load_latest());
  CHECK(names(folder, "new") == std::set<std::string>{"step-00000000.ckpt"});
}

TEST_CASE("a Checkpointer does not replace checkpoints of later steps") {
  CommonFolder folder(test_world());
  const auto given = data();
  auto trainer = trainer_of(2);
  Checkpointer checkpoints{trainer, folder / "run"};
  trainer.fit(given, cross_entropy_of, checkpoints);
  trainer.load_checkpoint(folder / "run/step-00000006.ckpt");
  CHECK_THROWS_AS(checkpoints.save(), CheckpointError);
  CHECK(names(folder, "run") == std::set<std::string>{"step-00000006.ckpt", "step-00000012.ckpt"});
}

TEST_CASE("a Checkpointer waits at the end of a stream's last step alone") {
  CommonFolder folder(test_world());
  struct Batches {
    void set_epoch(std::size_t) { at = 0; }
    std::optional<lockstep::Example> next() {
      if (at == 4) return std::nullopt;
      const std::int64_t first = at++;
      return lockstep::Example{data.data().slice(0, first, first + 2),
                               data.target().slice(0, first, first + 2)};
    }
    std::int64_t at = 0;
    lockstep::TensorDataset data = three_classes(8);
  } batches;
  torch::manual_seed(3);
  lockstep::Trainer trainer{
      test_world(), {.steps = 10, .batch_size = 2, .progress = false}, TinyNet(), adam()};
  Checkpointer checkpoints{trainer, folder / "run", {.every_steps = 100, .keep = 9}};
  trainer.fit(batches, cross_entropy_of, checkpoints);
  CHECK(names(folder, "run") == std::set<std::string>{"step-00000010.ckpt"});
}

}  // namespace checkpointer_ranks_test
