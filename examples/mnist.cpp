// Trains a small network on MNIST's digits with several processes. Alone it starts them itself:
//   mnist --nproc 4 --epochs 3 --data-dir folder/of/mnist
// On GPUs, where it is built with CUDA and there are some, in fp16: mnist --gpu 0,1; on CPUs in fp32.
// It runs unchanged under torchrun, or by hand on several hosts (RANK is then the host's first rank):
//   WORLD_SIZE=7 RANK=3 MASTER_ADDR=nodeA MASTER_PORT=29500 mnist --nproc 4
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/cli.hpp"
#include "lockstep/datasets/mnist.hpp"
#include "lockstep/lockstep.hpp"

namespace nn = torch::nn;

const auto program_start = std::chrono::steady_clock::now();

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

struct Options {
  lockstep::TrainerOptions training{.epochs = 3, .lr = 1e-4, .seed = 3407};
  lockstep::MnistSource data;
  std::size_t samples = 20'000;
  bool sync_batchnorm = true;
  std::string gpu, save;
};

// The first `count` digits.
lockstep::DigitDataset first_digits(const lockstep::DigitDataset& all, std::size_t count) {
  const auto& [images, labels] = all.digits();
  const auto end = static_cast<std::int64_t>(count);
  return lockstep::DigitDataset({images.slice(0, 0, end), labels.slice(0, 0, end)});
}

template <class Comm>
void train(const lockstep::World& world, const Options& options, const lockstep::Mnist& mnist, Comm comm) {
  constexpr bool on_gpu = lockstep::DeviceCommunicator<Comm>;
  using Precision = std::conditional_t<on_gpu, lockstep::Fp16, lockstep::Fp32>;

  torch::manual_seed(options.training.seed);
  ConvNet model;
  if (options.sync_batchnorm) lockstep::convert_sync_batchnorm(model, comm);
  lockstep::Trainer trainer{world, options.training, model, std::move(comm), Precision()};
  const auto loss = [](ConvNet& net, const auto& batch) {
    return nn::functional::cross_entropy(net(batch.data), batch.target);
  };
  trainer.fit(first_digits(mnist.train, options.samples), loss,
              lockstep::OnEpochStart{[&](const lockstep::EpochPlan& plan) {
                world.log.info("begin training of epoch {}/{}", plan.epoch + 1, plan.epochs);
              }});
  world.log.info("begin testing");
  world.log.info("Accuracy is {:.2f}%", 100 * trainer.evaluate(mnist.test, lockstep::Accuracy{}));
  if (!options.save.empty()) trainer.save(options.save);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - program_start;
  world.log.info("\ntime elapsed: {:.2f} seconds", elapsed.count());
}

int main(int argc, char** argv) {
  Options options;
  lockstep::CommandLine app(
      "Trains a small convolutional network on handwritten digits with several processes.");
  app.add_option("-e,--epochs", *options.training.epochs, "epochs to train")->check(CLI::Range(1'000'000));
  app.add_option("-b,--batch-size,--batch_size", options.training.batch_size, "batch size of each process")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--samples", options.samples, "training digits to use at most; MNIST has 60000")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--lr", *options.training.lr, "learning rate of SGD")->check(CLI::Range(1000.0));
  app.add_option("--sync-batchnorm", options.sync_batchnorm, "batch norm over the batches of all processes")
      ->check(CLI::IsMember({"on", "off"}))
      ->default_str("on");
  app.add_option("--seed", options.training.seed, "seed of the model and of the order of digits")
      ->check(CLI::Range(4'294'967'295));
  app.add_option("--workers", options.training.num_workers, "data-loading threads of each process")
      ->check(CLI::Range(1000));
  app.add_option("--data-dir,--data_dir", options.data.folder,
                 "folder with MNIST's four files, plain or .gz");
  auto* download = app.add_flag("--download", options.data.download,
                                "fetch MNIST into the data folder, or into the cache without one");
  app.add_option("--mirror", options.data.mirrors, "URLs to fetch from, also LOCKSTEP_MNIST_MIRROR")
      ->needs(download);
  app.add_option("--gpu", options.gpu, "devices as in '0,1': one process each");
  app.add_option("--save", options.save, "file to write the trained model to");
  app.callback([&] {
    if (std::isnan(*options.training.lr)) throw CLI::ValidationError("--lr", "nan is not a number");
  });
  if (const auto code = lockstep::parse(app, argc, argv)) return *code;
  const auto run = [&](const lockstep::World& world) {
    if (!options.save.empty()) world.rank_zero([&] { lockstep::require_writable(options.save, "--save"); });
    const lockstep::Mnist mnist = lockstep::load_mnist(world, options.data);
    if (options.samples < mnist.train.size())
      world.log.info("training on the first {} of {} digits", options.samples, mnist.train.size());
    lockstep::with_device(world,
                          [&]<class Comm>(Comm comm) { train(world, options, mnist, std::move(comm)); });
  };
  return lockstep::launch(argc, argv, run, {.gpus = options.gpu});
}
