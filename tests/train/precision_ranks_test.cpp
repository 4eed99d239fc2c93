// Training in half precision on several ranks: all step, or none does.
#include <limits>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/grad/hooks/compression_hooks.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/grad/hooks/power_sgd_hook.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/optim/zero_redundancy.hpp"
#include "lockstep/precision/precision.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/trainer.hpp"
#include "support/ranks.hpp"
#include "train/nets.hpp"

namespace precision_ranks_test {

namespace {

const lockstep::MakeOptimizer plain_sgd{
    [](std::vector<torch::Tensor> parameters) { return lockstep::SGD(std::move(parameters), {.lr = 0.1}); }};

// One rank's gradient is infinite in the second step: no rank takes it, and the hook forgets it.
template <class Hook, class Make = decltype(plain_sgd), class... Callbacks>
void check_skips(const Hook& hook, const Make& make = plain_sgd, const Callbacks&... callbacks) {
  const auto& world = test_world();
  const int culprit = world.size() - 1;
  lockstep::TrainerOptions options{.epochs = 1, .batch_size = 4, .progress = false};
  lockstep::Trainer trainer(world, options, std::in_place_type<TinyNet>, lockstep::Fp16({.init_scale = 1024}),
                            hook, make);
  std::int64_t calls = 0;
  const auto bad_once = [&](TinyNet& net, const auto& batch) {
    auto value = cross_entropy_of(net, batch);
    if (calls++ == 1 && world.rank() == culprit)
      value = value + net->last->weight.sum() * std::numeric_limits<double>::infinity();
    return value;
  };
  std::string before;
  const auto report =
      trainer.fit(three_classes(world.size() * 16), bad_once, lockstep::OnStep{[&](const auto& step) {
                    const std::string now = parameter_bytes(*trainer.model());
                    CHECK((now == before) == (step.step == 1));
                    before = now;
                  }},
                  callbacks...);
  CHECK(report.skipped == 1);
  CHECK(trainer.precision().scaler().skipped() == 1);
  CHECK(trainer.precision().scaler().get_scale() == 512);
  for (const torch::Tensor& parameter : trainer.model()->parameters()) {
    const bool finite = torch::isfinite(parameter).all().template item<bool>();
    CHECK(finite);
  }
  for (const auto& other : trainer.comm().all_gather_bytes(std::to_string(report.skipped)))
    CHECK(other == "1");
}

}  // namespace

TEST_CASE("a step that is not finite on one rank is taken by none") {
  check_skips(lockstep::AllReduceHook());
  check_skips(lockstep::PowerSgdHook({.start_iteration = 0, .min_compression_rate = 0.5}));
  check_skips(lockstep::QuantizedHook());
  check_skips(lockstep::NoOpHook());
  // What the ranks agree on is seen by callbacks as the true gradients.
  check_skips(lockstep::NoOpHook(), plain_sgd, lockstep::GradientClip{.max_norm = 1e3});
}

TEST_CASE("a fused step that is not finite on one rank is taken by none") {
  const lockstep::MakeOptimizer fused{[](std::vector<torch::Tensor> parameters) {
    return lockstep::AdamW(std::move(parameters),
                           {.lr = 0.1, .implementation = lockstep::Implementation::fused});
  }};
  check_skips(lockstep::AllReduceHook(), fused);
  check_skips(lockstep::PowerSgdHook({.start_iteration = 0, .min_compression_rate = 0.5}), fused);
  check_skips(lockstep::NoOpHook(), fused, lockstep::GradientClip{.max_norm = 1e3});
  lockstep::CpuComm comm(test_world());
  const lockstep::MakeOptimizer sharded{[&](std::vector<torch::Tensor> parameters) {
    return std::unique_ptr<torch::optim::Optimizer>(
        new lockstep::ZeroRedundancyOptimizer(std::move(parameters), comm, fused.function));
  }};
  check_skips(lockstep::AllReduceHook(), sharded);
}

TEST_CASE("clipping under accumulation and a scaled loss limits the true gradients of the whole step") {
  const auto& world = test_world();
  TinyNet net;
  const lockstep::MakeOptimizer plain{
      [](std::vector<torch::Tensor> parameters) { return lockstep::SGD(std::move(parameters), {.lr = 1}); }};
  lockstep::Trainer trainer(world, {.epochs = 1, .batch_size = 4, .accumulate = 2, .progress = false}, net,
                            lockstep::Fp16({.init_scale = 1024}), plain);
  std::vector<torch::Tensor> before;
  const auto keep = [&] {
    before.clear();
    for (const auto& parameter : net->parameters()) before.push_back(parameter.detach().clone());
  };
  keep();
  int steps = 0;
  trainer.fit(three_classes(world.size() * 24), cross_entropy_of, lockstep::GradientClip{.max_norm = 1e-2},
              lockstep::OnStep{[&](const auto&) {
                double square = 0;
                for (std::size_t i = 0; i < before.size(); ++i)
                  square += (net->parameters()[i] - before[i]).pow(2).sum().template item<double>();
                CHECK(std::sqrt(square) == Approx(1e-2).epsilon(1e-3));  // a rate of 1
                keep();
                ++steps;
              }});
  CHECK(steps == 3);
}

TEST_CASE("a parameter that is not averaged keeps no rank from the others' answer") {
  const auto& world = test_world();
  TinyNet net;
  const lockstep::MakeOptimizer of_all{
      [&](const std::vector<torch::Tensor>&) { return lockstep::SGD(net->parameters(), {.lr = 0.1}); }};
  lockstep::TrainerOptions options{.epochs = 1, .batch_size = 4, .progress = false};
  options.ddp.ignored = {"last.bias"};
  lockstep::Trainer trainer(world, options, net, lockstep::Fp16({.init_scale = 1024}), of_all);
  const auto report = trainer.fit(three_classes(world.size() * 8), [&](TinyNet& model, const auto& batch) {
    const double factor = world.rank() == 0 ? std::numeric_limits<double>::infinity() : 1;
    return cross_entropy_of(model, batch) + model->last->bias.sum() * factor;
  });
  CHECK(report.skipped == 2);
}

TEST_CASE("a step that was given up leaves the scaler as it was") {
  const auto& world = test_world();
  lockstep::Trainer<TinyNet, lockstep::DistributedSampler, lockstep::CpuComm, lockstep::Fp16> trainer(
      world, {.epochs = 1, .batch_size = 4, .progress = false}, lockstep::Fp16({.init_scale = 1024}));
  const auto data = three_classes(world.size() * 8);
  CHECK_THROWS_AS(trainer.fit(data, cross_entropy_of, lockstep::OnGradients{[](const auto&) {
                                throw lockstep::GradientError("enough");
                              }}),
                  lockstep::GradientError);
  CHECK(trainer.fit(data, cross_entropy_of).skipped == 0);
  CHECK(trainer.step() == 2);
}

TEST_CASE("training in half precision learns, and evaluates in it") {
  const auto& world = test_world();
  const auto data = three_classes(240);
  const auto check = [&]<class Precision>(std::type_identity<Precision>, at::ScalarType type) {
    lockstep::Trainer<TinyNet, lockstep::DistributedSampler, lockstep::CpuComm, Precision> trainer(
        world, {.epochs = 12, .batch_size = 240 / world.size() / 5, .lr = 0.3, .seed = 5, .progress = false});
    trainer.fit(data, cross_entropy_of);
    at::ScalarType seen = at::kFloat;
    const auto [accuracy, zero] =
        trainer.evaluate(data, lockstep::Accuracy{}, [&](const torch::Tensor& output, const auto& batch) {
          seen = output.scalar_type();
          return lockstep::Mean{torch::zeros({}), batch.data.size(0)};
        });
    CHECK(accuracy > 0.8);
    CHECK(zero == 0);
    CHECK(seen == type);
  };
  check(std::type_identity<lockstep::Bf16>(), at::kBFloat16);
  check(std::type_identity<lockstep::Fp16>(), at::kHalf);
  check(std::type_identity<lockstep::Tf32>(), at::kFloat);
}

TEST_CASE("a forward that throws leaves tf32") {
  lockstep::Trainer<TinyNet, lockstep::DistributedSampler, lockstep::CpuComm, lockstep::Tf32> trainer(
      test_world(), {.epochs = 1, .batch_size = 2, .accumulate = 2, .progress = false});
  std::int64_t calls = 0;
  const auto throws = [&](TinyNet& net, const auto& batch) {
    CHECK(at::globalContext().float32MatmulPrecision() == at::Float32MatmulPrecision::HIGH);
    if (++calls == 2) throw lockstep::DataError("enough");
    return cross_entropy_of(net, batch);
  };
  CHECK_THROWS_AS(trainer.fit(three_classes(test_world().size() * 8), throws), lockstep::DataError);
  CHECK(at::globalContext().float32MatmulPrecision() == at::Float32MatmulPrecision::HIGHEST);
}

}  // namespace precision_ranks_test
