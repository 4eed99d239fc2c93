#include "lockstep/train/trainer.hpp"

#include <ATen/Parallel.h>
#include <algorithm>
#include <limits>
#include <utility>

#include "lockstep/comm/local_comm.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "support/written.hpp"
#include "train/nets.hpp"
#include "train/regression.hpp"

namespace trainer_test {

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

TEST_CASE("training is counted in epochs or in steps, and goes on where it stopped") {
  const auto train = three_classes(40);  // 5 steps an epoch of 8
  std::vector<std::string> told;
  auto watch = [&](auto& trainer) {
    return trainer.fit(train, loss, lockstep::OnEpochStart{[&](const lockstep::EpochPlan& plan) {
                         told.push_back(fmt::format("begin {}/{} of {} steps", plan.epoch + 1, plan.epochs,
                                                    plan.steps.value()));
                       }},
                       lockstep::OnStep{[&](const lockstep::StepReport& report) {
                         told.push_back(fmt::format("{}.{}", report.epoch, report.step));
                         CHECK(report.step_in_epoch < report.steps_in_epoch);
                       }},
                       lockstep::OnEpoch{[&](const lockstep::EpochReport& report) {
                         told.push_back(fmt::format("end {} after {}", report.epoch, report.step));
                         CHECK(report.peak_memory > 0);
                       }});
  };
  SECTION("epochs") {
    auto trainer = LocalTrainer{alone(), {.epochs = 1, .batch_size = 8}};
    watch(trainer);
    CHECK(told == std::vector<std::string>{"begin 1/1 of 5 steps", "0.0", "0.1", "0.2", "0.3", "0.4",
                                           "end 0 after 5"});
    told.clear();
    watch(trainer);
    CHECK(told == std::vector<std::string>{"begin 2/2 of 5 steps", "1.5", "1.6", "1.7", "1.8", "1.9",
                                           "end 1 after 10"});
  }
  SECTION("steps") {
    auto trainer = LocalTrainer{alone(), {.steps = 7, .batch_size = 8}};
    watch(trainer);
    CHECK(told == std::vector<std::string>{"begin 1/2 of 5 steps", "0.0", "0.1", "0.2", "0.3", "0.4",
                                           "end 0 after 5", "begin 2/2 of 2 steps", "1.5", "1.6",
                                           "end 1 after 7"});
    CHECK(trainer.step() == 7);
  }
  SECTION("nothing") {
    auto trainer = LocalTrainer{alone(), {.epochs = 0}};
    const lockstep::EpochReport report = watch(trainer);
    CHECK(told.empty());
    CHECK(std::isnan(report.loss));
    CHECK(report.step == 0);
  }
}

namespace {

template <class Model, class... Given>
auto local(lockstep::TrainerOptions options, Model model, Given... given) {
  return lockstep::Trainer<Model, lockstep::DistributedSampler, lockstep::LocalComm, lockstep::Fp32,
                           Given...>{alone(), options, model, given...};
}

bool equal(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(),
                                            [](const auto& x, const auto& y) { return torch::equal(x, y); });
}

// Trains for some steps and gives the parameters.
template <class T>
std::vector<torch::Tensor> trained(T&& trainer) {
  trainer.fit(three_classes(64), [](auto& net, const auto& batch) {
    return torch::cross_entropy_loss(net.forward(batch.data), batch.target);
  });
  return trainer.model().parameters();
}

// The same of models that are pointers.
template <class T>
std::vector<torch::Tensor> trained_pointer(T&& trainer) {
  trainer.fit(three_classes(64), cross_entropy_of);
  return trainer.model()->parameters();
}

// Trains on the loss times two and halves the gradients: the same steps.
struct Doubled {
  template <class Forward>
  auto forward(Forward&& forward) {
    return forward();
  }
  torch::Tensor scale(const torch::Tensor& loss) const { return loss * 2; }
  bool step(torch::optim::Optimizer& optimizer) const {
    for (auto& group : optimizer.param_groups())
      for (auto& parameter : group.params()) parameter.mutable_grad().mul_(0.5);
    optimizer.step();
    return true;
  }
};

}  // namespace

TEST_CASE("a model is a holder, a module or a shared pointer, made here or given") {
  const lockstep::TrainerOptions options{.steps = 5, .batch_size = 16, .lr = 0.1, .seed = 7};
  const auto expected = trained_pointer(LocalTrainer{alone(), options});
  CHECK(equal(expected, trained(lockstep::Trainer<TinyNetImpl, lockstep::DistributedSampler,
                                                  lockstep::LocalComm, lockstep::Fp32>{alone(), options})));
  torch::manual_seed(7);
  CHECK(equal(expected, trained(local(options, TinyNetImpl()))));
  torch::manual_seed(7);
  CHECK(equal(expected, trained_pointer(local(options, std::make_shared<TinyNetImpl>()))));
  torch::manual_seed(7);
  TinyNet given;
  CHECK(equal(expected, trained_pointer(local(options, given))));
  CHECK(equal(expected, given->parameters()));  // a holder is shared, not copied
}

