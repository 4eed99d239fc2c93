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
