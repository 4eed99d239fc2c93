// An ordinary LibTorch program: a DCGAN learns to draw MNIST's digits in one process.
// libtorch_dcgan_ddp.cpp is the same program for several processes; docs/from-libtorch.md shows the change.
//   libtorch_dcgan --data-dir folder/of/mnist --samples 60000 --epochs 30 --save-dir folder
// C++: dcgan.cpp of https://github.com/pytorch/examples/tree/main/cpp/dcgan
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>

#include "lockstep/cli.hpp"
#include "lockstep/datasets/mnist.hpp"
#include "lockstep/files.hpp"

namespace nn = torch::nn;
namespace data = torch::data;

struct Options {
  std::string data_dir, save_dir = ".";
  std::size_t samples = 1920, batch_size = 64, checkpoint_every = 15;
  int epochs = 2;
  bool restore = false;
};

constexpr std::int64_t noise_size = 100;

struct DCGANGeneratorImpl : nn::Module {
  DCGANGeneratorImpl() {
    const auto up = [](std::int64_t in, std::int64_t out, std::int64_t kernel) {
      return nn::ConvTranspose2dOptions(in, out, kernel).bias(false);
    };
    layers->push_back(nn::ConvTranspose2d(up(noise_size, 256, 4)));
    layers->push_back(nn::BatchNorm2d(256));
    layers->push_back(nn::ReLU());
    layers->push_back(nn::ConvTranspose2d(up(256, 128, 3).stride(2).padding(1)));
    layers->push_back(nn::BatchNorm2d(128));
    layers->push_back(nn::ReLU());
    layers->push_back(nn::ConvTranspose2d(up(128, 64, 4).stride(2).padding(1)));
    layers->push_back(nn::BatchNorm2d(64));
    layers->push_back(nn::ReLU());
    layers->push_back(nn::ConvTranspose2d(up(64, 1, 4).stride(2).padding(1)));
    layers->push_back(nn::Tanh());
    register_module("layers", layers);
  }
  torch::Tensor forward(const torch::Tensor& noise) { return layers->forward(noise); }

  nn::Sequential layers;
};
TORCH_MODULE(DCGANGenerator);

struct DCGANDiscriminatorImpl : nn::Module {
  DCGANDiscriminatorImpl() {
    const auto down = [](std::int64_t in, std::int64_t out, std::int64_t kernel) {
      return nn::Conv2dOptions(in, out, kernel).bias(false);
    };
    const auto leaky = nn::LeakyReLUOptions().negative_slope(0.2);
    layers->push_back(nn::Conv2d(down(1, 64, 4).stride(2).padding(1)));
    layers->push_back(nn::LeakyReLU(leaky));
    layers->push_back(nn::Conv2d(down(64, 128, 4).stride(2).padding(1)));
    layers->push_back(nn::BatchNorm2d(128));
    layers->push_back(nn::LeakyReLU(leaky));
    layers->push_back(nn::Conv2d(down(128, 256, 4).stride(2).padding(1)));
    layers->push_back(nn::BatchNorm2d(256));
    layers->push_back(nn::LeakyReLU(leaky));
    layers->push_back(nn::Conv2d(down(256, 1, 3)));
    layers->push_back(nn::Sigmoid());
    register_module("layers", layers);
  }
  torch::Tensor forward(const torch::Tensor& images) { return layers->forward(images).flatten(); }

  nn::Sequential layers;
};
TORCH_MODULE(DCGANDiscriminator);

auto digits(const Options& options) try {
  lockstep::require_unpacked_mnist(options.data_dir, "--data-dir");
  return data::datasets::MNIST(options.data_dir)
      .map(data::transforms::Normalize<>(0.5, 0.5))
      .map(data::transforms::Stack<>());
} catch (const c10::Error& error) {
  throw lockstep::UsageError(std::string("--data-dir: ") + error.what_without_backtrace());
}

// Writes the file whole or not at all: a torch::save to a full disk ends the process.
template <class Value>
void save(const Value& value, const std::string& path) {
  std::ostringstream bytes;
  torch::save(value, bytes);
  lockstep::write_file_atomically(path, bytes.str());
}

