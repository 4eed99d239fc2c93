// Trains a ConvNet on MNIST in one process: the program that ddp_main.cpp makes data-parallel. Compare the
// two files: what is new there is what a program needs for several processes.
//   origin_main --gpu 0 -e 3 -b 32 --data-dir folder/of/mnist
// On a GPU if there is one, else on the CPU.
// Python: origin_main.py of https://github.com/rickyang1114/DDP-practice
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <exception>
#include <iostream>
#include <optional>
#include <string>

#include "lockstep/cli.hpp"
#include "lockstep/datasets/mnist.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/lockstep.hpp"

namespace nn = torch::nn;

const auto program_start = std::chrono::steady_clock::now();

struct Options {
  std::string save = "origin_checkpoint.pt";
  int epochs = 3;
  std::int64_t batch_size = 32;
  std::size_t samples = 20'000;
  double lr = 1e-4;
  std::optional<int> gpu;
  lockstep::MnistSource data;
};

struct ConvNetImpl : nn::Module {
  ConvNetImpl() {
    const auto layer = [](int in, int out) {
      return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(in, out, 5).padding(2)), nn::BatchNorm2d(out),
                            nn::ReLU(), nn::MaxPool2d(2));
    };
    layer1 = register_module("layer1", layer(1, 16));
    layer2 = register_module("layer2", layer(16, 32));
    fc = register_module("fc", nn::Linear(7 * 7 * 32, 10));
  }
  torch::Tensor forward(const torch::Tensor& x) { return fc(layer2->forward(layer1->forward(x)).flatten(1)); }

  nn::Sequential layer1, layer2;
  nn::Linear fc{nullptr};
};
TORCH_MODULE(ConvNet);

template <class Loader>
void train(ConvNet& model, Loader& train_dloader, torch::optim::Optimizer& optimizer, torch::Device device) {
  model->train();
  for (auto& batch : lockstep::StagedBatches{train_dloader, device}) {
    const auto &images = batch.data, &labels = batch.target;
    const auto outputs = model(images);
    const auto loss = nn::functional::cross_entropy(outputs, labels);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
  }
}

template <class Loader>
void test(const lockstep::World& world, ConvNet& model, Loader& test_dloader, torch::Device device) {
  const lockstep::EvaluationMode evaluating(*model);  // model.eval() and torch.no_grad()
  auto size = torch::zeros({}, device), correct = torch::zeros({}, device);
  for (auto& batch : lockstep::StagedBatches{test_dloader, device}) {
    const auto &images = batch.data, &labels = batch.target;
    const auto outputs = model(images);
    size += images.size(0);
    correct += (outputs.argmax(1) == labels).sum();
  }
  world.log.info("Accuracy is {:.2f}%", 100 * correct.item<double>() / size.item<double>());
}

// The GPU that --gpu names, or the first one; the CPU where there is none.
torch::Device choose_device(const lockstep::World& world, const Options& options) {
  if (!torch::cuda::is_available()) {
    if (options.gpu) world.log.info("there is no CUDA device: --gpu {} trains on the CPU", *options.gpu);
    return torch::kCPU;
  }
  const int gpu = options.gpu.value_or(0), count = static_cast<int>(torch::cuda::device_count());
  if (gpu >= count)
    throw lockstep::UsageError(fmt::format("--gpu {}: this host has {} GPUs, numbered from 0", gpu, count));
  return {torch::kCUDA, static_cast<torch::DeviceIndex>(gpu)};
}

void run(const Options& options) {
  const lockstep::World world;  // of this process alone
  const torch::Device device = choose_device(world, options);
  lockstep::require_writable(options.save, "--save");
  const lockstep::Mnist mnist = lockstep::load_mnist(world, options.data);
  if (options.samples < mnist.train.size())
    world.log.info("training on the first {} of {} digits", options.samples, mnist.train.size());
  torch::manual_seed(3407);  // the tutorial seeds nothing
  ConvNet model;
  model->to(device);
  lockstep::SGD optimizer(model->parameters(), {.lr = options.lr});
  lockstep::DataLoader train_dloader{mnist.train,
                                     lockstep::RandomSampler{std::min(options.samples, mnist.train.size())},
                                     {.batch_size = options.batch_size, .pin_memory = true}};
  lockstep::DataLoader test_dloader{mnist.test,
                                    lockstep::EvaluationSampler{mnist.test.size(), world},
                                    {.batch_size = options.batch_size, .num_workers = 2, .pin_memory = true}};

  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    world.log.info("begin training of epoch {}/{}", epoch + 1, options.epochs);
    train(model, train_dloader, optimizer, device);
  }
  world.log.info("begin testing");
  test(world, model, test_dloader, device);
  lockstep::torch_save(lockstep::state_dict(model), options.save);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - program_start;
  world.log.info("\ntime elapsed: {:.2f} seconds", elapsed.count());
}

int main(int argc, char** argv) {
  Options options;
  lockstep::CommandLine app("Trains a small convolutional network on handwritten digits in one process.");
  app.add_option("--gpu", options.gpu, "number of the GPU to train on")->check(CLI::Range(1000));
  app.add_option("-e,--epochs", options.epochs, "epochs to train")->check(CLI::Range(1'000'000));
  app.add_option("-b,--batch_size,--batch-size", options.batch_size, "batch size")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--samples", options.samples, "training digits to use at most; MNIST has 60000")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--lr", options.lr, "learning rate of SGD")->check(CLI::Range(1000.0));
  app.add_option("--save", options.save, "file to write the model to");
  app.add_option("--data-dir,--data_dir", options.data.folder,
                 "folder with MNIST's four files; without it, digits are drawn");
  app.callback([&] {
    if (std::isnan(options.lr)) throw CLI::ValidationError("--lr", "nan is not a number");
  });
  if (const auto code = lockstep::parse(app, argc, argv, lockstep::no_launch_flags)) return *code;
  try {
    run(options);
  } catch (const lockstep::UsageError& error) {
    std::cerr << fmt::format("error: {}\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::cerr << fmt::format("error: {}\n", error.what());
    return 1;
  }
}