TEST_CASE("the seed decides the model, and what is drawn afterwards") {
  LocalTrainer a{alone(), {.seed = 3}};
  const auto after_a = torch::rand(3);
  LocalTrainer b{alone(), {.seed = 3}};
  const auto after_b = torch::rand(3);
  LocalTrainer c{alone(), {.seed = 4}};
  CHECK(equal(a.model()->parameters(), b.model()->parameters()));
  CHECK(!equal(a.model()->parameters(), c.model()->parameters()));
  CHECK(torch::equal(after_a, after_b));
}

TEST_CASE("several trainers live side by side") {
  const lockstep::TrainerOptions options{.epochs = 1, .batch_size = 16, .seed = 5};
  auto step = [](LocalTrainer& trainer) { trainer.fit(three_classes(64), loss); };
  LocalTrainer a{alone(), options}, b{alone(), options};
  step(a);
  step(b);
  step(a);
  CHECK(!equal(a.model()->parameters(), b.model()->parameters()));
  step(b);
  CHECK(equal(a.model()->parameters(), b.model()->parameters()));
}

TEST_CASE("the optimizer is made over each parameter once") {
  struct TiedImpl : TinyNetImpl {
    TiedImpl() { register_parameter("again", hidden->weight); }
  };
  std::size_t given = 0;
  auto trainer = local({.steps = 2, .seed = 1}, std::make_shared<TiedImpl>(),
                       lockstep::MakeOptimizer{[&](const std::vector<torch::Tensor>& parameters) {
                         given = parameters.size();
                         return std::make_unique<torch::optim::Adam>(parameters, 1e-2);
                       }});
  CHECK(given == 6);
  CHECK(trainer.model()->parameters().size() == 7);
  CHECK(dynamic_cast<torch::optim::Adam*>(&trainer.optimizer()) != nullptr);
}

TEST_CASE("an optimizer's groups may be chosen by the parameters' names") {
  std::vector<std::string> names;
  auto trainer = local(
      {.steps = 1, .seed = 1}, TinyNet(),
      lockstep::MakeOptimizer{[&](const std::vector<lockstep::NamedTensor>& parameters) {
        std::vector<torch::Tensor> decayed, others;
        for (const auto& [name, tensor] : parameters) {
          names.push_back(name);
          (tensor.dim() > 1 && name.find("norm") == std::string::npos ? decayed : others).push_back(tensor);
        }
        std::vector<torch::optim::OptimizerParamGroup> groups;
        groups.emplace_back(decayed, std::make_unique<torch::optim::SGDOptions>(
                                         torch::optim::SGDOptions(0.1).weight_decay(0.5)));
        groups.emplace_back(others);
        return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.1));
      }});
  CHECK(names == std::vector<std::string>{"hidden.weight", "hidden.bias", "norm.weight", "norm.bias",
                                          "last.weight", "last.bias"});
  CHECK(trainer.optimizer().param_groups().at(0).params().size() == 2);
  CHECK(trainer.optimizer().param_groups().at(1).params().size() == 4);
  trainer.fit(three_classes(32), loss);
}

TEST_CASE("a flipped bit anywhere in a checkpoint is refused, or the run goes on alike") {
  const TemporaryFolder folder;
  const auto path = folder / "run.ckpt", again = folder / "again.ckpt";
  const lockstep::TrainerOptions options{.epochs = 1, .batch_size = 8, .seed = 3, .progress = false};
  const auto adam = lockstep::MakeOptimizer{
      [](std::vector<torch::Tensor> parameters) { return lockstep::Adam(std::move(parameters)); }};
  auto saving = local(options, TinyNet(), adam);
  saving.fit(three_classes(32), loss, lockstep::OnStep{[&](const auto& step) {
               if (step.step == 1) saving.save_checkpoint(path);
             }});
  const std::string whole = lockstep::read_file(path);
  auto loading = local(options, TinyNet(), adam);
  loading.load_checkpoint(path);
  loading.save_checkpoint(again);
  REQUIRE(lockstep::read_file(again) == whole);  // what a checkpoint holds is all that a load changes
  std::size_t refused = 0, tried = 0;
  std::vector<std::size_t> bad;
  const auto look = [&](std::size_t where, const std::string& bytes) {
    ++tried;
    lockstep::write_file_atomically(path, bytes);
    try {
      loading.load_checkpoint(path);
    } catch (const lockstep::CheckpointError&) {
      ++refused;
      return;
    }
    loading.save_checkpoint(again);
    if (lockstep::read_file(again) != whole) bad.push_back(where);
  };
  for (std::size_t offset = 0; offset < whole.size(); offset += 131) {
    std::string flipped = whole;
    flipped[offset] = static_cast<char>(flipped[offset] ^ 1 << offset % 8);
    look(offset, flipped);
  }
  CHECK(bad.empty());
  CHECK(refused > tried / 2);
  const std::size_t before = refused;
  for (std::size_t length = 1; length < whole.size(); length += 1013) look(length, whole.substr(0, length));
  CHECK(refused - before == (whole.size() - 2) / 1013 + 1);
}

