// What one warm backward allocates beyond the plain one does not grow with the number of parameters.
#include <torch/torch.h>

#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "support/allocations.hpp"
#include "support/catch.hpp"

namespace {

struct ScalarsImpl : torch::nn::Module {
  explicit ScalarsImpl(int count) {
    for (int i = 0; i < count; ++i)
      weights.push_back(register_parameter("weight" + std::to_string(i), torch::ones({4})));
  }
  torch::Tensor forward() { return torch::stack(weights).sum(); }
  std::vector<torch::Tensor> weights;
};

template <class Backward>
long warm_allocations(ScalarsImpl& model, Backward&& backward) {
  long least = 1'000'000;
  for (int step = 0; step < 6; ++step) {
    model.zero_grad(false);
    const auto loss = model.forward();
    const long before = lockstep_test::allocations;
    backward(loss);
    least = std::min(least, lockstep_test::allocations - before);
  }
  return least;
}

struct Nothing {
  void operator()() const {}
};

/// Allocations of a backward through lockstep beyond those of a plain one with a hook on each parameter:
/// LibTorch copies the inputs of what has a hook.
long extra_allocations(int count, lockstep::GlooComm& comm) {
  ScalarsImpl plain(count), reduced(count);
  std::vector<lockstep::detail::AccumulateHook<Nothing>> hooks;
  for (const auto& weight : plain.weights) hooks.emplace_back(weight, Nothing{});
  lockstep::DistributedDataParallel ddp{reduced, comm};
  const long without = warm_allocations(plain, [](const torch::Tensor& loss) { loss.backward(); });
  const long with = warm_allocations(reduced, [&](const torch::Tensor& loss) { ddp.backward(loss); });
  return with - without;
}

}  // namespace

TEST_CASE("once warm, lockstep allocates nothing for each parameter") {
  const auto world = lockstep::World::from_environment();
  lockstep::GlooComm comm{world};
  const long few = extra_allocations(10, comm), many = extra_allocations(210, comm);
  CAPTURE(few, many);
  CHECK(many - few < 20);
}
