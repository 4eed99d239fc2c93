// Evaluations of a wrong Trainer and of wrong metrics, and a callback of fit that returns a bool: each is told by one sentence, and nothing follows it.
#include "lockstep/train/extras.hpp"
#include "lockstep/train/named_metrics.hpp"
#include "train/negative/common.hpp"

using lockstep::Accuracy;
using lockstep::named;

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
  const double half_named = trainer.evaluate(data, named<"accuracy">(Accuracy{}), Accuracy{});
  const double same = trainer.evaluate(data, named<"accuracy">(Accuracy{}), named<"accuracy">(Accuracy{}));
  const auto results = trainer.evaluate(data, named<"accuracy">(Accuracy{}), named<"of all">(Accuracy{}));
  const double misspelt = get<"acuracy">(results);
  trainer.fit(data, cross_entropy_of, lockstep::OnStep{[](const auto&) { return true; }});
  fmt::print("{}",
             of_no_model + of_nothing + of_number + of_no_metric + of_sums + half_named + same + misspelt);
}
