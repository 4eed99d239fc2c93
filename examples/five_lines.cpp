// A LibTorch training loop on lockstep's dataset and loader, and the five lines (marked 1 to 5) that make it
// data-parallel. Without them it trains in one process; the comment behind each is what it was, or what it
// adds. libtorch_mnist_ddp.cpp starts from a program on LibTorch's own datasets and loaders.
//   five_lines --nproc 4        starts four processes itself; torchrun, or RANK and WORLD_SIZE, do as well
#include <torch/torch.h>

#include <CLI/CLI.hpp>

#include "lockstep/cli.hpp"
#include "lockstep/lockstep.hpp"

// 2,048 points of a noisy line in 20 dimensions, the same on every rank.
lockstep::TensorDataset points() {
  torch::manual_seed(1);
  const auto inputs = torch::rand({2048, 20});
  const auto slope = torch::linspace(-1, 1, 20).unsqueeze(1);
  return {inputs, inputs.matmul(slope) + 0.01 * torch::randn({2048, 1})};
}

void train(const lockstep::World& world, int epochs) {
  auto data = points();
  auto model = torch::nn::Linear(20, 1);
  auto comm = lockstep::CpuComm{world};                             // 1: how the ranks talk
  auto ddp = lockstep::DistributedDataParallel{model, comm};        // 2: one model on all ranks
  auto sampler = lockstep::DistributedSampler{data.size(), world};  // 3: was RandomSampler{data.size()}
  auto loader = lockstep::DataLoader{data, sampler, {.batch_size = 32}};
  auto optimizer = torch::optim::SGD(model->parameters(), 0.1);

  for (int epoch = 0; epoch < epochs; ++epoch) {
    double sum = 0;
    for (auto& batch : loader) {
      optimizer.zero_grad();
      auto loss = torch::mse_loss(ddp(batch.data), batch.target);
      ddp.backward(loss);  // 4: was loss.backward()
      optimizer.step();
      sum += loss.item<double>();
    }
    // The mean over this rank's batches; Trainer and evaluate() give it over all ranks.
    world.log.info("Epoch {} | Batchsize: 32 | Steps: {} | Loss {:.5f}", epoch, loader.size(),
                   sum / static_cast<double>(loader.size()));
  }
}

int main(int argc, char** argv) {
  lockstep::CommandLine app("Fits a line with several processes: a LibTorch loop and five lines.");
  int epochs = 10;
  app.add_option("--epochs", epochs, "epochs to train")->check(CLI::Range(1'000'000));
  if (const auto code = lockstep::parse(app, argc, argv)) return *code;
  return lockstep::launch(argc, argv, [&](const auto& world) { train(world, epochs); });  // 5: was train()
}
