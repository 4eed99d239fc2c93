// Trains a linear layer in one process. The first program of PyTorch's DDP tutorial series, and the starting
// point of multigpu.cpp: compare the two files to see what DistributedDataParallel needs.
//   single_gpu 50 10 --batch_size 32
// Trains 50 epochs and saves checkpoint.pt in every 10th. Python: single_gpu.py of
// https://docs.pytorch.org/tutorials/beginner/ddp_series_intro.html
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
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

// `size` random samples: 20 inputs and 1 target each. The tutorial does not seed them.
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

using Loader = lockstep::DataLoader<MyTrainDataset, lockstep::RandomSampler>;

class Trainer {
 public:
  Trainer(nn::Linear model, Loader& train_data, torch::optim::Optimizer& optimizer, torch::Device device,
          const Options& options)
      : model_(std::move(model)),
        train_data_(train_data),
        optimizer_(optimizer),
        device_(device),
        options_(options) {}

  void train() {
    for (int epoch = 0; epoch < options_.total_epochs; ++epoch) {
      run_epoch(epoch);
      if (epoch % options_.save_every == 0) save_checkpoint(epoch);
    }
    fmt::print("Mean loss of the last epoch: {:.5f}\n", mean_loss_);
  }

 private:
  torch::Tensor run_batch(const torch::Tensor& source, const torch::Tensor& targets) {
    optimizer_.zero_grad();
    const auto output = model_(source);
    // The tutorial's cross-entropy is over one class, whose probability is always 1: the loss and its
    // gradient are 0, and nothing is learned. Hence the mean squared error by default.
    const auto loss = options_.loss == "cross-entropy" ? nn::functional::cross_entropy(output, targets)
                                                       : torch::mse_loss(output, targets);
    loss.backward();
    optimizer_.step();
    return loss.detach();
  }

  void run_epoch(int epoch) {
    const std::size_t steps = train_data_.size();
    auto loss = torch::zeros({}, device_);
    std::size_t step = 0;
    for (auto& batch : lockstep::StagedBatches{train_data_, device_}) {
      if (step++ == 0)
        fmt::print("[GPU0] Epoch {} | Batchsize: {} | Steps: {}\n", epoch, batch.data.size(0), steps);
      loss += run_batch(batch.data, batch.target);
    }
    mean_loss_ = loss.item<double>() / static_cast<double>(steps);
  }

  void save_checkpoint(int epoch) const {
    lockstep::torch_save(lockstep::state_dict(model_), "checkpoint.pt");
    fmt::print("Epoch {} | Training checkpoint saved at checkpoint.pt\n", epoch);
  }

  nn::Linear model_;
  Loader& train_data_;
  torch::optim::Optimizer& optimizer_;
  torch::Device device_;
  const Options& options_;
  double mean_loss_ = 0;
};

void train(const Options& options) {
  lockstep::require_writable("checkpoint.pt");
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  MyTrainDataset train_set(2048);
  nn::Linear model(20, 1);
  model->to(device);
  torch::optim::SGD optimizer(model->parameters(), 1e-3);
  Loader train_data{train_set,
                    lockstep::RandomSampler{train_set.size()},
                    {.batch_size = options.batch_size, .pin_memory = true}};
  Trainer(model, train_data, optimizer, device, options).train();
}

int main(int argc, char** argv) {
  Options options;
  lockstep::CommandLine app("Fits a line to random points in one process.");
  app.add_option("total_epochs", options.total_epochs, "epochs to train")
      ->required()
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("save_every", options.save_every, "epochs between checkpoints")
      ->required()
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--batch_size,--batch-size", options.batch_size, "batch size")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--loss", options.loss, "cross-entropy is the tutorial's, which is always 0")
      ->check(CLI::IsMember({"mse", "cross-entropy"}));
  if (const auto code = lockstep::parse(app, argc, argv, lockstep::no_launch_flags)) return *code;
  try {
    train(options);
  } catch (const lockstep::UsageError& error) {
    std::cerr << fmt::format("error: {}\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::cerr << fmt::format("error: {}\n", error.what());
    return 1;
  }
}
