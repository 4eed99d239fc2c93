#include "lockstep/train/trainer.hpp"

#include "lockstep/comm/local_comm.hpp"
#include "support/catch.hpp"
#include "train/nets.hpp"

namespace {

using LocalTrainer =
    lockstep::Trainer<TinyNet, lockstep::DistributedSampler, lockstep::LocalComm, lockstep::Fp32>;

const lockstep::World& alone() {
  static const auto world = lockstep::World::from_environment();
  return world;
}

auto loss = [](TinyNet& net, const auto& batch) {
  return torch::cross_entropy_loss(net(batch.data), batch.target);
};

}  // namespace

TEST_CASE("a trainer trains what a model can learn") {
  const auto train = three_classes(512), test = three_classes(100, 2);
  auto trainer = LocalTrainer{alone(), {.epochs = 12, .batch_size = 16, .lr = 0.2, .seed = 3407}};
  const double before = trainer.evaluate(test, lockstep::Accuracy{});
  const auto report = trainer.fit(train, loss);
  CHECK(report.epoch == 11);
  CHECK(report.step == 12 * 32);
  CHECK(report.loss < 0.5);
  CHECK(before < 0.7);
  CHECK(trainer.evaluate(test, lockstep::Accuracy{}) > 0.9);
}

TEST_CASE("training is counted in epochs or in steps, and goes on where it stopped") {
  const auto train = three_classes(40);  // 5 steps an epoch of 8
  std::vector<std::string> told;
  auto watch = [&](auto& trainer) {
    return trainer.fit(
        train, loss, lockstep::OnEpochStart{[&](const lockstep::EpochPlan& plan) {
          told.push_back(fmt::format("begin {}/{} of {} steps", plan.epoch + 1, plan.epochs, plan.steps));
        }},
        lockstep::OnStep{[&](const lockstep::StepReport& report) {
          told.push_back(fmt::format("{}.{}", report.epoch, report.step));
          CHECK(report.step_in_epoch < report.steps_in_epoch);
        }},
        lockstep::OnEpoch{[&](const lockstep::EpochReport& report) {
          told.push_back(fmt::format("end {} after {}", report.epoch, report.step));
        }});
  };
  SECTION("epochs") {
    auto trainer = LocalTrainer{alone(), {.epochs = 1, .batch_size = 8}};
    watch(trainer);
    CHECK(told == std::vector<std::string>{"begin 1/1 of 5 steps", "0.0", "0.1", "0.2", "0.3", "0.4",
                                           "end 0 after 5"});
    told.clear();
    watch(trainer);
    CHECK(told == std::vector<std::string>{"begin 2/2 of 5 steps", "1.5", "1.6", "1.7", "1.8", "1.9",
                                           "end 1 after 10"});
  }
  SECTION("steps") {
    auto trainer = LocalTrainer{alone(), {.steps = 7, .batch_size = 8}};
    watch(trainer);
    CHECK(told == std::vector<std::string>{"begin 1/2 of 5 steps", "0.0", "0.1", "0.2", "0.3", "0.4",
                                           "end 0 after 5", "begin 2/2 of 2 steps", "1.5", "1.6",
                                           "end 1 after 7"});
    CHECK(trainer.step() == 7);
  }
  SECTION("nothing") {
    auto trainer = LocalTrainer{alone(), {.epochs = 0}};
    watch(trainer);
    CHECK(told.empty());
  }
}
