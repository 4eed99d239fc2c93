#include <torch/torch.h>

#include <vector>

#include "grad/models.hpp"
#include "lockstep/optim/averaging.hpp"
#include "lockstep/optim/clip.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/optim/schedule.hpp"
#include "lockstep/optim/zero_redundancy.hpp"
#include "lockstep/train/trainer.hpp"
#include "optim/common.hpp"

namespace training_ranks_test {

namespace {

// Whether rank 0's tensors are those of every rank.
bool same_everywhere(const std::vector<torch::Tensor>& tensors) {
  bool same = true;
  for (const torch::Tensor& tensor : tensors) {
    auto copy = tensor.detach().clone();
    shared_comm().broadcast(copy, 0).synchronize();
    same = same && torch::equal(copy, tensor);
  }
  return same;
}

}  // namespace

TEST_CASE("after ddp.backward the norm is that of the reduced gradients, equal on every rank") {
  torch::manual_seed(1);
  Net net;
  lockstep::DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  lockstep::Adam optimizer(ddp.parameters(), {.lr = 0.01});
  lockstep::MovingAverage average(*net, {.decay = 0.9});
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    {
      // Two micro-batches: the norm is taken once, of their sum.
      const auto guard = ddp.no_sync();
      ddp.backward(ddp(batch_of(test_world().rank(), 2 * step)).square().sum());
    }
    ddp.backward(ddp(batch_of(test_world().rank(), 2 * step + 1)).square().sum());
    double squares = 0;
    for (const auto& parameter : net->parameters()) squares += parameter.grad().square().sum().item<double>();
    const auto norm = lockstep::clip_grad_norm(*net, 0.5);
    CHECK(norm.item<double>() == Approx(std::sqrt(squares)).epsilon(1e-5));
    CHECK(same_everywhere({norm}));
    optimizer.step();
    average.update();
  }
  CHECK(same_everywhere(net->parameters()));
  CHECK(same_everywhere(average.tensors()));
}

TEST_CASE("a Trainer takes these optimizers, sharded ones too, and these schedules") {
  torch::manual_seed(3);
  const auto inputs = torch::randn({48, 4}), targets = inputs.sum(1, true);
  lockstep::TensorDataset data{inputs, targets};
  const auto loss = [](torch::nn::Linear& model, const auto& batch) {
    return torch::mse_loss(model(batch.data), batch.target);
  };
  const lockstep::PerStep schedule{
      lockstep::SequentialLR{lockstep::LinearLR{.total_iters = 4}, 4,
                             lockstep::CosineAnnealingLR{.T_max = 20, .eta_min_factor = 0.1}}};
  const lockstep::TrainerOptions options{.epochs = 2, .batch_size = 4, .seed = 7, .progress = false};
  std::vector<std::vector<torch::Tensor>> trained;
  const auto run = [&](auto make) {
    torch::manual_seed(5);
    lockstep::Trainer trainer{test_world(), options, torch::nn::Linear(4, 1), lockstep::MakeOptimizer{make},
                              schedule};
    trainer.fit(data, loss);
    trained.push_back(trainer.model()->parameters());
    CHECK(same_everywhere(trained.back()));
  };
  run([](auto p) { return lockstep::AdamW(std::move(p), {.lr = 0.1}); });
  run([](auto p) {
    return std::make_unique<lockstep::ZeroRedundancyOptimizer<lockstep::CpuComm>>(
        std::move(p), shared_comm(), [](auto q) { return lockstep::AdamW(std::move(q), {.lr = 0.1}); });
  });
  CHECK(same_bits(trained[0], trained[1]));
}

}  // namespace training_ranks_test
