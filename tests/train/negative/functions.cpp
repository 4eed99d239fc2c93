// Losses, hooks and metrics of a wrong form.
#include "lockstep/data/sampler.hpp"
#include "train/negative/common.hpp"

// A batch whose samples nobody can count, unless the loss does.
struct Uncounted {
  [[nodiscard]] std::size_t size() const { return 8; }
  [[nodiscard]] TinyNet get_batch(c10::ArrayRef<std::size_t>) { return {}; }
};
struct UncountedStream {
  std::optional<TinyNet> next() { return std::nullopt; }
};

// A sampler that is made of nothing that a Trainer has.
struct NamedSampler : lockstep::EvaluationSampler {
  explicit NamedSampler(const char*, const LocalComm& comm) : EvaluationSampler(8, comm) {}
};

// Datasets with a size that does not fit, and callbacks of which one event has a wrong form.
struct UnsureSize : lockstep::TensorDataset {
  using TensorDataset::TensorDataset;
  std::size_t size() { return 8; }  // of a const dataset it cannot be asked
};
struct Final final {
  void on_step(const lockstep::StepReport&) {}
};
struct WrongEpoch {
  void on_step(const lockstep::StepReport&) {}
  void on_epoch(int) {}
};
template <class Wrong>
struct WrongOthers {
  void on_epoch(const lockstep::EpochReport&) {}
  void on_step(const lockstep::StepReport&, int) {}
  void on_gradients(Wrong) {}
  void on_profile(const lockstep::StepReport&) {}
  template <class Plan>
  void on_epoch_start(Plan&, int, int) {}
};

void program(const lockstep::World& world) {
  Trainer<TinyNet, DistributedSampler, LocalComm, Fp32> trainer{world, {.epochs = 1}};
  const auto data = three_classes(8);
  const auto loss = [](TinyNet& net, const auto& batch) { return net(batch.data).sum(); };
  trainer.fit(data, [](const torch::Tensor& output) { return output; });
  trainer.fit(data, [](TinyNet&, const auto&) { return "no loss"; });
  trainer.fit(data, loss, 3);
  trainer.fit(3, loss);
  const UnsureSize unsure(torch::ones({8, 6}), torch::zeros({8}));
  trainer.fit(unsure, loss);
  trainer.fit(data, loss, WrongEpoch{});
  trainer.fit(data, loss, Final{});
  trainer.fit(data, loss, WrongOthers<int>{});
  lockstep::MakeOptimizer{[](const std::vector<torch::Tensor>&) { return 3; }}.make_optimizer({});
  lockstep::RateSchedule{[](std::int64_t) { return 1.0; }}.rate_factor(0, 0);
  (void)trainer.evaluate(data, 3);
  (void)trainer.evaluate(data);
  const auto nothing = [](TinyNet& net, const auto&) { return net->parameters()[0].sum(); };
  trainer.fit(Uncounted{}, nothing);
  trainer.fit(UncountedStream{}, nothing);
  Trainer<TinyNet, NamedSampler, LocalComm, Fp32>{world}.fit(data, loss);
}
