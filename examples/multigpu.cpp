// Trains a linear layer with DistributedDataParallel, in several processes. One program for the tutorial's
// multigpu.py (mp.spawn), ddp_gpus_torchrun.py and several hosts, since lockstep::launch serves all of them:
//   multigpu 50 10 --nproc 4
//   torchrun --no-python --nproc-per-node 4 multigpu 50 10         srun -n 4 multigpu 50 10
//   WORLD_SIZE=6 RANK=4 MASTER_ADDR=nodeA MASTER_PORT=29500 multigpu 50 10 --nproc 2   (second host)
// Trains 50 epochs and saves checkpoint.pt in every 10th. On GPUs where there are some, else on CPUs.
// Python: multigpu.py of https://docs.pytorch.org/tutorials/beginner/ddp_series_intro.html
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/cli.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/lockstep.hpp"

namespace nn = torch::nn;

struct Options {
  int total_epochs = 0, save_every = 1;
  std::int64_t batch_size = 32;
  std::string loss = "mse";
};

// `size` random samples: 20 inputs and 1 target each. Seeded before, so that all ranks have the same data:
// in the tutorial each rank draws its own, and the sampler partitions a different dataset on every rank.
class MyTrainDataset {
 public:
  explicit MyTrainDataset(std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
      auto inputs = torch::rand({20});  // a statement each: C++ leaves the order of arguments open
      auto target = torch::rand({1});
      data_.emplace_back(std::move(inputs), std::move(target));
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
  Trainer(const lockstep::World& world, nn::Linear model, Loader& train_data,
          torch::optim::Optimizer& optimizer, Comm& comm, const Options& options)
      : world_(world),
        model_(std::move(model)),
        ddp_(model_, comm),
        train_data_(train_data),
        optimizer_(optimizer),
        comm_(comm),
        options_(options) {}

  void train() {
    for (int epoch = 0; epoch < options_.total_epochs; ++epoch) {
      run_epoch(epoch);
      if (epoch % options_.save_every != 0) continue;
      ddp_.synchronize();  // on GPUs the check of the last backward is read late
      world_.rank_zero([&] { save_checkpoint(epoch); });
    }
    world_.log.info("Mean loss of the last epoch: {:.5f}", mean_loss_);
  }

 private:
  torch::Tensor run_batch(const torch::Tensor& source, const torch::Tensor& targets) {
    optimizer_.zero_grad();
    const auto output = ddp_(source);
    // The tutorial's cross-entropy is over one class, whose probability is always 1: the loss and its
    // gradient are 0, and nothing is learned. Hence the mean squared error by default.
    const auto loss = options_.loss == "cross-entropy" ? nn::functional::cross_entropy(output, targets)
                                                       : torch::mse_loss(output, targets);
    ddp_.backward(loss);
    optimizer_.step();
    return loss.detach();
  }

  void run_epoch(int epoch) {
    const std::size_t steps = train_data_.size();
    const auto device = lockstep::comm_device(comm_);
    auto loss = torch::zeros({}, device);
    std::size_t step = 0;
    train_data_.set_epoch(
        static_cast<std::size_t>(epoch));  // another order in each epoch, the same on all ranks
    for (auto& batch : lockstep::StagedBatches{train_data_, device}) {
      // The global rank: local ranks repeat on every host.
      if (step++ == 0)
        fmt::print("[GPU{}] Epoch {} | Batchsize: {} | Steps: {}\n", world_.rank(), epoch, batch.data.size(0),
                   steps);
      loss += run_batch(batch.data, batch.target);
    }
    comm_.all_reduce(loss, lockstep::ReduceOp::avg).synchronize();
    mean_loss_ = loss.template item<double>() / static_cast<double>(steps);
  }

  void save_checkpoint(int epoch) const {
    lockstep::torch_save(lockstep::state_dict(model_), "checkpoint.pt");
    fmt::print("Epoch {} | Training checkpoint saved at checkpoint.pt\n", epoch);
  }

  const lockstep::World& world_;
  nn::Linear model_;
  lockstep::DistributedDataParallel<nn::Linear, Comm> ddp_;
  Loader& train_data_;
  torch::optim::Optimizer& optimizer_;
  Comm& comm_;
  const Options& options_;
  double mean_loss_ = 0;
};

template <class Comm>
void train(const lockstep::World& world, const Options& options, Comm comm) {
  torch::manual_seed(0);
  MyTrainDataset train_set(2048);
  nn::Linear model(20, 1);
  model->to(lockstep::comm_device(comm));
  torch::optim::SGD optimizer(model->parameters(), 1e-3);
  Loader train_data{train_set,
                    lockstep::DistributedSampler{train_set.size(), world},
                    {.batch_size = options.batch_size, .pin_memory = true}};
  Trainer<Comm>(world, model, train_data, optimizer, comm, options).train();
}

int main(int argc, char** argv) {
  Options options;
  lockstep::CommandLine app("Fits a line to random points with several processes.");
  app.add_option("total_epochs", options.total_epochs, "epochs to train")
      ->required()
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("save_every", options.save_every, "epochs between checkpoints")
      ->required()
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--batch_size,--batch-size", options.batch_size, "batch size of each process")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--loss", options.loss, "cross-entropy is the tutorial's, which is always 0")
      ->check(CLI::IsMember({"mse", "cross-entropy"}));
  if (const auto code = lockstep::parse(app, argc, argv)) return *code;
  const auto run = [&](const lockstep::World& world) {
    world.rank_zero([&] { lockstep::require_writable("checkpoint.pt"); });
    lockstep::with_device(world, [&]<class Comm>(Comm comm) { train(world, options, std::move(comm)); });
  };
  // Each line names its rank already: no prefix.
  return lockstep::launch(argc, argv, run, {.prefix = lockstep::Prefix::never});
}