TEST_CASE("a checkpoint that cannot be loaded changes nothing, and no load takes place inside fit") {
  struct Part {
    bool refuses = false;
    double value = 1;
    void save(torch::serialize::OutputArchive& archive) const { archive.write("value", c10::IValue(value)); }
    void load(torch::serialize::InputArchive& archive) {
      c10::IValue read;
      archive.read("value", read);
      value = read.toDouble();
      if (std::exchange(refuses, false)) throw lockstep::CheckpointError("it does not like this");
    }
  };
  const TemporaryFolder folder;
  const auto adam = lockstep::MakeOptimizer{
      [](std::vector<torch::Tensor> parameters) { return lockstep::Adam(std::move(parameters)); }};
  auto first = local({.batch_size = 8, .seed = 1, .progress = false}, TinyNet(), adam);
  auto second = local({.batch_size = 8, .seed = 2, .progress = false}, TinyNet(), adam);
  first.fit(three_classes(32), loss);
  second.fit(three_classes(32), loss);
  Part one{.value = 5}, two{.value = 3}, three{.refuses = true, .value = 2};
  first.save_checkpoint(folder / "other", one, one);
  second.save_checkpoint(folder / "before", two, three);
  CHECK_THROWS_AS(second.load_checkpoint(folder / "other", two, three), lockstep::CheckpointError);
  CHECK(two.value == 3);
  CHECK(three.value == 2);
  second.save_checkpoint(folder / "after", two, three);
  CHECK(lockstep::read_file(folder / "before") == lockstep::read_file(folder / "after"));

  first.save(folder / "model");
  first.fit(three_classes(32), loss, lockstep::OnEpoch{[&](const auto&) {
              CHECK_THROWS_AS(first.load(folder / "model"), lockstep::UsageError);
            }});
}

TEST_CASE("a checkpoint resumed with other threads is warned of in one line") {
  const TemporaryFolder folder;
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  auto trainer = local({.batch_size = 8, .progress = false}, TinyNet());
  trainer.save_checkpoint(folder / "run");
  CHECK(written(2, [&] { trainer.load_checkpoint(folder / "run"); }).empty());
  at::set_num_threads(2);
  const std::string said = written(2, [&] { trainer.load_checkpoint(folder / "run"); });
  at::set_num_threads(threads);
  CHECK(std::count(said.begin(), said.end(), '\n') == 1);
  CHECK_THAT(said, ContainsSubstring("and this run has 2 intra-op threads"));
}

TEST_CASE("gradients of parameters that the optimizer does not hold do not add up") {
  std::vector<double> seen;
  auto trainer = local({.steps = 3, .batch_size = 32, .seed = 1}, TinyNet(),
                       lockstep::MakeOptimizer{[](const std::vector<torch::Tensor>& parameters) {
                         return lockstep::SGD({parameters.back()}, {.lr = 0});
                       }});
  trainer.fit(three_classes(32), loss, lockstep::OnGradients{[&](const lockstep::Gradients& gradients) {
                seen.push_back(gradients.parameters[0].grad().norm().item<double>());
              }});
  REQUIRE(seen.size() == 3);
  for (const double norm : seen)
    CHECK(norm == Approx(seen[0]).epsilon(1e-4));  // batches differ in their order
}

TEST_CASE("a schedule multiplies the optimizer's rate") {
  std::vector<double> rates;
  lockstep::Trainer trainer{alone(),
                            {.epochs = 2, .batch_size = 32, .lr = 0.5},
                            std::in_place_type<TinyNet>,
                            std::in_place_type<lockstep::LocalComm>,
                            lockstep::RateSchedule{[](std::int64_t epoch, std::int64_t step) {
                              return epoch == 0 ? 1.0 : 1.0 / static_cast<double>(step);
                            }}};
  trainer.fit(three_classes(64), loss, lockstep::OnStep{[&](const auto&) {
                rates.push_back(trainer.optimizer().param_groups()[0].options().get_lr());
              }});
  CHECK(rates == std::vector<double>{0.5, 0.5, 0.25, 0.5 / 3});
}

