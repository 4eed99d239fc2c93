// What tests/grad/faults_test.cpp starts: three training steps on every rank, and a fault of rank 1.
//
// usage: grad_fault_program --nproc N MODE
#include <signal.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/world/launch.hpp"
#include "support/meeting.hpp"
#include "support/mib.hpp"

namespace {

/// Passes its input on, and throws in backward.
struct Thrower : torch::autograd::Function<Thrower> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    std::puts("the fault");
    std::fflush(stdout);
    throw std::runtime_error("thrown inside backward");
  }
};

torch::nn::Sequential make_model(const std::string& mode, bool odd) {
  using torch::nn::Linear;
  torch::nn::Sequential model;
  model->push_back(mode == "name" && odd ? "fc" : "first", Linear(8, 8));
  model->push_back("second", Linear(8, mode == "shape" && odd ? 12 : 8));
  if (mode == "order" && odd) {
    model->push_back("fourth", Linear(8, 8));
    model->push_back("third", Linear(8, 8));
  } else {
    model->push_back("third", Linear(8, 8));
    model->push_back("fourth", Linear(8, 8));
  }
  if (mode == "dtype" && odd) model->to(torch::kDouble);
  return model;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argv[argc - 1];
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    const bool odd = world.rank() == 1;
    auto model = make_model(mode, odd);
    lockstep::GlooOptions options;
    if (mode == "late") {
      options.timeout = std::chrono::seconds(3);
      lockstep_test::meet(world);
    }
    lockstep::GlooComm comm{world, options};
    lockstep::DistributedDataParallel ddp{model, comm, {.bucket_cap_mb = lockstep_test::mib({64})}};
    for (int step = 0; step < 3; ++step) {
      const bool fault = step == 2;
      auto x = torch::ones({2, 8}, torch::requires_grad());
      // Its backward comes after the gradients of all layers, and all buckets but the last are in flight.
      if (fault && odd && mode.starts_with("throws")) x = Thrower::apply(x);
      if (fault && odd && mode == "late") std::this_thread::sleep_for(std::chrono::minutes(2));
      if (fault && !odd && mode == "throws alone") std::this_thread::sleep_for(std::chrono::minutes(2));
      if (fault && odd && mode == "unused") model = make_model(mode, odd);
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
