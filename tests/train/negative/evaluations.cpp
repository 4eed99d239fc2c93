// Evaluations of a wrong Trainer and of wrong metrics, and a callback of fit that returns a bool: each is told by one sentence, and nothing follows it.
#include "lockstep/train/extras.hpp"
#include "train/negative/common.hpp"

using lockstep::Accuracy;

struct NoExtra {};
struct SumsOfNothing {
  lockstep::Sums operator()(const torch::Tensor& output, const lockstep::Example&) const { return {output}; }
};

void program(const lockstep::World& world) {
  const auto data = three_classes(8);
  Trainer<DistributedSampler, LocalComm> no_model{world};
  const double of_no_model = no_model.evaluate(data, Accuracy{});
  Trainer<TinyNet, DistributedSampler, LocalComm, Fp32, NoExtra> extra_of_nothing{world};
  const double of_nothing = extra_of_nothing.evaluate(data, Accuracy{});

  Trainer<TinyNet, DistributedSampler, LocalComm, Fp32> trainer{world};
  const double of_number = trainer.evaluate(3, Accuracy{});
  const double of_no_metric = trainer.evaluate(data, 3);
  const double of_sums = trainer.evaluate(data, SumsOfNothing{});
  trainer.fit(data, cross_entropy_of, lockstep::OnStep{[](const auto&) { return true; }});
  fmt::print("{}", of_no_model + of_nothing + of_number + of_no_metric + of_sums);
}
