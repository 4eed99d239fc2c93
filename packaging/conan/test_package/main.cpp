// Computes gradients on each rank from data of its own. DistributedDataParallel averages them: all ranks hold the same.
#include <ATen/ops/mse_loss.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/ddp.hpp"

int main(int argc, char** argv) {
  return lockstep::launch(argc, argv, [](const lockstep::World& world) {
    torch::manual_seed(1 + world.rank());
    auto model = torch::nn::Linear(4, 1);
    auto comm = lockstep::GlooComm{world};
    auto ddp = lockstep::DistributedDataParallel{model, comm};
    const auto inputs = torch::rand({8, 4});
    ddp.backward(at::mse_loss(ddp(inputs), inputs.sum(1, true)));

    const auto mine = model->weight.grad().abs().sum();
    auto largest = mine.clone();
    comm.all_reduce(largest, lockstep::ReduceOp::max).synchronize();
    const bool equal = mine.item<float>() > 0 && mine.item<float>() == largest.item<float>();
    world.log.info("{} ranks, their gradients {}", world.size(), equal ? "are equal" : "differ");
    return equal ? 0 : 1;
  });
}
