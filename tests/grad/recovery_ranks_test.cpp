// What is left behind by a step that was given up, and by errors of hooks: nothing.
#include "grad/models.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/grad/hooks/power_sgd_hook.hpp"
#include "support/mib.hpp"

namespace recovery_ranks_test {

using lockstep::DistributedDataParallel;
using lockstep::GradientError;

namespace {
std::vector<at::Tensor> two_lists(std::int64_t large) {
  return {torch::ones({large}, torch::requires_grad()), torch::ones({4}, torch::requires_grad())};
}

/// Throws when it is waited for: by then every rank has launched all of its collectives.
struct FailingWait {
  bool fails;
  void wait() const {
    if (fails) throw GradientError("no room for the average");
  }
  void synchronize(std::chrono::milliseconds) const { wait(); }
};
}  // namespace

TEST_CASE("a hook's error leaves no bucket on its way into the next backward") {
  auto list = two_lists(2000000);
  int calls = 0;
  bool wrong = false;
  DistributedDataParallel ddp{
      list,
      shared_comm(),
      {.bucket_cap_mb = lockstep_test::mib({16})},
      lockstep::hook_of([&calls, &wrong](auto& comm, const lockstep::GradientBucket& bucket) {
        ++calls;
        bucket.flat.div_(comm.size());
        comm.all_reduce(bucket.flat).synchronize();
        // A hook that looks at one bucket only.
        return FailingWait{wrong && bucket.flat.numel() == 4};
      })};
  const auto step = [&](double factor) {
    for (auto& parameter : list) parameter.mutable_grad().reset();
    ddp.backward((list[0] * factor).sum() + list[1].sum());
  };
  step(1);
  step(1);
  CHECK(calls >= 3);
  wrong = true;
  CHECK_THROWS_AS(step(2), GradientError);
  CHECK_FALSE(list[0].grad().defined());
  wrong = false;
  step(3);
  CHECK(list[0].grad().eq(3).all().item<bool>());
}

TEST_CASE("a hook's error on one rank is one on every rank") {
  const auto& world = test_world();
  auto list = two_lists(8);
  const int culprit = world.size() - 1;
  bool wrong = true;
  DistributedDataParallel ddp{
      list, shared_comm(), {}, lockstep::hook_of([&](auto& comm, const lockstep::GradientBucket& bucket) {
        bucket.flat.div_(comm.size());
        comm.all_reduce(bucket.flat).synchronize();
        return FailingWait{wrong && comm.rank() == culprit};
      })};
  for (int step = 0; step < 2; ++step) {
    refuses<std::exception>([&] { ddp.backward(list[0].sum() + list[1].sum()); }, "no room for the average");
    CHECK_FALSE(list[0].grad().defined());
  }
  wrong = false;
  ddp.backward(list[0].sum() + list[1].sum());
  CHECK(list[0].grad().eq(1).all().item<bool>());
}

TEST_CASE("a step that was given up is forgotten, a refused count was never there") {
  auto list = two_lists(4);
  DistributedDataParallel ddp{list, shared_comm()};
  const auto sum = [&] { return (list[0].sum() + list[1].sum()) * 8; };
  for (int step = 0; step < 3; ++step) {
    {
      const auto guard = ddp.no_sync();
      CHECK(ddp.backward_sum(sum(), 8) == 8);  // of this rank, so far
      CHECK_THROWS_AS(ddp.backward_sum(sum(), -5), lockstep::UsageError);
    }
    ddp.forget();
    for (auto& parameter : list) parameter.mutable_grad().reset();
    CHECK(ddp.backward_sum(sum(), 8) == 8 * test_world().size());
    CHECK(list[0].grad().eq(1).all().item<bool>());
    for (auto& parameter : list) parameter.mutable_grad().reset();
  }
}

TEST_CASE("where nothing was counted gradients are zeros, whatever the sums and the hook") {
  auto list = two_lists(64);
  DistributedDataParallel plain{list, shared_comm()};
  CHECK(plain.backward_sum(list[0].sum() + list[1].sum(), 0) == 0);
  CHECK(list[0].grad().eq(0).all().item<bool>());
  std::vector<at::Tensor> matrix{torch::randn({32, 32}).requires_grad_(true)};
  DistributedDataParallel low_rank{matrix, shared_comm(), {}, lockstep::PowerSgdHook{{.start_iteration = 0}}};
  torch::manual_seed(test_world().rank());
  low_rank.backward((matrix[0] * torch::randn({32, 32})).sum());
  const auto before = low_rank.hook().state();
  matrix[0].mutable_grad().reset();
  CHECK(low_rank.backward_sum({}, 0) == 0);
  CHECK(matrix[0].grad().eq(0).all().item<bool>());
  const auto after = low_rank.hook().state();
  REQUIRE(after.size() == before.size());
  for (std::size_t i = 0; i < before.size(); ++i)
    CHECK(torch::equal(after[i].second.to(torch::kDouble), before[i].second.to(torch::kDouble)));
}

TEST_CASE("a gradient of earlier that no rank's backward comes to stays as it is") {
  auto list = two_lists(4);
  lockstep::DdpOptions options;
  options.find_unused_parameters = true;
  DistributedDataParallel ddp{list, shared_comm(), options};
  ddp.backward(list[0].sum() * 0.1 + list[1].sum());
  const auto kept = list[0].grad().clone();
  for (int step = 0; step < 3; ++step) {
    list[1].mutable_grad().reset();
    ddp.backward(list[1].sum());
    CHECK(torch::equal(list[0].grad(), kept));
  }
  list[1].mutable_grad().reset();
  ddp.backward_sum(list[1].sum(), 8);
  CHECK(torch::equal(list[0].grad(), kept));
}

TEST_CASE("a static graph whose first step has no data learns with the first that has") {
  const auto& world = test_world();
  auto list = two_lists(4);
  lockstep::DdpOptions options;
  options.static_graph = true;
  options.gradients = lockstep::GradientStorage::separate;
  DistributedDataParallel ddp{list, shared_comm(), options};
  ddp.backward_empty();
  for (int step = 0; step < 4; ++step) {
    for (auto& parameter : list) parameter.mutable_grad().reset();
    ddp.backward((list[0] * (world.rank() + 1)).sum());
    CHECK(list[0].grad().eq((world.size() + 1) / 2.0).all().item<bool>());
    CHECK_FALSE(list[1].grad().defined());
  }
}

TEST_CASE("models that share a loss: a rank without data, and one whose backward throws before the second") {
  const auto& world = test_world();
  torch::nn::Linear first(3, 3), second(3, 1);
  DistributedDataParallel one{first, shared_comm()};
  DistributedDataParallel other{second, shared_comm()};
  const auto x = torch::full({1, 3}, world.rank() + 1.0F);
  for (int step = 0; step < 4; ++step) {
    first->zero_grad();
    second->zero_grad();
    if (step == 2) {
      const auto out = second(first(x)).sum();
      const bool culprit = world.rank() == world.size() - 1;
      CHECK_FALSE(thrown_by([&] { one.backward(culprit ? throwing(out, "before both") : out); }).empty());
      continue;
    }
    if (world.size() > 1 && world.rank() == 0 && step % 2 == 1) {
      one.backward_empty();
      other.backward_empty();
    } else {
      one.backward(second(first(x)).sum());
    }
    // The bias of the second model gets 1 from each rank that has data.
    const int with_data = world.size() - (world.size() > 1 && step % 2 == 1 ? 1 : 0);
    CHECK(second->bias.grad()[0].item<float>() ==
          static_cast<float>(with_data) * (1.0F / static_cast<float>(world.size())));
  }
}

}  // namespace recovery_ranks_test
