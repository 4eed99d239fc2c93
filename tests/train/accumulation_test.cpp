// Micro-batches: reduced with the last, Python's arithmetic where they are equal, and a place for the user's
// own work on the gradients of a step.
#include "lockstep/comm/cpu_comm.hpp"
#include "support/ranks.hpp"
#include "train/nets.hpp"
#include "train/regression.hpp"

namespace accumulation_test {

namespace {

using GlooTrainer =
    lockstep::Trainer<TinyNet, lockstep::DistributedSampler, lockstep::CpuComm, lockstep::Fp32>;

// Scales losses and, unless that was done before, undoes it in the gradients.
struct Scaled {
  template <class Forward>
  auto forward(Forward&& forward) const {
    return forward();
  }
  torch::Tensor scale(const torch::Tensor& value) const { return value * 1024; }
  void unscale(torch::optim::Optimizer& optimizer) {
    for (auto& group : optimizer.param_groups())
      for (auto& parameter : group.params()) parameter.mutable_grad().mul_(1.0 / 1024);
    unscaled = true;
  }
  bool step(torch::optim::Optimizer& optimizer) {
    if (!std::exchange(unscaled, false)) unscale(optimizer);
    unscaled = false;
    optimizer.step();
    return true;
  }
  bool unscaled = false;
};

}  // namespace

TEST_CASE(
    "equal micro-batches keep the bits of loss / accumulate and no_sync by hand, a padded tail included") {
  const auto& world = test_world();
  const std::int64_t accumulate = GENERATE(2, 3, 4);
  // Padded: 7 micro-batches of 6 on every rank, the last of them 4.
  const auto train = three_classes(40 * world.size() - world.size() / 2);
  GlooTrainer trainer{world,
                      {.epochs = 2, .batch_size = 6, .accumulate = accumulate, .lr = 0.1, .seed = 3407}};
  std::vector<double> told;
  const auto report =
      trainer.fit(train, cross_entropy_of, lockstep::OnStep{[&](const lockstep::StepReport& step) {
                    CHECK(step.local.size() <= static_cast<std::size_t>(accumulate));
                    CHECK(step.steps_in_epoch == (7 + accumulate - 1) / accumulate);
                    told.push_back(step.loss());
                  }});
  CHECK(report.step == 2 * ((7 + accumulate - 1) / accumulate));

  torch::manual_seed(3407);
  TinyNet net;
  lockstep::CpuComm comm{world};
  lockstep::DistributedDataParallel ddp{net, comm};
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  lockstep::DataLoader loader{
      train, lockstep::DistributedSampler{train.size(), world, {.seed = 3407}}, {.batch_size = 6}};
  std::vector<double> by_hand;
  for (std::size_t epoch = 0; epoch < 2; ++epoch) {
    loader.set_epoch(epoch);
    std::int64_t micro = 0;
    std::vector<std::pair<double, double>> losses;  // sums and counts
    for (auto& batch : loader) {
      const std::int64_t begin = micro / accumulate * accumulate;
      const std::int64_t here = std::min<std::int64_t>(accumulate, 7 - begin);
      const bool last = micro + 1 == begin + here;
      if (micro == begin) {
        optimizer.zero_grad();
        losses.clear();
      }
      // Equal ones are divided by their number; the last step holds the smaller batch of 4.
      const bool tail = begin + here == 7;
      const auto samples = static_cast<double>(tail ? 6 * (here - 1) + 4 : 6 * here);
      const auto size = static_cast<double>(batch.data.size(0));
      const auto backward = [&] {
        auto value = torch::cross_entropy_loss(ddp(batch.data), batch.target);
        losses.emplace_back(value.template item<float>() * size, size);
        if (tail && here > 1)
          value = value / (samples / size);
        else if (here > 1)
          value = value / here;
        ddp.backward(value);
      };
      {
        const auto guard = ddp.no_sync(!last);
        backward();
      }
      if (last) {
        optimizer.step();
        double sum = 0, count = 0;
        for (const auto& [s, c] : losses) {
          sum += s;
          count += c;
        }
        by_hand.push_back(sum / count);
      }
      ++micro;
    }
    CHECK(micro == 7);
  }
  CHECK(told == by_hand);
  CHECK(same_bits(trainer.model(), net));
}

TEST_CASE("a loop of steps counts optimizer steps, not micro-batches") {
  GlooTrainer trainer{test_world(), {.steps = 5, .batch_size = 4, .accumulate = 3, .seed = 1}};
  std::int64_t micros = 0;
  const auto counting = [&](TinyNet& net, const auto& batch) {
    ++micros;
    return cross_entropy_of(net, batch);
  };
  const auto report =
      trainer.fit(three_classes(4 * 3 * 2 * test_world().size()), counting);  // 2 steps an epoch
  CHECK(report.step == 5);
  CHECK(trainer.step() == 5);
  CHECK(micros == 15);
}

TEST_CASE("a gradient hook sees what the optimizer will use, once a step, on every rank alike") {
  const auto& world = test_world();
  const auto data = curve(11 * world.size() + 1);
  const auto start = tanh_network(1, 4, 7);
  const lockstep::TrainerOptions options{
      .epochs = 2, .batch_size = 3, .accumulate = 2, .lr = 0.25, .pad = false, .progress = false};
  auto plain = copy_of(start), halved = copy_of(start), twice = copy_of(start);
  lockstep::Trainer{world, options, plain}.fit(data, squared_error);

  // Half the gradient at twice the rate is the same step, bit for bit.
  lockstep::TrainerOptions fast = options;
  fast.lr = 0.5;
  std::vector<std::int64_t> steps;
  std::string bytes;
  lockstep::Trainer trainer{world, fast, halved};
  const auto report =
      trainer.fit(data, squared_error, lockstep::OnGradients{[&](const lockstep::Gradients& gradients) {
                    REQUIRE(gradients.parameters.size() == 4);
                    REQUIRE(gradients.named_parameters.size() == 4);
                    CHECK(gradients.named_parameters[1].name == "0.bias");
                    steps.push_back(gradients.step);
                    for (const auto& parameter : gradients.parameters) {
                      const auto grad = parameter.grad().contiguous();
                      bytes.append(static_cast<const char*>(grad.const_data_ptr()), grad.nbytes());
                      parameter.grad().mul_(0.5);
                    }
                  }});
  CHECK(static_cast<std::int64_t>(steps.size()) == report.step);
  for (std::size_t i = 0; i < steps.size(); ++i) CHECK(steps[i] == static_cast<std::int64_t>(i));
  CHECK(distance(halved, plain) == 0);
  for (const auto& other : trainer.comm().all_gather_bytes(bytes)) CHECK(other == bytes);

  // Two, in their order: a quarter at four times the rate.
  fast.lr = 1;
  const auto halve = [](const lockstep::Gradients& gradients) {
    for (const auto& parameter : gradients.parameters) parameter.grad().mul_(0.5);
  };
  lockstep::Trainer(world, fast, twice)
      .fit(data, squared_error, lockstep::OnGradients{halve}, lockstep::OnGradients{halve});
  CHECK(distance(twice, plain) == 0);
}

TEST_CASE("a precision that scales its losses shows a gradient hook what they are without the scale") {
  const auto data = curve(6 * test_world().size());
  const auto start = tanh_network(1, 4, 7);
  const lockstep::TrainerOptions options{.epochs = 2, .batch_size = 3, .lr = 0.1, .progress = false};
  auto plain = copy_of(start), scaled = copy_of(start), unseen = copy_of(start);
  std::vector<double> norms, again;
  const auto norm = [](std::vector<double>& into) {
    return lockstep::OnGradients{[&into](const lockstep::Gradients& gradients) {
      into.push_back(gradients.parameters[0].grad().norm().item<double>());
    }};
  };
  lockstep::Trainer{test_world(), options, plain}.fit(data, squared_error, norm(norms));
  using Sequential = torch::nn::Sequential;
  using Trainer = lockstep::Trainer<Sequential, lockstep::DistributedSampler, lockstep::CpuComm, Scaled>;
  Trainer(test_world(), options, scaled).fit(data, squared_error, norm(again));
  Trainer(test_world(), options, unseen).fit(data, squared_error);
  CHECK(norms == again);
  CHECK(distance(scaled, plain) == 0);
  CHECK(distance(unseen, plain) == 0);
}

}  // namespace accumulation_test
