// With LocalComm nothing is left of DistributedDataParallel at run time.
#include <torch/csrc/autograd/profiler.h>
#include <torch/torch.h>

#include "lockstep/grad/distributed_data_parallel.hpp"
#include "support/catch.hpp"

namespace local_test {

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

/// A group of `ranks` ranks, each of which has what this process has: sums are made one rank after the other.
struct PlayedComm : lockstep::LocalComm {
  PlayedComm(const lockstep::World& world, int ranks) : LocalComm(world), ranks(ranks) {}
  Work all_reduce(at::TensorList tensors, lockstep::ReduceOp) {
    for (const at::Tensor& sum : tensors) {
      const at::Tensor mine = sum.clone();
      for (int rank = 1; rank < ranks; ++rank) sum.add_(mine);
    }
    return {};
  }
  [[nodiscard]] std::vector<std::string> all_gather_bytes(const std::string& bytes) const {
    return std::vector<std::string>(static_cast<std::size_t>(ranks), bytes);
  }
  [[nodiscard]] int size() const { return ranks; }
  int ranks;
};

}  // namespace

TEST_CASE("counts are summed exactly on any number of ranks, or refused") {
  const auto world = lockstep::World::from_environment();
  const auto total = [&](int ranks, double count, at::ScalarType type) {
    PlayedComm comm{world, ranks};
    torch::nn::Linear layer(2, 1);
    layer->to(type);
    lockstep::DistributedDataParallel ddp{layer, comm};
    const double sum = ddp.backward_sum(count * layer(torch::ones({1, 2}, type)).sum(), count);
    CHECK(torch::allclose(layer->weight.grad(), torch::ones({1, 2}, type)));
    return sum;
  };
  // What does not divide by 2^16 adds up to 2^24 and more, where float32 rounds, from 257 ranks on.
  for (const int ranks : {2, 255, 256, 257, 1024})
    for (const double count : {1.0, 65535.0, 65537.0, 16777217.0, 4294967295.0}) {
      CAPTURE(ranks, count);
      CHECK(total(ranks, count, at::kFloat) == ranks * count);
    }
  const double largest = 4294967296;  // 2^32
  CHECK(total(256, largest, at::kFloat) == 256 * largest);
  CHECK(total(257, largest + 1, at::kFloat) == 257 * (largest + 1));
  CHECK(total(256, largest + 1, at::kDouble) == 256 * (largest + 1));

  PlayedComm comm{world, 256};
  torch::nn::Linear layer(2, 1);
  lockstep::DistributedDataParallel ddp{layer, comm};
  const auto loss = [&] { return layer(torch::ones({1, 2})).sum(); };
  CHECK_THROWS_WITH(
      ddp.backward_sum(loss(), largest + 1),
      "rank 0: backward_sum got the count 4294967297 in one reduction, but counts that travel "
      "with float32 gradients are exact up to 4294967296 per rank: divide the sum and the count "
      "by the same number");
  CHECK(!layer->weight.grad().defined());
  {
    const auto guard = ddp.no_sync();
    ddp.backward_sum(loss(), largest);
    CHECK_THROWS_AS(ddp.backward_sum(loss(), 1), lockstep::UsageError);
  }
  CHECK(ddp.backward_sum({}, 0) == 256 * largest);
}

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
  CHECK(ddp.backward_sum(sum(), 0) == 0);
  CHECK(layer->weight.grad().eq(0).all().item<bool>());
  layer->zero_grad();
  CHECK(ddp.backward_sum(sum(), 3) == 3);
  CHECK(layer->weight.grad().eq(1).all().item<bool>());
  CHECK_THROWS_AS(ddp.backward_sum(sum(), 3), lockstep::GradientError);
  CHECK(!layer->weight.grad().defined());
  {
    const auto guard = ddp.no_sync();
    ddp.backward_sum(sum(), 3);
  }
  CHECK_THROWS_AS(ddp.backward_sum(sum(), -1), lockstep::UsageError);
  CHECK(!layer->weight.grad().defined());
  CHECK(ddp.backward_sum(sum(), 3) == 3);
}

TEST_CASE("with LocalComm, a mean that the next sum does not reach stays what it is") {
  lockstep::LocalComm comm{lockstep::World::from_environment()};
  auto heads = torch::nn::ModuleList(torch::nn::Linear(2, 1), torch::nn::Linear(2, 1));
  lockstep::DistributedDataParallel ddp{heads, comm};
  const auto sum = [&](std::size_t head) {
    return heads->ptr<torch::nn::LinearImpl>(head)->forward(torch::ones({3, 2})).sum();
  };
  ddp.backward_sum(sum(0), 3);
  ddp.backward_sum(sum(1), 3);
  for (std::size_t head : {0, 1})
    CHECK(heads->ptr<torch::nn::LinearImpl>(head)->weight.grad().eq(1).all().item<bool>());
}

TEST_CASE("with LocalComm, a parameter that is unfrozen later is divided, too") {
  lockstep::LocalComm comm{lockstep::World::from_environment()};
  torch::nn::Linear layer(2, 1);
  layer->weight.requires_grad_(false);
  lockstep::DistributedDataParallel ddp{layer, comm};
  layer->weight.requires_grad_(true);
  ddp.backward_sum(layer(torch::ones({3, 2})).sum(), 3);
  CHECK(layer->weight.grad().eq(1).all().item<bool>());
}

TEST_CASE("with LocalComm, there is nothing to reduce, order or report") {
  const auto world = lockstep::World::from_environment();
  lockstep::LocalComm comm{world};
  torch::nn::Linear layer(2, 1);
  lockstep::DistributedDataParallel ddp{layer, comm};
  ddp.backward(ddp(torch::ones({1, 2})).sum());
  ddp.backward_empty();
  ddp.sync_buffers();
  ddp.rollback();
  CHECK(layer->weight.grad().eq(1).all().item<bool>());
  CHECK(ddp.buckets().empty());
  ddp.load_state(ddp.state());
  ddp.load_state({});
  CHECK(ddp.report().reductions == 0);
  ddp.fail_backward(std::make_exception_ptr(std::runtime_error("the data is missing")));
  CHECK(!layer->weight.grad().defined());
}

TEST_CASE("with LocalComm, no hook is left on a parameter") {
  const auto world = lockstep::World::from_environment();
  lockstep::LocalComm comm{world};
  torch::nn::Linear layer(2, 2);
  lockstep::DistributedDataParallel ddp{layer, comm};
  CHECK(torch::autograd::impl::grad_accumulator(layer->weight)->post_hooks().empty());
  CHECK_THROWS_AS(ddp.backward(layer(torch::ones({1, 2})).sum(), false, true), lockstep::GradientError);
}

}  // namespace local_test
