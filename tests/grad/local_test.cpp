// With LocalComm nothing is left of DistributedDataParallel at run time.
#include <torch/csrc/autograd/profiler.h>
#include <torch/torch.h>

#include "lockstep/grad/distributed_data_parallel.hpp"
#include "support/catch.hpp"

namespace {

/// The names of all operators that `work` runs, in order.
template <class Work>
std::vector<std::string> operators_of(Work&& work) {
  static std::vector<std::string> names;
  names.clear();
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        names.emplace_back(function.name());
        return nullptr;
      }));
  work();
  at::removeCallback(handle);
  return names;
}

template <class Step>
std::vector<std::string> ten_steps(Step&& step) {
  return operators_of([&] {
    for (int i = 0; i < 10; ++i) step();
  });
}

}  // namespace

TEST_CASE("with LocalComm, ten steps run the operators of the plain loop and no other") {
  const auto world = lockstep::World::from_environment();
  lockstep::LocalComm comm{world};
  const auto x = torch::randn({4, 3});
  auto make = [] { return torch::nn::Sequential(torch::nn::Linear(3, 3), torch::nn::BatchNorm1d(3)); };

  auto plain_model = make();
  torch::optim::SGD plain_optimizer(plain_model->parameters(), 0.1);
  const auto plain = ten_steps([&] {
    plain_optimizer.zero_grad();
    plain_model->forward(x).pow(2).sum().backward();
    plain_optimizer.step();
  });

  auto model = make();
  lockstep::DistributedDataParallel ddp{model, comm};
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  const auto ours = ten_steps([&] {
    optimizer.zero_grad();
    const auto guard = ddp.no_sync();
    ddp.backward(ddp(x).pow(2).sum());
    optimizer.step();
  });
  CHECK(plain.size() > 100);
  CHECK(ours == plain);
}

TEST_CASE("with LocalComm, sums and counts end as on several ranks") {
  const auto world = lockstep::World::from_environment();
  lockstep::LocalComm comm{world};
  torch::nn::Linear layer(2, 1);
  lockstep::DistributedDataParallel ddp{layer, comm};
  const auto sum = [&] { return layer(torch::ones({3, 2})).sum(); };
  CHECK(ddp.backward_mean(sum(), 0) == 0);
  CHECK(layer->weight.grad().eq(0).all().item<bool>());
  layer->zero_grad();
  CHECK(ddp.backward_mean(sum(), 3) == 3);
  CHECK(layer->weight.grad().eq(1).all().item<bool>());
  CHECK_THROWS_AS(ddp.backward_mean(sum(), 3), lockstep::GradientError);
  CHECK(!layer->weight.grad().defined());
  {
    const auto guard = ddp.no_sync();
    ddp.backward_mean(sum(), 3);
  }
  CHECK_THROWS_AS(ddp.backward_mean(sum(), -1), lockstep::UsageError);
  CHECK(!layer->weight.grad().defined());
  CHECK(ddp.backward_mean(sum(), 3) == 3);
}

TEST_CASE("with LocalComm, no hook is left on a parameter") {
  const auto world = lockstep::World::from_environment();
  lockstep::LocalComm comm{world};
  torch::nn::Linear layer(2, 2);
  lockstep::DistributedDataParallel ddp{layer, comm};
  CHECK(torch::autograd::impl::grad_accumulator(layer->weight)->post_hooks().empty());
  CHECK_THROWS_AS(ddp.backward(layer(torch::ones({1, 2})).sum(), false, true), lockstep::GradientError);
}
