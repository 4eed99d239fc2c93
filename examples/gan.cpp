// Two models and two optimizers in one program: a small GAN that learns to draw digits, with several
// processes.
//   gan --nproc 2 --steps 2000
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdint>

#include "lockstep/cli.hpp"
#include "lockstep/datasets/mnist.hpp"
#include "lockstep/lockstep.hpp"

namespace nn = torch::nn;

constexpr std::int64_t noise_size = 32, pixels = 28 * 28;

nn::Sequential make_generator() {
  return nn::Sequential(nn::Linear(noise_size, 256),
                        nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)), nn::Linear(256, pixels),
                        nn::Sigmoid());
}

nn::Sequential make_discriminator() {
  return nn::Sequential(nn::Linear(pixels, 128), nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)),
                        nn::Linear(128, 1));
}

// The other model only passes gradients on: its parameters take none, so that nothing of it is reduced.
void set_trained(nn::Sequential& model, bool trained) {
  for (auto& parameter : model->parameters()) parameter.requires_grad_(trained);
}

// The loss of the discriminator's logits against one label for the whole batch: real (1) or fake (0).
torch::Tensor adversarial_loss(const torch::Tensor& logits, bool real) {
  return nn::functional::binary_cross_entropy_with_logits(
      logits, real ? torch::ones_like(logits) : torch::zeros_like(logits));
}

void train(const lockstep::World& world, std::int64_t steps, std::int64_t digits) {
  lockstep::DigitDataset data(lockstep::draw_digits(digits, 1));
  torch::manual_seed(0);  // equal models at the start; DistributedDataParallel would see to it anyway
  auto generator = make_generator();
  auto discriminator = make_discriminator();

  // One communicator serves both: every rank makes its calls in the same order.
  lockstep::CpuComm comm{world};
  lockstep::DistributedDataParallel ddp_generator{generator, comm};
  lockstep::DistributedDataParallel ddp_discriminator{discriminator, comm};
  const auto options = torch::optim::AdamOptions(2e-4).betas({0.5, 0.999});
  torch::optim::Adam generator_optimizer(ddp_generator.parameters(), options);
  torch::optim::Adam discriminator_optimizer(ddp_discriminator.parameters(), options);

  lockstep::DataLoader loader{data, lockstep::DistributedSampler{data.size(), world}, {.batch_size = 32}};
  torch::manual_seed(1 + static_cast<std::uint64_t>(world.rank()));  // each rank its own noise
  for (std::int64_t step = 0; step < steps;) {
    for (auto& batch : loader) {
      const auto real = batch.data.flatten(1);
      const auto fake = ddp_generator(torch::randn({real.size(0), noise_size}));

      discriminator_optimizer.zero_grad();
      const auto discriminator_loss = adversarial_loss(ddp_discriminator(real), true) +
                                      adversarial_loss(ddp_discriminator(fake.detach()), false);
      ddp_discriminator.backward(discriminator_loss);
      discriminator_optimizer.step();

      generator_optimizer.zero_grad();
      set_trained(discriminator, false);
      const auto generator_loss = adversarial_loss(discriminator->forward(fake), true);
      ddp_generator.backward(generator_loss);
      set_trained(discriminator, true);
      generator_optimizer.step();

      if (step % 100 == 0)
        world.log.info("step {}: discriminator {:.4f}, generator {:.4f}", step,
                       discriminator_loss.item<double>(), generator_loss.item<double>());
      if (++step == steps) break;
    }
  }
  // Both models are the same on all ranks, to the last bit.
  lockstep::check_same_parameters(comm, ddp_generator.named_parameters(), /*tolerance=*/0);
  lockstep::check_same_parameters(comm, ddp_discriminator.named_parameters(), /*tolerance=*/0);
  world.log.info("done: {} steps of two models on {} ranks", steps, world.size());
}

int main(int argc, char** argv) {
  lockstep::CommandLine app("Trains a small GAN on drawn digits with several processes.");
  std::int64_t steps = 2000, digits = 20000;
  app.add_option("--steps", steps, "optimizer steps of either model")->check(CLI::Range(1, 1'000'000));
  app.add_option("--digits", digits, "digits to draw and learn from")->check(CLI::Range(1, 1'000'000));
  if (const auto code = lockstep::parse(app, argc, argv)) return *code;
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) { train(world, steps, digits); });
}
