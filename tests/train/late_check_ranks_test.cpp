// A Trainer whose backwards do not wait for the check of the buckets, as on GPUs: no NaN that a failed rank has left
// is saved, measured or reported.
#include "support/late_check.hpp"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "lockstep/interchange/run_state_dict.hpp"
#include "lockstep/train/extras.hpp"
#include "support/ranks.hpp"
#include "support/text_of.hpp"
#include "train/regression.hpp"

namespace late_check_ranks_test {

using Sequential = torch::nn::Sequential;

namespace {

int culprit() {
  return test_world().size() - 1;
}
bool am_culprit() {
  return test_world().rank() == culprit();
}

auto late_trainer(std::int64_t epochs = 1) {
  return lockstep::Trainer<Sequential, lockstep::DistributedSampler, lockstep_test::LateComm>{
      test_world(), {.epochs = epochs, .batch_size = 2, .progress = false}, tanh_network(1, 3, 5)};
}
lockstep::TensorDataset steps(std::int64_t number) {
  return curve(2 * number * test_world().size());
}

}  // namespace

TEST_CASE("the steps of a Trainer are checked late") {
  auto trainer = late_trainer(2);
  trainer.fit(steps(3), squared_error);
  CHECK(trainer.ddp().checks_late() == (test_world().size() > 1));
}

TEST_CASE("nothing that a failed backward has left is saved or measured", "[2+]") {
  auto trainer = late_trainer();
  trainer.fit(steps(3), squared_error);
  const std::filesystem::path path = trainer.comm().broadcast_bytes(
      fmt::format("{}/lockstep-late-{}", std::filesystem::temp_directory_path().string(), ::getpid()), 0);
  auto data = steps(2);
  lockstep::MeanLoss error{
      [](const at::Tensor& output, const at::Tensor& target) { return torch::mse_loss(output, target); }};
  const int how = GENERATE(0, 1, 2, 3);
  CAPTURE(how);
  // By hand: a rank that leaves `fit` ends the communicator.
  trainer.optimizer().zero_grad();
  auto loss = trainer.model()->forward(curve(2).data()).sum();
  if (am_culprit())
    loss.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("thrown inside"); });
  const std::string own = text_of<std::exception>([&] { trainer.ddp().backward(loss * 1); });
  CHECK(own.empty() == !am_culprit());
  trainer.optimizer().step();
  CHECK(trainer.model()->parameters()[0].isnan().any().item<bool>() == !am_culprit());
  const std::string text = text_of<lockstep::Error>([&] {
    if (how == 0) trainer.save_checkpoint(path);
    if (how == 1) trainer.save(path);
    if (how == 2) trainer.evaluate(data, error);
    if (how == 3) lockstep::save_state_dict(trainer, path);
  });
  CHECK_FALSE(text.empty());
  CHECK_FALSE(std::filesystem::exists(path));
  for (const std::string& other : trainer.comm().all_gather_bytes(text)) CHECK(other == text);
}

// The last one: it ends with an abort, after which the ranks of this program make no further communicator.
TEST_CASE("a loss that throws on one rank in the last step ends fit on all", "[2+]") {
  auto trainer = late_trainer();
  int step = 0;
  const auto fit = [&] {
    trainer.fit(steps(4), [&](Sequential& model, const auto& batch) {
      if (step++ == 3 && am_culprit()) throw std::logic_error("no such word");
      return squared_error(model, batch);
    });
  };
  if (am_culprit()) {
    CHECK_THROWS_AS(fit(), std::logic_error);
    return;
  }
  try {
    fit();
    FAIL_CHECK("the failure of rank " << culprit() << " was not told");
  } catch (const lockstep::PeerError& error) {
    CHECK(error.failure().cause == culprit());
  }
}

}  // namespace late_check_ranks_test
