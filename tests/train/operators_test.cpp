// What is chosen at compile time costs nothing at run time: the trainer runs the operators of the loop by hand.
#include <ATen/record_function.h>

#include <string>
#include <vector>

#include "lockstep/comm/local_comm.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/train/trainer.hpp"
#include "support/catch.hpp"
#include "train/nets.hpp"

namespace operators_test {

namespace {

std::vector<std::string>* recorded = nullptr;

// The names of all operators, forward and backward, that `work` runs on this thread and autograd's.
template <class Work>
std::vector<std::string> operators_of(Work&& work) {
  std::vector<std::string> names;
  recorded = &names;
  const auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback(
          [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
            recorded->emplace_back(function.name());
            return nullptr;
          })
          .scopes(
              {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE}));
  work();
  at::removeCallback(handle);
  return names;
}

template <class Optimize>
std::vector<std::string> by_hand(const lockstep::TensorDataset& train, int steps, Optimize&& optimize) {
  torch::manual_seed(1);
  TinyNet net;
  auto optimizer = optimize(net->parameters());
  lockstep::DataLoader loader{
      train, lockstep::DistributedSampler{train.size(), 0, 1, {.seed = 1}}, {.batch_size = 8}};
  return operators_of([&] {
    loader.set_epoch(0);
    net->train();
    int step = 0;
    for (auto& batch : loader) {
      optimizer.zero_grad();
      auto loss = torch::cross_entropy_loss(net(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      if (++step == steps) break;
    }
  });
}

template <class... Extras, class... Callbacks>
std::vector<std::string> by_trainer(const lockstep::TensorDataset& train, int steps,
                                    std::tuple<Extras...> extras = {}, Callbacks... callbacks) {
  const auto world = lockstep::World::from_environment();
  const lockstep::TrainerOptions options{.steps = steps, .batch_size = 8, .seed = 1};
  auto trainer = std::apply(
      [&](auto&... extra) {
        return lockstep::Trainer{world, options, std::in_place_type<TinyNet>, lockstep::LocalComm(world),
                                 extra...};
      },
      extras);
  return operators_of([&] {
    trainer.fit(
        train,
        [](TinyNet& net, auto& batch) { return torch::cross_entropy_loss(net(batch.data), batch.target); },
        callbacks...);
  });
}

}  // namespace

TEST_CASE("ten steps of a trainer on LocalComm run the operators of the loop by hand, and no other") {
  const auto train = three_classes(200);
  const auto hand =
      by_hand(train, 10, [](auto parameters) { return lockstep::SGD(parameters, {.lr = 1e-3}); });
  REQUIRE(std::count(hand.begin(), hand.end(), "aten::cross_entropy_loss") == 10);
  CHECK(by_trainer(train, 10) == hand);

  SECTION("also with extras and callbacks") {
    auto adam = lockstep::MakeOptimizer{[](auto parameters) { return torch::optim::Adam(parameters, 1e-3); }};
    const std::tuple extras{adam, lockstep::RateSchedule{[](auto, auto) { return 0.5; }}};
    CHECK(by_trainer(train, 10, extras, lockstep::OnStep{[](const auto&) {}},
                     lockstep::OnEpoch{[](const auto&) {}}) ==
          by_hand(train, 10, [](auto parameters) { return torch::optim::Adam(parameters, 1e-3); }));
  }
  SECTION("and a loop with one operator more is told apart") {
    CHECK(by_trainer(train, 9) != hand);
  }
}

}  // namespace operators_test
