// Communication hooks inside DistributedDataParallel.
#include <torch/script.h>

#include "grad/models.hpp"
#include "lockstep/grad/hooks/compression_hooks.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/grad/hooks/power_sgd_hook.hpp"

namespace hooked_ranks_test {

using lockstep::DistributedDataParallel;
using lockstep::GradientError;

namespace {

/// Three backwards with a hook: how far the gradients are from the average, relative to its largest element.
template <class Hook>
double largest_error(Hook hook) {
  torch::manual_seed(9);
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets(), std::move(hook)};
  double error = 0;
  for (int step = 0; step < 3; ++step) {
    auto loss = [&](Net& model, int rank) { return model(batch_of(rank, step)).pow(2).mean(); };
    const auto expected = expected_gradients(net, test_world().size(), loss);
    net->zero_grad(step % 2 == 0);
    ddp.backward(loss(net, test_world().rank()));
    for (std::size_t i = 0; i < expected.size(); ++i)
      error = std::max(
          error, ((net->parameters()[i].grad() - expected[i]).abs().max() / (expected[i].abs().max() + 1e-12))
                     .template item<double>());
  }
  CHECK(ddp.report().hook == ddp.hook().name());
  if (test_world().size() > 1 && ddp.hook().wire_bytes() > 0) CHECK(ddp.report().bytes > 0);
  return error;
}

/// A backward in which one rank leaves a parameter out, and one that throws, are errors on every rank,
/// whatever the hook does with the buckets; the next ones work.
template <class Hook>
void check_failures(Hook hook) {
  const int rank = test_world().rank(), culprit = test_world().size() - 1;
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets(), std::move(hook)};
  for (int step = 0; step < 3; ++step) {
    CAPTURE(step);
    net->zero_grad();
    net->use_two = rank != culprit;
    const auto loss = net(batch_of(rank, 0)).sum();
    net->use_two = true;
    CHECK_THROWS_AS(ddp.backward(loss), lockstep::GradientError);
    CHECK_FALSE(net->one->weight.grad().defined());
    const auto bad = rank == culprit ? torch::ones({}) : net(batch_of(rank, 0)).sum();
    CHECK_FALSE(thrown_by([&] { ddp.backward(bad); }).empty());
    net->zero_grad();
    ddp.backward(net(batch_of(rank, 0)).sum());
    CHECK(net->one->weight.grad().defined());
  }
}

}  // namespace

TEST_CASE("gradients with a hook are the average, as exactly as the hook sends them") {
  CHECK(largest_error(lockstep::AllReduceHook{}) < 1e-5);
  CHECK(largest_error(lockstep::Fp16Hook{}) < 5e-3);
  CHECK(largest_error(lockstep::Bf16Hook{}) < 5e-2);
  CHECK(largest_error(lockstep::Bf16Fp32Hook{}) < 5e-2);
  CHECK(largest_error(lockstep::QuantizedHook{}) < 0.2);
  CHECK(largest_error(lockstep::QuantizedHook{{.per_channel = true, .channel = 3}}) < 0.2);
  // Every matrix of this network is worth no compression at the full rank: they travel whole.
  CHECK(largest_error(lockstep::PowerSgdHook{{.matrix_approximation_rank = 8, .start_iteration = 0}}) < 1e-5);
  CHECK(largest_error(lockstep::hook_of([](auto& comm, const lockstep::GradientBucket& bucket) {
          bucket.flat.div_(comm.size());
          return comm.all_reduce(bucket.flat);
        })) < 1e-5);
  // Each rank keeps its own: far from the average where there are others.
  if (test_world().size() > 1) CHECK(largest_error(lockstep::NoOpHook{}) > 1e-2);
}

TEST_CASE("missing gradients and what backward throws are found with every hook") {
  check_failures(lockstep::Fp16Hook{});
  check_failures(lockstep::Bf16Hook{});
  check_failures(lockstep::Bf16Fp32Hook{});
  check_failures(lockstep::QuantizedHook{});
  check_failures(lockstep::QuantizedHook{{.per_channel = true, .channel = 3}});
  check_failures(lockstep::hook_of([](auto& comm, const lockstep::GradientBucket& bucket) {
    bucket.flat.div_(comm.size());
    return comm.all_reduce(bucket.flat);
  }));
  check_failures(lockstep::PowerSgdHook{{.start_iteration = 0}});
  check_failures(lockstep::NoOpHook{});
}

