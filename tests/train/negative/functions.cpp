// Losses, hooks and metrics of a wrong form.
#include "train/negative/common.hpp"

void program(const lockstep::World& world) {
  Trainer<TinyNet, DistributedSampler, LocalComm, Fp32> trainer{world, {.epochs = 1}};
  const auto data = three_classes(8);
  const auto loss = [](TinyNet& net, const auto& batch) { return net(batch.data).sum(); };
  trainer.fit(data, [](const torch::Tensor& output) { return output; });
  trainer.fit(data, [](TinyNet&, const auto&) { return "no loss"; });
  trainer.fit(data, loss, 3);
  trainer.fit(3, loss);
  lockstep::MakeOptimizer{[](const std::vector<torch::Tensor>&) { return 3; }}.make_optimizer({});
  lockstep::RateSchedule{[](std::int64_t) { return 1.0; }}.rate_factor(0, 0);
  (void)trainer.evaluate(data, 3);
  (void)trainer.evaluate(data);
}