void run(const Options& options) {
  const auto file = [&](const std::string& name) { return options.save_dir + "/" + name; };
  lockstep::require_writable(file("generator-checkpoint.pt"), "--save-dir");
  torch::manual_seed(1);
  DCGANGenerator generator;
  DCGANDiscriminator discriminator;
  const auto adam = torch::optim::AdamOptions(2e-4).betas({0.5, 0.999});
  torch::optim::Adam generator_optimizer(generator->parameters(), adam);
  torch::optim::Adam discriminator_optimizer(discriminator->parameters(), adam);
  if (options.restore) try {
      torch::load(generator, file("generator-checkpoint.pt"));
      torch::load(generator_optimizer, file("generator-optimizer-checkpoint.pt"));
      torch::load(discriminator, file("discriminator-checkpoint.pt"));
      torch::load(discriminator_optimizer, file("discriminator-optimizer-checkpoint.pt"));
    } catch (const c10::Error& error) {
      throw lockstep::UsageError(std::string("--restore: ") + error.what_without_backtrace());
    }
  auto sampler = data::samplers::RandomSampler(static_cast<std::int64_t>(options.samples));
  auto loader = data::make_data_loader(digits(options), sampler, options.batch_size);
  const std::size_t steps = (options.samples + options.batch_size - 1) / options.batch_size;

  std::size_t done = 0;
  for (int epoch = 1; epoch <= options.epochs; ++epoch) {
    std::size_t step = 0;
    for (auto& batch : *loader) {
      const auto count = batch.data.size(0);

      // The discriminator learns to tell MNIST's digits from those of the generator.
      discriminator_optimizer.zero_grad();
      auto real_output = discriminator(batch.data);
      auto real_loss = torch::binary_cross_entropy(real_output, torch::empty(count).uniform_(0.8, 1.0));
      real_loss.backward();
      auto fake_images = generator(torch::randn({count, noise_size, 1, 1}));
      auto fake_output = discriminator(fake_images.detach());
      auto fake_loss = torch::binary_cross_entropy(fake_output, torch::zeros(count));
      fake_loss.backward();
      discriminator_optimizer.step();

      // The generator learns to draw digits that the discriminator takes for MNIST's.
      generator_optimizer.zero_grad();
      auto generator_loss = torch::binary_cross_entropy(discriminator(fake_images), torch::ones(count));
      generator_loss.backward();
      generator_optimizer.step();

      ++step, ++done;
      std::printf("[%2d/%2d][%3zu/%3zu] D_loss: %.4f | G_loss: %.4f\n", epoch, options.epochs, step, steps,
                  (real_loss + fake_loss).item<float>(), generator_loss.item<float>());
      if (done % options.checkpoint_every == 0) {
        save(generator, file("generator-checkpoint.pt"));
        save(generator_optimizer, file("generator-optimizer-checkpoint.pt"));
        save(discriminator, file("discriminator-checkpoint.pt"));
        save(discriminator_optimizer, file("discriminator-optimizer-checkpoint.pt"));
        const torch::NoGradGuard no_grad;
        auto samples = (generator(torch::randn({10, noise_size, 1, 1})) + 1) / 2;
        const auto number = std::to_string(done / options.checkpoint_every);
        save(samples, file("dcgan-sample-" + number + ".pt"));
        std::printf("-> checkpoint %s\n", number.c_str());
      }
    }
  }
}

int main(int argc, char** argv) {
  Options options;
  lockstep::CommandLine app("Trains a DCGAN, which learns to draw MNIST's digits.");
  app.add_option("--data-dir", options.data_dir,
                 "folder with MNIST's four files, unpacked; without it, digits are drawn")
      ->check(CLI::ExistingDirectory);
  app.add_option("--samples", options.samples, "training digits to use")->check(CLI::Range(1, 60'000));
  app.add_option("--batch-size", options.batch_size, "batch size")->check(CLI::Range(1, 60'000));
  app.add_option("--epochs", options.epochs, "epochs to train")->check(CLI::Range(1'000'000));
  app.add_option("--save-dir", options.save_dir, "folder of the checkpoints and of the samples")
      ->check(CLI::ExistingDirectory);
  app.add_option("--checkpoint-every", options.checkpoint_every, "steps between checkpoints")
      ->check(CLI::Range(1, 1'000'000));
  app.add_flag("--restore", options.restore, "continue from the last checkpoint in the folder");
  if (const auto code = lockstep::parse(app, argc, argv, lockstep::no_launch_flags)) return *code;
  try {
    if (options.data_dir.empty()) options.data_dir = lockstep::drawn_digits_folder().string();
    run(options);
  } catch (const lockstep::CheckpointError& error) {  // a file could not be written
    std::cerr << std::string("error: ") + error.what() + "\n";
    return 1;
  } catch (const lockstep::Error& error) {
    std::cerr << std::string("error: ") + error.what() + "\n";
    return 2;
  } catch (const c10::Error& error) {
    std::cerr << std::string("error: ") + error.what_without_backtrace() + "\n";
    return 1;
  }
}
