// What cannot be trained on is a typed error on every rank, and nobody is left waiting.
#include <algorithm>
#include <functional>
#include <limits>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/grad/hooks/compression_hooks.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/nn/sync_batch_norm.hpp"
#include "lockstep/train/extras.hpp"
#include "support/ranks.hpp"
#include "support/text_of.hpp"
#include "support/written.hpp"
#include "train/regression.hpp"

namespace bad_input_ranks_test {

namespace {

using Sequential = torch::nn::Sequential;
using Checked = lockstep::Trainer<Sequential, lockstep::DistributedSampler, lockstep::CpuComm, lockstep::Fp32,
                                  lockstep::CheckFinite>;

void says(const std::string& text, const std::string& words) {
  CHECK_THAT(text, ContainsSubstring(words));
}

/// Checks that `work` throws one GradientError with these words on every rank.
template <class Comm, class Work>
void gradient_error(Comm& comm, Work&& work, const std::string& words) {
  const std::string text = text_of<lockstep::GradientError>(work);
  says(text, words);
  for (const auto& other : comm.all_gather_bytes(text)) CHECK(other == text);
}

/// Checks that one line was said, with these words.
void warned(const std::string& said, const std::string& words) {
  CHECK(std::count(said.begin(), said.end(), '\n') == 1);
  says(said, words);
}

struct Enough : std::exception {};  // what a test's own functions throw

/// The last rank's not-a-number in parameter 3 is told on every rank, whatever the hook does with it.
template <class Hook>
void check_nan_of_last_rank() {
  const auto& world = test_world();
  lockstep::Trainer<Sequential, lockstep::DistributedSampler, lockstep::CpuComm, lockstep::Fp32,
                    lockstep::CheckFinite, Hook>
      trainer{world, {.progress = false}, tanh_network(1, 3, 5)};
  const bool last = world.rank() == world.size() - 1;
  const auto fit = [&] {
    trainer.fit(curve(2 * world.size()), [&](Sequential& model, const auto& batch) {
      return squared_error(model, batch) + model->parameters()[3].sum() * (last ? std::nan("") : 0.0);
    });
  };
  gradient_error(trainer.comm(), fit,
                 fmt::format("parameter 3 '2.bias' is not finite in step 0 of epoch 1: rank {} has nan",
                             world.size() - 1));
}

}  // namespace

TEST_CASE("gradients that are not finite are named by rank, parameter and step, the same on every rank") {
  const auto& world = test_world();
  const int culprit = world.size() - 1;
  const double bad =
      GENERATE(std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity());
  const std::int64_t accumulate = GENERATE(1, 2);
  auto net = tanh_network(1, 3, 5);
  Checked trainer{world, {.epochs = 1, .batch_size = 2, .accumulate = accumulate, .progress = false}, net};
  const std::int64_t bad_micro = 2 * accumulate;  // the first of the third step
  std::int64_t micro = 0;
  auto before = copy_of(net);
  // Only the last layer's bias gets it: parameter 3 of 4.
  const auto loss = [&](Sequential& model, const auto& batch) {
    auto value = squared_error(model, batch);
    if (micro++ == bad_micro && world.rank() == culprit) value = value + model->parameters()[3].sum() * bad;
    return value;
  };
  const auto fit = [&] {
    trainer.fit(curve(2 * 4 * accumulate * world.size()), loss,
                lockstep::OnStep{[&](const auto&) { before = copy_of(net); }});
  };
  gradient_error(trainer.comm(), fit,
                 fmt::format("parameter 3 '2.bias' is not finite in step 2 of epoch 1: rank {} has {};",
                             culprit, std::isnan(bad) ? "nan" : "inf"));
  CHECK(distance(net, before) == 0);  // the step was not made
  CHECK(trainer.step() == 2);

  // The next run is a good one.
  micro = 100;
  const auto report = trainer.fit(curve(8 * world.size()), loss);
  CHECK(std::isfinite(report.loss));
}

TEST_CASE("an evaluation of datasets of unequal length is refused on every rank", "[2+]") {
  const auto& world = test_world();
  const int last = world.size() - 1;
  lockstep::Trainer trainer{world, {.progress = false}, tanh_network(1, 3, 5)};
  const auto samples = [](const torch::Tensor& output, const auto&) {
    return lockstep::Mean{output.new_zeros({}), static_cast<double>(output.size(0))};
  };
  says(text_of<lockstep::MismatchError>(
           [&] { trainer.evaluate(curve(world.rank() == last ? 9 : 8), samples); }),
       fmt::format("evaluate has a dataset of 8 samples on rank 0 and of 9 on rank {}: give it", last));
  CHECK(trainer.evaluate(curve(8), samples) == 0);
}

TEST_CASE("a check finds what a hook does not spread, on every rank", "[2+]") {
  check_nan_of_last_rank<lockstep::NoOpHook>();
}

TEST_CASE("a check names the culprit where a hook spreads what is not finite over the bucket", "[2+]") {
  check_nan_of_last_rank<lockstep::QuantizedHook>();
}

TEST_CASE(
    "a loss or a backward that throws on one rank is told to the others, and the next run is a good one") {
  const auto& world = test_world();
  const int culprit = world.size() - 1;
  const std::int64_t accumulate = GENERATE(1, 3);
  const bool counted = GENERATE(false, true);
  const bool in_backward = GENERATE(false, true);
  CAPTURE(accumulate, counted, in_backward);
  lockstep::Trainer trainer{
      world, {.batch_size = 2, .accumulate = accumulate, .progress = false}, tanh_network(1, 3, 5)};
  int calls = 0;
  bool bad = true;
  // The second micro-batch of the culprit throws; where three are accumulated, the reduction comes after it.
  const auto loss = [&](Sequential& model, const auto& batch) {
    const bool throws = bad && ++calls == 2 && world.rank() == culprit;
    if (throws && !in_backward) throw Enough();
    auto error = squared_error(model, batch);
    if (throws) error.register_hook([](at::Tensor) -> at::Tensor { throw Enough(); });
    return error;
  };
  const auto data = curve(12 * world.size());
  const auto fit = [&] {
    if (counted)
      return trainer.fit(data, [&](Sequential& model, const auto& batch) {
        return lockstep::Mean{loss(model, batch), 2};
      });
    return trainer.fit(data, loss);
  };
  if (world.rank() == culprit) {
    CHECK_THROWS_AS(fit(), Enough);
  } else {
    CHECK_THROWS_AS(fit(), lockstep::PeerError);
  }
  bad = false;
  CHECK(std::isfinite(fit().loss));
}

TEST_CASE("a check blames no rank for what it saw in a step that failed", "[2+]") {
  const auto& world = test_world();
  Checked trainer{world, {.batch_size = 2, .accumulate = 2, .progress = false}, tanh_network(1, 3, 5)};
  const bool last = world.rank() == world.size() - 1;
  int calls = 0;
  const auto loss = [&](Sequential& model, const auto& batch) {
    // Rank 0's first micro-batch is not a number; the second never comes, as the last rank fails.
    if (++calls == 2 && last) throw Enough();
    const bool bad = (calls == 1 && world.rank() == 0) || (calls > 2 && last);
    return squared_error(model, batch) + model->parameters()[3].sum() * (bad ? std::nan("") : 0.0);
  };
  const auto fit = [&] { trainer.fit(curve(4 * world.size()), loss); };
  if (last)
    CHECK_THROWS_AS(fit(), Enough);
  else
    CHECK_THROWS_AS(fit(), lockstep::PeerError);
  gradient_error(trainer.comm(), fit, fmt::format(": rank {} has nan;", world.size() - 1));
}

TEST_CASE("finite gradients that overflow together are told so", "[2+]") {
  const auto& world = test_world();
  auto net = tanh_network(1, 3, 5);
  Checked trainer{world, {.progress = false}, net};
  // Each rank's part is scaled by 1 / world before the sum, so the sum of the largest is the largest itself:
  // a loss of sums and counts, divided by less than 1, is what overflows.
  const auto fit = [&] {
    trainer.fit(curve(2 * world.size()), [](Sequential& model, const auto& batch) {
      return lockstep::Mean{squared_error(model, batch) + model->parameters()[3].sum() * 1e308,
                            1e-3 * static_cast<double>(batch.data.size(0))};
    });
  };
  gradient_error(trainer.comm(), fit, "it is finite on each rank, but");
}

TEST_CASE("a check leaves no hook on the model once its trainer is gone") {
  auto net = tanh_network(1, 3, 5);
  {
    Checked trainer{test_world(), {.progress = false}, net};
    trainer.fit(curve(4 * test_world().size()), squared_error);
  }
  const auto data = curve(4);
  auto loss = squared_error(net, lockstep::Example{data.data(), data.target()}) +
              net->parameters()[0].sum() * std::nan("");
  CHECK_NOTHROW(loss.backward());
}

namespace {

struct Unreadable {
  lockstep::TensorDataset all = curve(12 * test_world().size());
  std::function<void()> read;
  [[nodiscard]] std::size_t size() const { return all.size(); }
  [[nodiscard]] lockstep::Example get_batch(c10::ArrayRef<std::size_t> indices) const {
    read();
    return all.get_batch(indices);
  }
};

// Where a program's own functions are called.
const std::vector<std::string> places{"metric",  "dataset",  "OnStep",   "OnGradients",
                                      "OnEpoch", "schedule", "optimizer"};

struct Throwing : torch::optim::SGD {
  Throwing(std::vector<torch::Tensor> parameters, std::function<void()> work)
      : SGD(std::move(parameters), 0.1), work(std::move(work)) {}
  torch::Tensor step(LossClosure closure = nullptr) override {
    work();
    return SGD::step(closure);
  }
  std::function<void()> work;
};

// Calls `at(place)` everywhere.
template <class At>
auto trainer_calling(const At& at) {
  const auto optimizer = lockstep::MakeOptimizer{[at](std::vector<torch::Tensor> parameters) {
    return std::make_unique<Throwing>(std::move(parameters), [at] { at("optimizer"); });
  }};
  const auto schedule = lockstep::RateSchedule{[at](std::int64_t, std::int64_t) {
    at("schedule");
    return 1.0;
  }};
  return lockstep::Trainer{
      test_world(), {.batch_size = 2, .progress = false}, tanh_network(1, 3, 5), optimizer, schedule};
}
template <class Trainer, class At>
void run_calling(Trainer& trainer, const At& at) {
  trainer.evaluate(Unreadable{.read = [&] { at("dataset"); }}, [&](const torch::Tensor& output, const auto&) {
    at("metric");
    return lockstep::Mean{output.sum(), 1};
  });
  trainer.fit(curve(12 * test_world().size()), squared_error,
              lockstep::OnStep{[&](const auto&) { at("OnStep"); }},
              lockstep::OnGradients{[&](const auto&) { at("OnGradients"); }},
              lockstep::OnEpoch{[&](const auto&) { at("OnEpoch"); }});
}

}  // namespace

TEST_CASE("what every rank throws in an evaluation or in a function of the user's ends that call alone") {
  for (const std::string& bad : places) {
    CAPTURE(bad);
    int calls = 0;
    const auto at = [&calls, bad](const std::string& place) {
      if (place == bad && ++calls == 1) throw Enough();
    };
    auto trainer = trainer_calling(at);
    if (bad == "dataset")  // the loader says where
      CHECK_THROWS_AS(run_calling(trainer, at), lockstep::DataError);
    else
      CHECK_THROWS_AS(run_calling(trainer, at), Enough);
    CHECK_NOTHROW(run_calling(trainer, at));
  }
}

TEST_CASE("a loss that is not a number is told once, with the rank and the step that had it first") {
  const auto& world = test_world();
  const int culprit = world.size() - 1;
  const std::int64_t accumulate = GENERATE(1, 2);
  lockstep::Trainer trainer{world,
                            {.epochs = 2, .batch_size = 2, .accumulate = accumulate, .progress = false},
                            tanh_network(1, 3, 5)};
  std::int64_t micro = 0;
  const std::string said = written(2, [&] {
    for (int run = 0; run < 2; ++run)
      trainer.fit(curve(2 * 4 * accumulate * world.size()), [&](Sequential& model, const auto& batch) {
        const bool bad = micro++ == 2 * accumulate && world.rank() == culprit;
        return squared_error(model, batch) * (bad ? std::nan("") : 1.0);
      });
  });
  std::string all;
  for (const std::string& of_rank : trainer.comm().all_gather_bytes(said)) all += of_rank;
  CAPTURE(all);
  warned(all, fmt::format("on rank {} in step 2", culprit));
}

namespace {
// One batch, for ever.
struct Endless {
  std::size_t at = 2 * static_cast<std::size_t>(test_world().rank());
  lockstep::Example batch = curve(8).get_batch(std::vector<std::size_t>{at, at + 1});
  std::optional<lockstep::Example> next() { return batch; }
};
}  // namespace

TEST_CASE("the loss of a stream that never ends is told while it trains") {
  const auto& world = test_world();
  const int culprit = world.size() - 1;
  lockstep::Trainer trainer{world, {.batch_size = 2, .progress = false}, tanh_network(1, 3, 5)};
  std::int64_t calls = 0;
  const auto loss = [&](Sequential& model, const auto& batch) {
    const bool bad = calls++ == 7 && world.rank() == culprit;
    return squared_error(model, batch) * (bad ? std::nan("") : 1.0);
  };
  lockstep::OnStep stop{[](const lockstep::StepReport& report) {
    if (report.step == 300) throw Enough();
  }};
  const std::string said = written(2, [&] { CHECK_THROWS_AS(trainer.fit(Endless(), loss, stop), Enough); });
  warned(said, fmt::format("on rank {} in step {}", world.rank(), world.rank() == culprit ? 7 : 8));
}

TEST_CASE("ranks that read the same samples are warned of, once") {
  struct Batches {
    double first;
    int left = 3;
    std::optional<lockstep::Example> next() {
      if (left-- == 0) return std::nullopt;
      return lockstep::Example{torch::full({2, 3}, first + left, torch::kDouble),
                               torch::zeros({2, 1}, torch::kDouble)};
    }
  };
  const auto& world = test_world();
  for (const bool equal : {true, false}) {
    lockstep::Trainer trainer{world, {.batch_size = 2, .progress = false}, tanh_network(1, 3, 5)};
    const std::string said = written(2, [&] {
      for (int run = 0; run < 2; ++run)
        trainer.fit(Batches{equal ? 0.5 : world.rank()},
                    [](Sequential& model, const auto& batch) { return squared_error(model, batch); });
    });
    if (equal && world.rank() == 1)
      warned(said, "first gradients of ranks 0 and 1 are equal");
    else
      CHECK(said.empty());
  }
}

TEST_CASE("a dataset or a share of no samples") {
  const auto& world = test_world();
  for (const bool pad : {true, false}) {
    const lockstep::TrainerOptions options{.batch_size = 3, .pad = pad, .progress = false};
    lockstep::Trainer trainer{world, options, tanh_network(1, 3, 5)};
    CHECK_THROWS_AS(trainer.fit(curve(0), squared_error), lockstep::DataError);
    // Fewer samples than ranks: one step, or none where the tail is dropped.
    CHECK(trainer.fit(curve(1), squared_error).step == 1);
    if (world.size() == 1) continue;
    lockstep::TrainerOptions dropping = options;
    dropping.drop_last = dropping.pad = true;
    lockstep::Trainer dropped{world, dropping, tanh_network(1, 3, 5)};
    CHECK_THROWS_AS(dropped.fit(curve(1), squared_error), lockstep::DataError);
  }
}

TEST_CASE("a mean over a count of zero is a step that changes nothing; a count that is none is an error") {
  const auto& world = test_world();
  auto net = tanh_network(1, 3, 5);
  const auto start = copy_of(net);
  lockstep::Trainer trainer{world, {.batch_size = 2, .progress = false}, net};
  const auto data = curve(4 * world.size());
  const auto loss = [&](double count) {
    return [count](Sequential& model, const auto& batch) {
      return lockstep::Mean{squared_error(model, batch), count};
    };
  };
  CHECK(trainer.fit(data, loss(0)).step == 2);
  CHECK(distance(net, start) == 0);
  for (const double count : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()})
    CHECK_THROWS_AS(trainer.fit(data, loss(count)), lockstep::UsageError);
  CHECK(distance(net, start) == 0);