TEST_CASE("a group that is added to the optimizer follows the schedule from the next epoch on") {
  std::vector<double> rates;
  auto trainer =
      local({.epochs = 3, .batch_size = 32}, TinyNet(),
            lockstep::MakeOptimizer{[](const std::vector<torch::Tensor>& parameters) {
              return torch::optim::SGD(parameters, 0.1);
            }},
            lockstep::RateSchedule{[](std::int64_t epoch, std::int64_t) { return epoch < 2 ? 1.0 : 0.5; }});
  const torch::Tensor more = torch::ones({2}, torch::requires_grad());
  trainer.fit(
      three_classes(64), loss, lockstep::OnStep{[&](const auto& step) {
        if (step.step == 0)
          trainer.optimizer().add_param_group({{more}, std::make_unique<torch::optim::SGDOptions>(0.25)});
        rates.push_back(trainer.optimizer().param_groups().back().options().get_lr());
      }});
  CHECK(rates == std::vector<double>{0.25, 0.25, 0.25, 0.25, 0.125, 0.125});
}

TEST_CASE("a run whose optimizer was given a group goes on with the group's rate") {
  const TemporaryFolder folder;
  const auto train = [&](bool resumes) {
    auto trainer = local({.epochs = 1, .batch_size = 32}, TinyNet(),
                         lockstep::MakeOptimizer{[](const std::vector<torch::Tensor>& parameters) {
                           return torch::optim::SGD(parameters, 0.1);
                         }},
                         lockstep::RateSchedule{[](std::int64_t, std::int64_t) { return 0.5; }});
    trainer.optimizer().add_param_group(
        {{torch::ones({2}, torch::requires_grad())}, std::make_unique<torch::optim::SGDOptions>(0.25)});
    if (resumes) trainer.load_checkpoint(folder / "run");
    trainer.fit(three_classes(64), loss);
    trainer.save_checkpoint(folder / "run");
    return trainer.optimizer().param_groups().back().options().get_lr();
  };
  CHECK(train(false) == 0.125);
  CHECK(train(true) == 0.125);
}

TEST_CASE("policies are told apart by their concepts, in any order") {
  const lockstep::TrainerOptions options{.steps = 3, .seed = 9};
  const auto schedule = lockstep::RateSchedule{[](std::int64_t, std::int64_t) { return 0.5; }};
  const auto sgd = lockstep::MakeOptimizer{[](std::vector<torch::Tensor> parameters) {
    return lockstep::SGD(std::move(parameters), {.lr = 0.1});
  }};
  lockstep::Trainer deduced{alone(),   options,
                            sgd,       lockstep::LocalComm(alone()),
                            schedule,  std::in_place_type<lockstep::EvaluationSampler>,
                            Doubled(), std::in_place_type<TinyNet>};
  lockstep::Trainer<TinyNet, lockstep::EvaluationSampler, lockstep::LocalComm, Doubled,
                    std::remove_const_t<decltype(sgd)>, std::remove_const_t<decltype(schedule)>>
      named{alone(), options, sgd, schedule};
  static_assert(std::same_as<decltype(deduced.precision()), Doubled&>);
  CHECK(equal(trained_pointer(deduced), trained_pointer(named)));
}

TEST_CASE("training is in training mode, whatever the mode before") {
  LocalTrainer trainer{alone(), {.epochs = 2}};
  trainer.model()->eval();
  std::vector<bool> training;
  trainer.fit(
      three_classes(32),
      [&](TinyNet& net, const auto& batch) {
        training.push_back(net->is_training() && net->norm->is_training());
        return torch::cross_entropy_loss(net(batch.data), batch.target);
      },
      lockstep::OnEpoch{[&](const auto&) { trainer.model()->eval(); }});
  CHECK(training == std::vector<bool>{true, true});
}

TEST_CASE("a policy of the user's own takes part") {
  const lockstep::TrainerOptions options{.steps = 3, .lr = 0.1, .seed = 9};
  const auto doubled =
      trained_pointer(lockstep::Trainer<TinyNet, lockstep::DistributedSampler, lockstep::LocalComm, Doubled>{
          alone(), options});
  CHECK(equal(doubled, trained_pointer(LocalTrainer{alone(), options})));
}

