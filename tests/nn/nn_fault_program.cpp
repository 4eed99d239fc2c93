// What tests/nn/faults_test.cpp starts: three training steps on every rank, and a fault of rank 1.
//
// usage: nn_fault_program --nproc N MODE
#include <torch/torch.h>

#include <chrono>
#include <string>
#include <thread>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/nn/sync_batch_norm.hpp"
#include "lockstep/world/launch.hpp"
#include "support/meeting.hpp"

int main(int argc, char** argv) {
  const std::string mode = argv[argc - 1];
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    using namespace torch::nn;
    const bool odd = world.rank() == 1;
    Sequential model(Linear(8, 8), BatchNorm1d(8), ReLU(), Linear(8, 8), BatchNorm1d(8));
    lockstep::GlooOptions options;
    if (mode.starts_with("late")) {
      options.timeout = std::chrono::seconds(3);
      lockstep_test::meet(world);
    }
    lockstep::CpuComm comm{world, options};
    lockstep::convert_sync_batchnorm(model, comm);
    lockstep::DistributedDataParallel ddp{*model, comm};
    for (int step = 0; step < 3; ++step) {
      const bool fault = odd && step == 2;
      auto x = torch::randn({4, 8});
      ddp.before_forward();
      if (fault && mode == "late") std::this_thread::sleep_for(std::chrono::minutes(2));
      if (fault && mode == "shape") x = torch::randn({4, 7, 8});
      const auto y = fault && mode == "shape" ? model[1]->as<lockstep::SyncBatchNorm1d>()->forward(x)
                                              : model->forward(x);
      if (fault && mode == "late in backward") std::this_thread::sleep_for(std::chrono::minutes(2));
      ddp.backward(y.square().sum());
    }
    comm.shutdown();
  });
}
