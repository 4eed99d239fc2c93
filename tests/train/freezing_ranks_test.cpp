#include <torch/torch.h>

#include <string>
#include <vector>

#include "lockstep/grad/hooks/power_sgd_hook.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/train/trainer.hpp"
#include "support/mib.hpp"
#include "support/ranks.hpp"
#include "support/refuses.hpp"
#include "train/common_folder.hpp"
#include "train/regression.hpp"

namespace freezing_ranks_test {

namespace {

using lockstep::EpochPlan;
using lockstep::OnEpochStart;

void freeze(torch::nn::Sequential& net, bool frozen) {
  for (auto& parameter : net->ptr(0)->parameters()) parameter.requires_grad_(!frozen);
}
// The first layer is frozen in epoch 1 alone.
auto midway(torch::nn::Sequential& net) {
  return OnEpochStart{[&](const EpochPlan& plan) { freeze(net, plan.epoch == 1); }};
}

const auto make_adam = lockstep::MakeOptimizer{[](const std::vector<at::Tensor>& parameters) {
  return lockstep::AdamW(parameters, {.lr = 0.02, .weight_decay = 0.1});
}};
lockstep::TrainerOptions options() {
  return {.epochs = 3, .batch_size = 3, .seed = 4, .shuffle = false, .progress = false};
}
std::vector<at::Tensor> copies(torch::nn::Sequential& net) {
  std::vector<at::Tensor> values;
  for (const auto& parameter : net->parameters()) values.push_back(parameter.detach().clone());
  return values;
}
bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& one, const auto& other) { return one.equal(other); });
}

}  // namespace

TEST_CASE("parameters frozen between epochs keep their values, and the others train as in one process") {
  const auto& world = test_world();
  const auto data = curve(12 * world.size());
  auto together = tanh_network(1, 4, 7), alone = copy_of(together);
  std::vector<std::vector<at::Tensor>> after;
  lockstep::Trainer trainer(world, options(), together, make_adam, lockstep::CheckFinite());
  trainer.fit(data, squared_error, midway(trainer.model()),
              lockstep::OnEpoch{[&](const lockstep::EpochReport&) { after.push_back(copies(together)); }});
  CHECK(trainer.ddp().buckets().size() <= 1);
  CHECK(after[0][0].equal(after[1][0]));
  CHECK(after[0][1].equal(after[1][1]));
  CHECK_FALSE(after[0][2].equal(after[1][2]));
  CHECK_FALSE(after[1][0].equal(after[2][0]));

  lockstep::AdamW adam(alone->parameters(), {.lr = 0.02, .weight_decay = 0.1});
  for (int epoch = 0; epoch < 3; ++epoch) {
    freeze(alone, epoch == 1);
    for (std::size_t step = 0; step < 4; ++step) {
      std::vector<std::size_t> indices;
      for (std::size_t i = 0; i < 3 * static_cast<std::size_t>(world.size()); ++i)
        indices.push_back(step * 3 * static_cast<std::size_t>(world.size()) + i);
      step_alone(alone, adam, data, indices);
    }
  }
  CHECK(distance(together, alone) < 1e-9);
}

TEST_CASE("a run whose parameters were frozen midway resumes to the same bits") {
  const auto& world = test_world();
  const auto data = curve(12 * world.size() + 1);
  CommonFolder folder(world);
  auto whole = tanh_network(2, 4, 7), rest = copy_of(whole);
  lockstep::Trainer first(world, options(), whole, make_adam);
  const auto save = [&](const lockstep::StepReport& report) {
    if (report.step == 7) first.save_checkpoint(folder / "run.pt");  // within epoch 1
  };
  first.fit(data, squared_error, midway(first.model()), lockstep::OnStep{save});
  lockstep::Trainer second(world, options(), rest, make_adam);
  second.load_checkpoint(folder / "run.pt");
  CHECK_FALSE(rest->parameters()[0].requires_grad());
  second.fit(data, squared_error, midway(second.model()));
  CHECK(same(copies(whole), copies(rest)));
}

TEST_CASE("a checkpoint with other frozen parameters that cannot be loaded leaves the wrapper as it was",
          "[2+]") {
  const auto& world = test_world();
  const auto data = curve(12 * world.size());
  CommonFolder folder(world);
  auto net = tanh_network(1, 4, 7);
  freeze(net, true);
  lockstep::Trainer saving(world, options(), net);
  freeze(net, false);  // and a wrapper that does not know it
  saving.ddp() = std::remove_reference_t<decltype(saving.ddp())>(saving.model(), saving.comm());
  saving.ddp().backward(saving.model()->forward(torch::ones({1, 3}, torch::kDouble)).sum());
  freeze(net, true);
  saving.save_checkpoint(folder / "run.pt");

  auto small = options();
  small.ddp.bucket_cap_mb = lockstep_test::mib({8});
  lockstep::Trainer trainer(world, small, tanh_network(1, 4, 7));
  trainer.fit(data, squared_error);
  const std::string state = lockstep::pickle_state(trainer.ddp().state());
  const auto buckets = trainer.ddp().buckets();
  CHECK_THROWS_AS(trainer.load_checkpoint(folder / "run.pt"), lockstep::CheckpointError);
  CHECK(trainer.model()->parameters()[0].requires_grad());
  CHECK(trainer.ddp().buckets() == buckets);
  CHECK(lockstep::pickle_state(trainer.ddp().state()) == state);
}

TEST_CASE("ranks that freeze other parameters, a whole frozen model and a step are refused in words") {
  const auto& world = test_world();
  const auto data = curve(6 * world.size());
  lockstep::Trainer trainer(world, options(), tanh_network(1, 4, 7));
  const auto refused = [&](const char* words, auto&&... callbacks) {
    refuses<lockstep::Error>([&] { trainer.fit(data, squared_error, callbacks...); }, words);
  };
  if (world.size() > 1) {
    refused("'0.weight'",
            OnEpochStart{[&](const EpochPlan&) { freeze(trainer.model(), world.rank() == 1); }});
    freeze(trainer.model(), false);
  }
  refused("'0.weight' was frozen",
          lockstep::OnStep{[&](const lockstep::StepReport&) { freeze(trainer.model(), true); }});
  trainer.fit(data, squared_error);
  for (auto& parameter : trainer.model()->parameters()) parameter.requires_grad_(false);
  refused("without a parameter that requires grad");
  if (world.size() == 1) return;
  lockstep::Trainer stateful(world, options(), tanh_network(1, 4, 7), lockstep::PowerSgdHook{});
  freeze(stateful.model(), true);
  refuses<lockstep::Error>([&] { stateful.fit(data, squared_error); }, "hook without state");
}

}  // namespace freezing_ranks_test