TEST_CASE("datasets stay where they are, and may be loaded by threads") {
  struct Counted {
    lockstep::TensorDataset all = three_classes(50);
    Counted() = default;
    Counted(const Counted&) = delete;
    [[nodiscard]] std::size_t size() const { return all.size(); }
    [[nodiscard]] lockstep::Example get(std::size_t i) const { return all.get(i); }
  };
  const Counted dataset;
  auto fit = [&](const auto& data, std::int64_t workers) {
    LocalTrainer trainer{alone(),
                         {.epochs = 2, .batch_size = 8, .lr = 0.1, .seed = 6, .num_workers = workers}};
    trainer.fit(data, loss);
    CHECK(trainer.evaluate(data, lockstep::Accuracy{}) > 0);
    return trainer.model()->parameters();
  };
  const auto expected = fit(dataset.all, 0);
  CHECK(equal(fit(dataset, 0), expected));
  CHECK(equal(fit(dataset, 2), expected));
}

TEST_CASE("an evaluation takes metrics of the output and of the model, and leaves the modes") {
  LocalTrainer trainer{alone(), {}};
  const auto test = three_classes(50);
  trainer.model()->norm->eval();
  const auto [accuracy, own_loss, its_loss] =
      trainer.evaluate(test, lockstep::Accuracy{}, loss, lockstep::CrossEntropy{});
  CHECK(accuracy >= 0);
  CHECK(own_loss == Approx(its_loss));
  CHECK(trainer.model()->is_training());
  CHECK(!trainer.model()->norm->is_training());
  CHECK(torch::GradMode::is_enabled());

  SECTION("also when a metric throws") {
    auto broken = [](const torch::Tensor&, const auto&) -> lockstep::Mean {
      throw std::runtime_error("broken");
    };
    CHECK_THROWS_WITH(trainer.evaluate(test, broken), "broken");
    CHECK(trainer.model()->is_training());
    CHECK(!trainer.model()->norm->is_training());
    CHECK(torch::GradMode::is_enabled());
  }
  SECTION("and nothing to evaluate has no mean") {
    CHECK(std::isnan(
        trainer.evaluate(lockstep::TensorDataset{torch::zeros({0, 6}), torch::zeros({0}, torch::kLong)},
                         lockstep::Accuracy{})));
  }
}

TEST_CASE("micro-batches of a process alone are one batch, whichever form the loss has") {
  const auto data = curve(40);  // 3 steps of 12 samples and one of 4
  const auto start = tanh_network(2, 4, 3);
  auto whole = copy_of(start), micro = copy_of(start), summed = copy_of(start), masked = copy_of(start);
  const auto report =
      local({.epochs = 2, .batch_size = 12, .lr = 0.1, .progress = false}, whole).fit(data, squared_error);
  const lockstep::TrainerOptions accumulated{
      .epochs = 2, .batch_size = 5, .accumulate = 3, .lr = 0.1, .progress = false};
  lockstep::TrainerOptions other = accumulated;
  other.batch_size = 4;
  CHECK(local(other, micro).fit(data, squared_error).step == report.step);
  CHECK(local(other, summed).fit(data, summed_squared_error).loss == Approx(report.loss).epsilon(1e-6));
  CHECK(distance(whole, start) > 1e-3);
  CHECK(distance(micro, whole) < 1e-12);
  CHECK(distance(summed, whole) < 1e-12);

  // Where nothing is counted nothing changes.
  local(accumulated, masked).fit(data, [&](auto& net, const auto& batch) {
    return lockstep::Mean{summed_squared_error(net, batch).sum, 0};
  });
  CHECK(distance(masked, start) == 0);
}

TEST_CASE("bad options and empty data are refused before anything is trained") {
  CHECK_THROWS_AS((LocalTrainer{alone(), {.batch_size = 0}}), lockstep::UsageError);
  const lockstep::TensorDataset empty{torch::zeros({0, 6}), torch::zeros({0}, torch::kLong)};
  for (const lockstep::TrainerOptions& options :
       {lockstep::TrainerOptions{.epochs = 1}, lockstep::TrainerOptions{.steps = 1}})
    CHECK_THROWS_AS((LocalTrainer{alone(), options}.fit(empty, loss)), lockstep::DataError);
  CHECK_NOTHROW((LocalTrainer{alone(), {.epochs = 0}}.fit(empty, loss)));
  // Twice this is no number.
  constexpr auto huge = std::numeric_limits<std::int64_t>::max();
  CHECK(LocalTrainer{alone(), {.batch_size = huge}}.fit(three_classes(8), loss).step == 1);
}

}  // namespace trainer_test
