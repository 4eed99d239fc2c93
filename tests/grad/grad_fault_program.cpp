// What tests/grad/faults_test.cpp starts: three training steps on every rank, and a fault of rank 1.
//
// usage: grad_fault_program --nproc N MODE
#include <signal.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/world/launch.hpp"
#include "support/meeting.hpp"
#include "support/mib.hpp"

int main(int argc, char** argv) {
  const std::string mode = argv[argc - 1];
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    using torch::nn::Linear;
    const bool odd = world.rank() == 1;
    torch::nn::Sequential model({{"first", Linear(8, 8)},
                                 {"second", Linear(8, 8)},
                                 {"third", Linear(8, 8)},
                                 {"fourth", Linear(8, 8)}});
    lockstep::GlooOptions options;
    if (mode == "late") {
      options.timeout = std::chrono::seconds(3);
      lockstep_test::meet(world);
    }
    lockstep::CpuComm comm{world, options};
    lockstep::DistributedDataParallel ddp{model, comm, {.bucket_cap_mb = lockstep_test::mib({64})}};
    for (int step = 0; step < 3; ++step) {
      const bool fault = step == 2;
      const auto x = torch::ones({2, 8}, torch::requires_grad()) * 1;
      // Called after the gradients of all layers, when all buckets but the last are in flight.
      if (fault && odd && mode.starts_with("throws"))
        x.register_hook([](const at::Tensor&) -> at::Tensor {
          std::puts("the fault");
          std::fflush(stdout);
          throw std::runtime_error("thrown inside backward");
        });
      if (fault && odd && mode == "late") std::this_thread::sleep_for(std::chrono::minutes(2));
      if (fault && !odd && mode == "throws alone") std::this_thread::sleep_for(std::chrono::minutes(2));
      if (fault && odd && mode == "dies") {
        std::puts("the fault");
        std::fflush(stdout);
        raise(SIGKILL);
      }
      ddp.backward(model->forward(x).sum());
    }
    comm.shutdown();
  });
}
