// An ordinary LibTorch program: a convolutional network learns MNIST's digits in one process.
// libtorch_mnist_ddp.cpp is the same program for several processes; docs/from-libtorch.md shows the change.
//   libtorch_mnist --data-dir folder/of/mnist --samples 60000 --epochs 10
// C++: mnist.cpp of https://github.com/pytorch/examples/tree/main/cpp/mnist
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstddef>
#include <cstdio>
#include <iostream>
#include <string>
#include <utility>

#include "lockstep/cli.hpp"
#include "lockstep/datasets/mnist.hpp"

namespace nn = torch::nn;
namespace data = torch::data;
using torch::data::datasets::MNIST;

struct Options {
  std::string data_dir;
  std::size_t samples = 20'000, batch_size = 64;
  int epochs = 3;
};

struct NetImpl : nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(torch::max_pool2d(conv1(x), 2));
    x = torch::relu(torch::max_pool2d(dropout2d(conv2(x)), 2));
    x = dropout(torch::relu(fc1(x.flatten(1))));
    return torch::log_softmax(fc2(x), 1);
  }

  nn::Conv2d conv1 = register_module("conv1", nn::Conv2d(1, 10, 5));
  nn::Conv2d conv2 = register_module("conv2", nn::Conv2d(10, 20, 5));
  nn::Dropout2d dropout2d = register_module("dropout2d", nn::Dropout2d(0.5));
  nn::Linear fc1 = register_module("fc1", nn::Linear(320, 50));
  nn::Dropout dropout = register_module("dropout", nn::Dropout(0.5));
  nn::Linear fc2 = register_module("fc2", nn::Linear(50, 10));
};
TORCH_MODULE(Net);

auto digits(const Options& options, MNIST::Mode part) try {
  lockstep::require_unpacked_mnist(options.data_dir, "--data-dir");
  return MNIST(options.data_dir, part)
      .map(data::transforms::Normalize<>(0.1307, 0.3081))
      .map(data::transforms::Stack<>());
} catch (const c10::Error& error) {
  throw lockstep::UsageError(std::string("--data-dir: ") + error.what_without_backtrace());
}

void run(const Options& options) {
  torch::manual_seed(1);
  Net model;
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.5));
  auto test_set = digits(options, MNIST::Mode::kTest);
  const std::size_t tests = *test_set.size();
  auto train_sampler = data::samplers::SequentialSampler(options.samples);
  auto test_sampler = data::samplers::SequentialSampler(tests);
  auto train_loader =
      data::make_data_loader(digits(options, MNIST::Mode::kTrain), train_sampler, options.batch_size);
  auto test_loader = data::make_data_loader(std::move(test_set), test_sampler, options.batch_size);

  for (int epoch = 1; epoch <= options.epochs; ++epoch) {
    model->train();
    std::size_t step = 0, seen = 0;
    for (auto& batch : *train_loader) {
      optimizer.zero_grad();
      auto loss = torch::nll_loss(model(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      if (step++ % 10 == 0)
        std::printf("Train Epoch: %d [%5zu/%5zu] Loss: %.4f\n", epoch, seen, options.samples,
                    loss.item<float>());
      seen += options.batch_size;
    }

    const torch::NoGradGuard no_grad;
    model->eval();
    auto totals = torch::zeros({2});  // the loss and the number of digits recognized
    for (auto& batch : *test_loader) {
      auto output = model(batch.data);
      totals[0] += torch::nll_loss(output, batch.target, {}, torch::Reduction::Sum);
      totals[1] += (output.argmax(1) == batch.target).sum();
    }
    totals /= static_cast<double>(tests);
    std::printf("Test set: Average loss: %.4f | Accuracy: %.3f\n", totals[0].item<float>(),
                totals[1].item<float>());
  }
}

int main(int argc, char** argv) {
  Options options;
  lockstep::CommandLine app("Trains a small convolutional network on MNIST's digits.");
  app.add_option("--data-dir", options.data_dir,
                 "folder with MNIST's four files, unpacked; without it, digits are drawn")
      ->check(CLI::ExistingDirectory);
  app.add_option("--samples", options.samples, "training digits to use")->check(CLI::Range(1, 60'000));
  app.add_option("--batch-size", options.batch_size, "batch size")->check(CLI::Range(1, 60'000));
  app.add_option("--epochs", options.epochs, "epochs to train")->check(CLI::Range(1'000'000));
  if (const auto code = lockstep::parse(app, argc, argv, lockstep::no_launch_flags)) return *code;
  try {
    if (options.data_dir.empty()) options.data_dir = lockstep::drawn_digits_folder().string();
    run(options);
  } catch (const lockstep::Error& error) {
    std::cerr << std::string("error: ") + error.what() + "\n";
    return 2;
  } catch (const c10::Error& error) {
    std::cerr << std::string("error: ") + error.what_without_backtrace() + "\n";
    return 1;
  }
}