  // On one rank alone: the others are told, and the next run is a good one.
  const int culprit = world.size() - 1;
  if (world.rank() == culprit)
    CHECK_THROWS_AS(trainer.fit(data, loss(-1)), lockstep::UsageError);
  else
    CHECK_THROWS_AS(trainer.fit(data, loss(1)), lockstep::PeerError);
  CHECK(std::isfinite(trainer.fit(data, loss(2)).loss));
  CHECK(distance(net, start) > 0);
}

TEST_CASE("a batch of another size than was asked for has no weight, and is refused") {
  struct Filtered {
    lockstep::TensorDataset all = curve(8 * test_world().size());
    bool empty;
    [[nodiscard]] std::size_t size() const { return all.size(); }
    [[nodiscard]] lockstep::Example get_batch(c10::ArrayRef<std::size_t> indices) const {
      return all.get_batch(empty ? indices.slice(0, 0) : indices.slice(1));
    }
  };
  for (const bool empty : {true, false}) {
    lockstep::Trainer trainer{test_world(), {.batch_size = 4, .progress = false}, tanh_network(1, 3, 5)};
    Filtered data{.empty = empty};
    CHECK_THROWS_AS(trainer.fit(data, squared_error), lockstep::DataError);
    // A sum and a count are the data's own.
    const auto report = trainer.fit(data, [](Sequential& model, const auto& batch) {
      return lockstep::Mean{torch::mse_loss(model->forward(batch.data), batch.target, torch::Reduction::Sum),
                            batch.data.size(0)};
    });
    CHECK(std::isnan(report.loss) == empty);
  }
}

