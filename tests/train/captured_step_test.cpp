// CapturedStep on the CPU, where every step runs eagerly. tests/gpu/training_test.cpp captures.
#include "lockstep/train/captured_step.hpp"

#include <limits>

#include "lockstep/comm/local_comm.hpp"
#include "lockstep/grad/hooks/power_sgd_hook.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/precision/precision.hpp"
#include "lockstep/train/extras.hpp"
#include "support/refuses.hpp"
#include "train/nets.hpp"

namespace captured_step_test {

using lockstep::CapturedStep;
using lockstep::Implementation;

static_assert(lockstep::Capturable<lockstep::Bf16> && lockstep::Capturable<lockstep::AdamW>);
static_assert(!lockstep::Capturable<torch::optim::SGD> && !lockstep::Capturable<lockstep::PowerSgdHook>);

namespace {

const lockstep::World alone;

lockstep::Example batch_of(int step, std::int64_t samples = 4) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(step) + 1);
  const auto data = torch::randn({samples, 6}, generator);
  return {data, data.slice(1, 0, 3).argmax(1)};
}

TinyNet seeded_net() {
  torch::manual_seed(3);
  return TinyNet();
}

lockstep::SGDOptions sgd_options() {
  return {.momentum = 0.9, .implementation = Implementation::fused, .lr_tensor = torch::tensor(0.1)};
}

double rate(int step) {
  return 0.1 / (1 + step);
}

// The same steps by hand, with a precision.
template <class Optimizer, class Precision, class BatchOfStep>
void train_by_hand(TinyNet& net, Optimizer& optimizer, Precision& precision, int steps, BatchOfStep batch,
                   double clip = 0) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    auto data = batch(step);
    precision.scale(precision.forward([&] { return cross_entropy_of(net, data); })).backward();
    optimizer.param_groups()[0].options().set_lr(rate(step));
    if constexpr (lockstep::ScalingPrecision<Precision>)
      if (clip > 0) precision.unscale(optimizer);
    if (clip > 0) lockstep::clip_grad_norm(*net, clip);
    precision.step(optimizer);
  }
}

}  // namespace

TEST_CASE("a captured step makes the parameters of the plain one, with the rates of a schedule") {
  lockstep::LocalComm comm(alone);
  TinyNet net = seeded_net(), by_hand = seeded_net();
  lockstep::SGD optimizer(net->parameters(), sgd_options()), plain(by_hand->parameters(), sgd_options());
  lockstep::Fp32 precision;
  train_by_hand(by_hand, plain, precision, 8, [](int step) { return batch_of(step); });

  std::vector<const void*> places;
  const auto seeing = [&](TinyNet& model, const lockstep::Example& batch) {
    places.push_back(batch.data.const_data_ptr());
    return cross_entropy_of(model, batch);
  };
  CapturedStep step(at::kCPU, net, comm, optimizer, precision, seeing);
  for (int i = 0; i < 8; ++i) {
    auto batch = batch_of(i);
    optimizer.param_groups()[0].options().set_lr(rate(i));
    const torch::Tensor& value = step(batch);
    CHECK(value.numel() == 1);
    CHECK(!value.requires_grad());
  }
  CHECK(step.steps() == 8);
  CHECK(!step.captured());
  CHECK(same_bits(net, by_hand));
  // Every step reads its batch from one place, which is none of the batches' own.
  CHECK(places == std::vector<const void*>(8, places[0]));
}