TEST_CASE("sums with counts are exact means through a hook as well") {
  const auto& world = test_world();
  torch::manual_seed(10);
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets(), lockstep::Fp16Hook{}};
  for (int step = 0; step < 3; ++step) {
    std::vector<at::Tensor> all;
    for (int r = 0; r < world.size(); ++r) {
      torch::manual_seed(r);
      all.push_back(torch::randn({2 + r, 4}));
    }
    const auto joined = torch::cat(all);
    const auto expected = torch::autograd::grad(
        {net(joined).pow(2).sum() / static_cast<double>(joined.size(0))}, net->parameters());
    net->zero_grad();
    const auto& mine = all[static_cast<std::size_t>(world.rank())];
    CHECK(ddp.backward_sum(net(mine).pow(2).sum(), static_cast<double>(mine.size(0))) ==
          static_cast<double>(joined.size(0)));
    for (std::size_t i = 0; i < expected.size(); ++i)
      CHECK(torch::allclose(net->parameters()[i].grad(), expected[i], 1e-2, 1e-3));
  }
}

TEST_CASE("sums that a short type cannot hold travel as means") {
  const auto mean_of_ones = [](auto& ddp, auto& layer, std::int64_t tokens) {
    const auto ones = torch::ones({tokens, 1}, layer->bias.options().requires_grad(false));
    CHECK(ddp.backward_sum(layer(ones).sum(), static_cast<double>(tokens)) ==
          static_cast<double>(tokens * test_world().size()));
    CHECK_THAT(layer->bias.grad().template item<double>(), Catch::Matchers::WithinAbs(1, 2e-3));
    CHECK_THAT(layer->weight.grad().template item<double>(), Catch::Matchers::WithinAbs(1, 2e-3));
  };
  torch::nn::Linear layer(1, 1);
  DistributedDataParallel cast{layer, shared_comm(), {}, lockstep::Fp16Hook{}};
  mean_of_ones(cast, layer, 200000);
  {
    // What was gathered before counts as well.
    layer->zero_grad();
    const auto guard = cast.no_sync();
    cast.backward_sum(layer(torch::zeros({200000, 1})).sum(), 200000);
  }
  cast.backward_sum(layer(torch::ones({200000, 1})).sum(), 200000);
  CHECK_THAT(layer->weight.grad().item<double>(), Catch::Matchers::WithinAbs(0.5, 1e-3));
  CHECK_THAT(layer->bias.grad().item<double>(), Catch::Matchers::WithinAbs(1, 2e-3));

  torch::nn::Linear half(1, 1);
  half->to(torch::kHalf);
  DistributedDataParallel plain{half, shared_comm()};
  mean_of_ones(plain, half, 40000);
  half->zero_grad();
  CHECK(plain.backward_sum(half(torch::ones({9, 1}, torch::kHalf)).sum(), 0) == 0);
  CHECK(half->weight.grad().item<double>() == 0);
}

TEST_CASE("sparse gradients with a hook are refused by name") {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(5, 3).sparse(true));
  refuses<lockstep::UsageError>(
      [&] {
        DistributedDataParallel{table, shared_comm(), {}, lockstep::Fp16Hook{}};
      },
      "'weight' is sparse");
}

TEST_CASE("a TorchScript module") {
  const auto& world = test_world();
  torch::jit::Module script("scaled");
  script.register_parameter(
      "weight", torch::full({3}, static_cast<float>(world.rank() + 1)).requires_grad_(true), false);
  script.register_buffer("offset", torch::full({3}, static_cast<float>(world.rank())));
  script.define("def forward(self, x):\n    return (x * self.weight + self.offset).sum()\n");
  DistributedDataParallel ddp{script, shared_comm()};
  CHECK(torch::equal(script.attr("weight").toTensor().detach(), torch::ones({3})));
  CHECK(torch::equal(script.attr("offset").toTensor(), torch::zeros({3})));
  REQUIRE(ddp.named_parameters().size() == 1);
  CHECK(ddp.named_parameters()[0].name == "weight");
  const at::Tensor weight = ddp.parameters()[0];
  for (int step = 0; step < 3; ++step) {
    weight.mutable_grad().reset();
    ddp.backward(ddp(torch::full({3}, static_cast<float>(world.rank() + 1))).toTensor());
    CHECK(torch::allclose(weight.grad(), torch::full({3}, static_cast<float>(world.size() + 1) / 2)));
  }
}

TEST_CASE("a buffer that TorchScript assigns is synchronized, though it is another tensor each time") {
  torch::jit::Module script("moving");
  script.register_parameter("weight", torch::ones({3}).requires_grad_(true), false);
  script.register_buffer("mean", torch::zeros({1}));
  script.define(
      "def forward(self, x):\n    self.mean = self.mean + x.mean()\n    return (x * self.weight + "
      "self.mean).sum()\n");
  DistributedDataParallel ddp{script, shared_comm()};
  for (int step = 0; step < 3; ++step)
    ddp.backward(ddp(torch::full({3}, static_cast<float>(test_world().rank() + 1))).toTensor());
  ddp.sync_buffers();
  CHECK(script.attr("mean").toTensor().item<float>() == 3);  // rank 0's
}

}  // namespace hooked_ranks_test