TEST_CASE("batch norm over all ranks is refused where some of them have a batch less", "[2+]") {
  const auto& world = test_world();
  const auto make = [&](bool pad) {
    Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 1));
    net->to(torch::kDouble);
    auto trainer = std::make_unique<
        lockstep::Trainer<Sequential, lockstep::DistributedSampler, lockstep::CpuComm, lockstep::Fp32>>(
        world, lockstep::TrainerOptions{.epochs = 1, .batch_size = 2, .pad = pad, .progress = false}, net);
    lockstep::convert_sync_batchnorm(trainer->model(), trainer->comm());
    return trainer;
  };
  // Two samples for each rank, and a third for rank 0: a batch of its own.
  const auto uneven = curve(2 * world.size() + 1);
  const auto uneven_trainer = make(false);
  says(text_of<lockstep::UsageError>([&] { uneven_trainer->fit(uneven, squared_error); }), "pad = true");
  CHECK(make(true)->fit(uneven, squared_error).step == 2);
  CHECK(make(false)->fit(curve(2 * world.size()), squared_error).step == 1);
}

TEST_CASE("batch norm over all ranks ends on every rank where one rank's stream runs out first", "[2+]") {
  const auto& world = test_world();
  struct Batches {
    int left;
    std::optional<lockstep::Example> next() {
      if (left-- == 0) return std::nullopt;
      return lockstep::Example{torch::randn({2, 3}, torch::kDouble), torch::randn({2, 1}, torch::kDouble)};
    }
  };
  const auto steps_of = [&](int batches, std::int64_t accumulate) {
    Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 1));
    net->to(torch::kDouble);
    lockstep::Trainer<Sequential, lockstep::DistributedSampler, lockstep::CpuComm, lockstep::Fp32> trainer(
        world, {.epochs = 1, .batch_size = 2, .accumulate = accumulate, .progress = false}, net);
    lockstep::convert_sync_batchnorm(trainer.model(), trainer.comm());
    return trainer.fit(Batches{batches}, squared_error).step;
  };
  const bool last = world.rank() == world.size() - 1;
  CHECK(steps_of(3, 1) == 3);
  CHECK(steps_of(3, 2) == 2);
  const auto ends = [&](int batches, std::int64_t accumulate, const char* where) {
    says(text_of<lockstep::DataError>([&] { steps_of(batches, accumulate); }),
         fmt::format("{} on rank {}", where, world.size() - 1));
  };
  ends(last ? 2 : 3, 1, "exhausted");
  ends(last ? 4 : 3, 2, "within a step");
}

}  // namespace bad_input_ranks_test