TEST_CASE("a captured step in half precision scales, clips and skips") {
  lockstep::LocalComm comm(alone);
  const auto batch = [](int step) {
    auto made = batch_of(step);
    if (step == 1 || step == 6) made.data[0][0] = std::numeric_limits<float>::infinity();
    return made;
  };
  // Infinities spoil running statistics, which is not what this is about.
  const auto without_norm = [](TinyNet net) {
    net->norm->options.track_running_stats(false);
    net->norm->running_mean.reset();
    net->norm->running_var.reset();
    net->norm->num_batches_tracked.reset();
    return net;
  };
  TinyNet net = without_norm(seeded_net()), by_hand = without_norm(seeded_net());
  const auto options = [] {
    return lockstep::AdamWOptions{.implementation = Implementation::fused, .lr_tensor = torch::tensor(0.1)};
  };
  lockstep::AdamW optimizer(net->parameters(), options()), plain(by_hand->parameters(), options());
  const lockstep::GradScalerOptions scaling{.init_scale = 1024, .growth_interval = 3};
  lockstep::Fp16 precision(scaling), other(scaling);
  train_by_hand(by_hand, plain, other, 9, batch, 0.5);

  CapturedStep step(at::kCPU, net, comm, optimizer, precision, cross_entropy_of, {.num_warmup_iters = 2},
                    lockstep::AllReduceHook(), lockstep::GradientClip{.max_norm = 0.5});
  for (int i = 0; i < 9; ++i) {
    auto made = batch(i);
    optimizer.param_groups()[0].options().set_lr(rate(i));
    step(made);
  }
  CHECK(precision.scaler().skipped() == 2);
  CHECK(other.scaler().skipped() == 2);
  CHECK(precision.scaler().get_scale() == other.scaler().get_scale());
  const auto parameters = net->parameters(), expected = by_hand->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) CHECK(torch::equal(parameters[i], expected[i]));
}

TEST_CASE("batches that a captured step cannot take are refused, and the next one goes on") {
  lockstep::LocalComm comm(alone);
  TinyNet net = seeded_net();
  lockstep::SGD optimizer(net->parameters(), sgd_options());
  lockstep::Tf32 precision;
  CapturedStep step(at::kCPU, net, comm, optimizer, precision, [](TinyNet& model, const auto& batch) {
    if constexpr (requires { batch.data; })
      return model(batch.data).sum();
    else
      return model(batch).sum();
  });
  for (int i = 0; i < 5; ++i) {
    auto batch = batch_of(i);
    step(batch);
    auto small = batch_of(i, 3);
    refuses<lockstep::UsageError>(
        [&] { step(small); }, "tensor 0 of the batch is [3, 6] float32, and that of the first was [4, 6]");
    lockstep::Example wide(batch.data.to(torch::kDouble), batch.target);
    CHECK_THROWS_AS(step(wide), lockstep::UsageError);
    auto other = batch.data;
    refuses<lockstep::UsageError>([&] { step(other); }, "another kind");
  }
  CHECK(step.steps() == 5);
  CHECK(at::globalContext().float32MatmulPrecision() == at::Float32MatmulPrecision::HIGHEST);
}

TEST_CASE("options that a graph cannot hold are refused before anything is captured") {
  lockstep::LocalComm comm(alone);
  TinyNet net = seeded_net();
  lockstep::Fp32 precision;
  const auto good = [&] { return lockstep::SGD(net->parameters(), sgd_options()); };
  const auto refused = [&](auto optimizer, const char* words, const lockstep::CaptureOptions& options = {},
                           const c10::Device& device = at::kCPU) {
    refuses<lockstep::UsageError>(
        [&] { CapturedStep step(device, net, comm, optimizer, precision, cross_entropy_of, options); },
        words);
  };
  refused(lockstep::SGD(net->parameters(), {.implementation = Implementation::fused}),
          "SGD: group 0 cannot be captured");
  refused(lockstep::Adam(net->parameters(), {.lr_tensor = torch::tensor(0.1)}),
          "Adam: group 0 cannot be captured");
  refused(good(), "num_warmup_iters is 1", {.num_warmup_iters = 1});
  lockstep::CaptureOptions fixed{.num_warmup_iters = 2}, searching;
  fixed.ddp.static_graph = true;
  refused(good(), "give 3 or more with DdpOptions::static_graph", fixed);
  searching.ddp.find_unused_parameters = true;
  refused(good(), "find_unused_parameters", searching);
#ifndef LOCKSTEP_HAS_CUDA
  refused(good(), "built without CUDA", {}, at::Device(at::kCUDA, 0));
#endif
  fixed.num_warmup_iters = 3;
  lockstep::SGD taken = good();
  CapturedStep step(at::kCPU, net, comm, taken, precision, cross_entropy_of, fixed);
  CHECK_THROWS_AS((lockstep::GradientClip{.options = {.error_if_nonfinite = true}}.check_capturable()),
                  lockstep::UsageError);
}

}  // namespace captured_step_test
