// A real training program of several ranks, which trains until it is stopped: with the argument "deaf" it
// does not listen to Ctrl-C.
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/world/launch.hpp"

namespace {

void train(const lockstep::World& world) {
  lockstep::CpuComm comm{world};
  torch::nn::Sequential model(torch::nn::Linear(20, 64), torch::nn::ReLU(), torch::nn::Linear(64, 1));
  lockstep::DistributedDataParallel ddp{model, comm};
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(1e-3).momentum(0.9));
  for (int step = 1;; ++step) {
    const auto inputs = torch::rand({32, 20});
    optimizer.zero_grad();
    ddp.backward(torch::mse_loss(ddp(inputs), inputs.sum(1, true)));
    optimizer.step();
    if (step % 20 == 0) world.log.all().info("step {}", step);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "deaf" && std::getenv("LOCAL_RANK"))
    std::signal(SIGINT, [](int) {
      const char text[] = "not now\n";
      if (write(1, text, sizeof text - 1) < 0) _exit(1);
    });
  return lockstep::launch(argc, argv, train);
}
