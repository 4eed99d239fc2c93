// Trains a linear layer with DistributedDataParallel: the smallest whole program of several processes. Each
// rank prints a line an epoch.
//   ddp_gpus --max_epochs 5 --batch_size 32           one process per GPU; on CPUs: ddp_gpus --nproc 9
//   torchrun --no-python --nproc-per-node 2 ddp_gpus --max_epochs 5 --batch_size 32
// Python: ddp_gpus.py (mp.spawn) and ddp_gpus_torchrun.py, both of which lockstep::launch serves.
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/cli.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/lockstep.hpp"

namespace nn = torch::nn;

struct Options {
  int max_epochs = 5;
  std::int64_t batch_size = 32;
  std::string loss = "mse";
  std::string save;
};

// `size` random samples: 20 inputs and 1 target each.
class MyTrainDataset {
 public:
  explicit MyTrainDataset(std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
      auto xs = torch::rand({20});  // a statement each: C++ leaves the order of arguments open
      auto ys = torch::randn({1});
      data_.emplace_back(std::move(xs), std::move(ys));
    }
  }
  [[nodiscard]] std::size_t size() const { return data_.size(); }
  [[nodiscard]] lockstep::Example get(std::size_t index) const { return data_[index]; }

 private:
  std::vector<lockstep::Example> data_;
};

using Loader = lockstep::DataLoader<MyTrainDataset, lockstep::DistributedSampler>;

template <class Comm>
class Trainer {
 public:
  Trainer(nn::Linear model, Loader& train_dataloader, torch::optim::Optimizer& optimizer, Comm& comm,
          const Options& options)
      : model_(std::move(model)),
        ddp_(model_, comm),
        train_dataloader_(train_dataloader),
        optimizer_(optimizer),
        comm_(comm),
        options_(options) {}

  void train() {
    for (int epoch = 0; epoch < options_.max_epochs; ++epoch) run_epoch(static_cast<std::size_t>(epoch));
    ddp_.synchronize();  // on GPUs the check of the last backward is read late
  }

 private:
  void run_batch(const torch::Tensor& xs, const torch::Tensor& ys) {
    optimizer_.zero_grad();
    const auto output = ddp_(xs);
    // The tutorial's cross-entropy is over one class, whose probability is always 1: the loss and its
    // gradient are 0, and nothing is learned. Hence the mean squared error by default.
    ddp_.backward(options_.loss == "cross-entropy" ? nn::functional::cross_entropy(output, ys)
                                                   : torch::mse_loss(output, ys));
    optimizer_.step();
  }

  void run_epoch(std::size_t epoch) {
    std::size_t step = 0;
    train_dataloader_.set_epoch(epoch);  // another order in each epoch, the same on all ranks
    for (auto& batch : lockstep::StagedBatches{train_dataloader_, lockstep::comm_device(comm_)}) {
      if (step++ == 0)
        fmt::print("[GPU: {}] Epoch: {} | Batchsize: {} | Steps: {}\n", comm_.rank(), epoch,
                   batch.data.size(0), train_dataloader_.size());
      run_batch(batch.data, batch.target);
    }
  }

  nn::Linear model_;
  lockstep::DistributedDataParallel<nn::Linear, Comm> ddp_;
  Loader& train_dataloader_;
  torch::optim::Optimizer& optimizer_;
  Comm& comm_;
  const Options& options_;
};

template <class Comm>
void run(const lockstep::World& world, const Options& options, Comm comm) {
  torch::manual_seed(0);  // all ranks draw the same data: without a seed, as in the tutorial, each its own
  MyTrainDataset train_dataset(2048);
  Loader train_dataloader{train_dataset,
                          lockstep::DistributedSampler{train_dataset.size(), world},
                          {.batch_size = options.batch_size, .pin_memory = true}};
  nn::Linear model(20, 1);
  model->to(lockstep::comm_device(comm));
  torch::optim::SGD optimizer(model->parameters(), 1e-3);
  Trainer<Comm>(model, train_dataloader, optimizer, comm, options).train();
  if (!options.save.empty())
    world.rank_zero([&] { lockstep::torch_save(lockstep::state_dict(model), options.save); });
}

int main(int argc, char** argv) {
  Options options;
  lockstep::CommandLine app("Fits a line to random points with several processes.");
  app.add_option("--max_epochs,--max-epochs", options.max_epochs, "epochs to train")
      ->check(CLI::Range(1'000'000));
  app.add_option("--batch_size,--batch-size", options.batch_size, "batch size of each process")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--loss", options.loss, "cross-entropy is the tutorial's, which is always 0")
      ->check(CLI::IsMember({"mse", "cross-entropy"}));
  app.add_option("--save", options.save, "file to write the trained model to");
  if (const auto code = lockstep::parse(app, argc, argv)) return *code;
  const auto on_rank = [&](const lockstep::World& world) {
    if (!options.save.empty()) world.rank_zero([&] { lockstep::require_writable(options.save, "--save"); });
    lockstep::with_device(world, [&]<class Comm>(Comm comm) { run(world, options, std::move(comm)); });
  };
  // Each line names its rank already: no prefix.
  return lockstep::launch(argc, argv, on_rank, {.prefix = lockstep::Prefix::never});
}
