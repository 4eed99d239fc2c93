#include <unistd.h>

#include <filesystem>
#include <map>
#include <string>
#include <tuple>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/comm/local_comm.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/grad/hooks/power_sgd_hook.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/optim/averaging.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/optim/zero_redundancy.hpp"
#include "lockstep/precision/precision.hpp"
#include "lockstep/train/trainer.hpp"
#include "support/mib.hpp"
#include "support/ranks.hpp"
#include "support/text_of.hpp"
#include "train/common_folder.hpp"
#include "train/nets.hpp"

namespace checkpoint_ranks_test {

namespace {

namespace fs = std::filesystem;

// With what a run must not forget: running statistics, dropout's draws, several buckets.
struct DropNetImpl : torch::nn::Module {
  DropNetImpl()
      : first(register_module("first", torch::nn::Linear(6, 32))),
        norm(register_module("norm", torch::nn::BatchNorm1d(32))),
        middle(register_module("middle", torch::nn::Linear(32, 32))),
        last(register_module("last", torch::nn::Linear(32, 3))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = torch::dropout(torch::relu(norm(first(x))), 0.2, is_training());
    return last(torch::relu(middle(y)));
  }
  torch::nn::Linear first;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear middle, last;
};
TORCH_MODULE(DropNet);

auto loss = [](auto& net, const auto& batch) {
  return torch::cross_entropy_loss(net->forward(batch.data), batch.target);
};

std::string bytes_of(const torch::nn::Module& module) {
  std::string bytes;
  for (const auto& list : {lockstep::unique_parameters(module), lockstep::unique_buffers(module)})
    for (const auto& item : list)
      bytes.append(static_cast<const char*>(item.tensor.const_data_ptr()), item.tensor.nbytes());
  return bytes;
}

lockstep::TrainerOptions three_epochs(std::int64_t workers = 0) {
  lockstep::TrainerOptions options{.epochs = 3,
                                   .batch_size = 4,
                                   .accumulate = 2,
                                   .lr = 0.05,
                                   .seed = 11,
                                   .num_workers = workers,
                                   .progress = false};
  options.ddp.bucket_cap_mb = lockstep_test::mib({2048});
  return options;
}

constexpr std::int64_t steps_an_epoch = 4;
lockstep::TensorDataset samples_for(const lockstep::World& world) {
  // The last step of an epoch has one micro-batch, and a short one.
  return three_classes(world.size() * (8 * (steps_an_epoch - 1) + 3));
}

// What a run ends with: model, loss of the last epoch, and the average.
using Outcome = std::tuple<std::string, double, std::string, std::int64_t, std::int64_t>;

// Trains with a trainer that `make()` makes, and saves after some step on the way, and at the end of the
// second epoch; then a new one goes on from each. All must end alike, bit for bit.
template <class Make>
void check_resumes(const Make& make, std::int64_t saved_step) {
  const auto& world = test_world();
  const CommonFolder folder(world);
  const fs::path inside_epoch = folder / "inside-epoch", epoch_end = folder / "epoch-end";
  const auto data = samples_for(world);
  const auto average_of = [](auto& trainer) {
    return lockstep::MovingAverage(*trainer.model(), {.decay = 0.9});
  };
  const auto finish = [&](auto& trainer, auto& average, auto&&... hooks) -> Outcome {
    const auto report = trainer.fit(data, loss, lockstep::OnStep{[&](const auto& step) {
                                      average.update();
                                      (hooks(step), ...);
                                    }},
                                    lockstep::OnEpoch{[&](const auto& done) {
                                      if (sizeof...(hooks) > 0 && done.epoch == 1)
                                        trainer.save_checkpoint(epoch_end, average);
                                    }});
    std::string averages;
    for (const auto& tensor : average.tensors())
      averages.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
    return {bytes_of(*trainer.model()), report.loss, averages, trainer.epoch(), trainer.step()};
  };

  auto whole = make();
  auto whole_average = average_of(*whole);
  const Outcome expected = finish(*whole, whole_average);
  CHECK(std::get<3>(expected) == 3);
  CHECK(std::get<4>(expected) == 3 * steps_an_epoch);

  auto saving = make();
  auto saving_average = average_of(*saving);
  CHECK(finish(*saving, saving_average, [&](const auto& step) {
          if (step.step == saved_step) saving->save_checkpoint(inside_epoch, saving_average);
        }) == expected);

  for (const fs::path& path : {inside_epoch, epoch_end}) {
    auto resumed = make();
    auto average = average_of(*resumed);
    torch::manual_seed(99);  // whatever was drawn in between
    resumed->load_checkpoint(path, average);
    resumed->save_checkpoint(path, average);  // what was loaded, unchanged
    resumed->load_checkpoint(path, average);
    CHECK(resumed->step() == (path == epoch_end ? 2 * steps_an_epoch : saved_step + 1));
    CHECK(finish(*resumed, average) == expected);
  }
  whole->comm().barrier();
  if (world.rank() == 0) fs::remove(epoch_end);
}

template <class... Extras>
auto maker(lockstep::TrainerOptions options, const Extras&... extras) {
  if ((lockstep::OptimizerFactory<Extras> || ...)) options.lr.reset();  // it has a rate of its own
  return [options, extras...] {
    return std::make_unique<lockstep::Trainer<DropNet, Extras...>>(test_world(), options, extras...);
  };
}

using AnyOptimizer = std::unique_ptr<torch::optim::Optimizer>;

// A maker of trainers of two steps with the optimizer that `plain` makes, or a sharded one around it.
template <class Plain>
auto maker_of(Plain plain, lockstep::CpuComm& comm, bool sharded) {
  return maker({.steps = 2, .batch_size = 4, .progress = false},
               lockstep::MakeOptimizer{[=, &comm](std::vector<torch::Tensor> p) {
                 return sharded ? AnyOptimizer(new lockstep::ZeroRedundancyOptimizer(p, comm, plain))
                                : plain(p);
               }});
}

const auto momentum = lockstep::MakeOptimizer{[](std::vector<torch::Tensor> parameters) {
  return lockstep::SGD(std::move(parameters), {.lr = 0.05, .momentum = 0.9});
}};
const auto adam = lockstep::MakeOptimizer{[](std::vector<torch::Tensor> parameters) {
  return lockstep::Adam(std::move(parameters), {.lr = 0.01});
}};
const auto torch_adam = lockstep::MakeOptimizer{[](std::vector<torch::Tensor> parameters) {
  return std::make_unique<torch::optim::Adam>(std::move(parameters), torch::optim::AdamOptions(0.01));
}};

std::string error_of(const auto& check) {
  return text_of<lockstep::Error>(check);
}

/// Checks that each rank is told the same, with these words.
void told(lockstep::CpuComm& comm, const std::string& said, const std::string& words) {
  CHECK_THAT(said, ContainsSubstring(words));
  for (const auto& other : comm.all_gather_bytes(said)) CHECK(other == said);
}

}  // namespace

TEST_CASE("a run that goes on from a checkpoint ends at the bits of one that never stopped") {
  SECTION("from the first step, before buckets were rebuilt") {
    check_resumes(maker(three_epochs(), momentum), 0);
  }
  SECTION("from the midst of an epoch, with workers that load ahead") {
    check_resumes(maker(three_epochs(2), momentum), steps_an_epoch + 1);
  }
  SECTION("from the last step of an epoch") {
    check_resumes(maker(three_epochs(), adam), steps_an_epoch - 1);
  }
  SECTION("with an optimizer of LibTorch's") {
    check_resumes(maker(three_epochs(), torch_adam), 2);
  }
  SECTION("with a schedule") {
    const auto falling =
        lockstep::RateSchedule{[](std::int64_t, std::int64_t step) { return 1.0 / (1 + step); }};
    check_resumes(maker(three_epochs(), momentum, falling), 5);
  }
  SECTION("with a hook that keeps the errors of each rank") {
    check_resumes(maker(three_epochs(), adam,
                        lockstep::PowerSgdHook({.matrix_approximation_rank = 2, .start_iteration = 2})),
                  steps_an_epoch + 2);
  }
  SECTION("in half precision, with what the scaler has learnt") {
    using Momentum = std::remove_const_t<decltype(momentum)>;
    auto options = three_epochs();
    options.lr.reset();
    const auto half = [&] {
      return std::make_unique<lockstep::Trainer<DropNet, lockstep::Fp16, Momentum>>(
          test_world(), options, lockstep::Fp16({.init_scale = 1e9, .growth_interval = 2}), momentum);
    };
    check_resumes(half, 5);
  }
  SECTION("with buffers that each rank has of its own") {
    auto options = three_epochs();
    options.ddp.broadcast_buffers = false;
    check_resumes(maker(options, momentum), 2);
  }
}

TEST_CASE("a checkpoint holds a state that was spread over the ranks") {
  const auto& world = test_world();
  lockstep::CpuComm comm(world);
  const auto sharded = lockstep::MakeOptimizer{[&](std::vector<torch::Tensor> parameters) {
    const auto inside = [](std::vector<torch::Tensor> all) {
      return lockstep::Adam(std::move(all), {.lr = 0.01});
    };
    return std::unique_ptr<torch::optim::Optimizer>(
        new lockstep::ZeroRedundancyOptimizer(std::move(parameters), comm, inside));
  }};
  check_resumes(maker(three_epochs(), sharded), 6);
}

TEST_CASE("a part of each rank's own comes back on its rank, and a resumed epoch is told to be one") {
  struct Counter {
    std::int64_t value;
    void save(torch::serialize::OutputArchive& archive) const { archive.write("value", c10::IValue(value)); }
    void load(torch::serialize::InputArchive& archive) {
      c10::IValue read;
      archive.read("value", read);
      value = read.toInt();
    }
  };
  const auto& world = test_world();
  const CommonFolder folder(world);
  const auto make = [&] { return lockstep::Trainer{world, three_epochs(), DropNet()}; };
  const auto data = three_classes(48 * world.size());
  auto saving = make();
  Counter own{100 + world.rank()}, common{7 + world.rank()};
  saving.fit(data, loss, lockstep::OnStep{[&](const auto& step) {
               if (step.step == 1) saving.save_checkpoint(folder / "run", common, lockstep::PerRank{own});
             }});
  auto resumed = make();
  own.value = common.value = 0;
  CHECK_THROWS_AS(resumed.load_checkpoint(folder / "run", common), lockstep::CheckpointError);
  resumed.load_checkpoint(folder / "run", common, lockstep::PerRank{own});
  CHECK(own.value == 100 + world.rank());
  CHECK(common.value == 7);
  std::vector<bool> epochs;
  resumed.fit(data, loss, lockstep::OnEpochStart{[&](const auto& plan) { epochs.push_back(plan.resumed); }});
  CHECK(epochs == std::vector<bool>{true, false, false});
  CHECK(bytes_of(*resumed.model()) == bytes_of(*saving.model()));

  if (world.size() == 1) return;
  lockstep::CpuComm whole{world};
  auto first = whole.new_group({0});
  if (!first) return;
  lockstep::Trainer alone{world, three_epochs(), DropNet(), std::move(*first)};
  CHECK_THROWS_AS(alone.load_checkpoint(folder / "run", common, lockstep::PerRank{own}),
                  lockstep::CheckpointError);
}

TEST_CASE("one process goes on in the order of Python's RandomSampler", "[alone]") {
  const auto& world = test_world();
  const auto data = three_classes(49);
  const fs::path path = fs::temp_directory_path() / fmt::format("lockstep-checkpoint-random-{}", ::getpid());
  const auto make = [&] {
    return lockstep::Trainer<DropNet, lockstep::RandomSampler, lockstep::LocalComm>(
        world, {.epochs = 2, .batch_size = 7, .lr = 0.05, .seed = 3, .progress = false});
  };
  auto saving = make();
  saving.fit(data, loss, lockstep::OnStep{[&](const auto& step) {
               if (step.step == 10) saving.save_checkpoint(path);
             }});
  auto resumed = make();
  resumed.load_checkpoint(path);
  resumed.fit(data, loss);
  CHECK(bytes_of(*saving.model()) == bytes_of(*resumed.model()));
  CHECK(resumed.step() == 14);
  fs::remove(path);
}

TEST_CASE("other numbers of ranks lose no sample of the epoch and see none twice", "[2+]") {
  const auto& world = test_world();
  const CommonFolder folder(world);
  const fs::path file = folder / "checkpoint";
  const std::int64_t length = 12 * world.size() + 5;
  const lockstep::TensorDataset data{torch::ones({length, 2}), torch::arange(length)};
  std::vector<std::int64_t> seen;
  const auto note = [&](torch::nn::Linear& model, const auto& batch) {
    for (std::int64_t i = 0; i < batch.target.size(0); ++i)
      seen.push_back(batch.target[i].template item<std::int64_t>());
    return model(batch.data).mean();
  };
  const lockstep::TrainerOptions options{
      .epochs = 1, .batch_size = 3, .lr = 0.1, .pad = false, .progress = false};
  lockstep::Trainer all(world, options, torch::nn::Linear(2, 1));
  std::size_t before = 0;
  all.fit(data, note, lockstep::OnStep{[&](const auto& step) {
            if (step.step != 1) return;
            all.save_checkpoint(file);
            before = seen.size();
          }});
  seen.resize(before);

  std::vector<int> fewer(static_cast<std::size_t>(world.size() - 1));
  for (std::size_t i = 0; i < fewer.size(); ++i) fewer[i] = static_cast<int>(i);
  if (auto group = all.comm().new_group(fewer)) {
    lockstep::Trainer<torch::nn::Linear, lockstep::DistributedSampler, lockstep::CpuComm, lockstep::Fp32>
        some(world, options, torch::nn::Linear(2, 1), std::move(*group));
    some.load_checkpoint(file);
    const auto report = some.fit(data, note);
    CHECK(some.epoch() == 1);
    CHECK(report.step == some.step());
    CHECK(std::isfinite(report.loss));
  }
  std::map<std::int64_t, int> times;
  for (const auto& bytes : all.comm().all_gather_bytes(
           {reinterpret_cast<const char*>(seen.data()), seen.size() * sizeof(std::int64_t)})) {
    std::vector<std::int64_t> of_rank(bytes.size() / sizeof(std::int64_t));
    std::memcpy(of_rank.data(), bytes.data(), bytes.size());
    for (const std::int64_t sample : of_rank) ++times[sample];
  }
  CHECK(times.size() == static_cast<std::size_t>(length));
  for (const auto& [sample, count] : times) CHECK(count == 1);
}

namespace {
// Batches of other sizes on other ranks, drawn by the epoch.
struct DrawnBatches {
  std::int64_t rank;
  std::vector<lockstep::Example> batches = {};
  std::size_t next_batch = 0;
  void set_epoch(std::size_t epoch) {
    batches.clear();
    next_batch = 0;
    for (std::int64_t i = 0; i < 7; ++i) {
      const auto data =
          three_classes(2 + (i + rank) % 3, epoch * 100 + static_cast<std::uint64_t>(10 * rank + i));
      batches.push_back({data.data(), data.target()});
    }
  }
  std::optional<lockstep::Example> next() {
    if (next_batch == batches.size()) return std::nullopt;
    return batches[next_batch++];
  }
};
}  // namespace

TEST_CASE("a stream that can be read again goes on where it stood") {
  const auto& world = test_world();
  const CommonFolder folder(world);
  const fs::path file = folder / "checkpoint";
  const auto run = [&](std::int64_t save_at, bool load) {
    lockstep::Trainer trainer(
        world, {.epochs = 2, .batch_size = 1, .accumulate = 2, .lr = 0.05, .seed = 4, .progress = false},
        DropNet());
    if (load) trainer.load_checkpoint(file);
    DrawnBatches stream{world.rank()};
    const auto report = trainer.fit(stream, loss, lockstep::OnStep{[&](const auto& step) {
                                      if (step.step == save_at) trainer.save_checkpoint(file);
                                    }});
    return std::tuple(bytes_of(*trainer.model()), report.loss, trainer.step());
  };
  torch::manual_seed(8);
  const auto whole = run(5, false);
  CHECK(run(-1, true) == whole);
}

TEST_CASE("what does not fit a checkpoint is said on every rank, and the model stays as it was") {
  const auto& world = test_world();
  const CommonFolder folder(world);
  const fs::path file = folder / "checkpoint";
  const auto data = samples_for(world);
  auto make = maker(three_epochs(), adam);
  auto trainer = make();
  trainer->fit(data, loss, lockstep::OnStep{[&](const auto& step) {
                 if (step.step == 5) trainer->save_checkpoint(file);
               }});
  auto& comm = trainer->comm();
  const auto before = bytes_of(*trainer->model());
  const auto refused = [&](const auto& check, const std::string& text) { told(comm, error_of(check), text); };
  const auto cut = [&](std::uintmax_t bytes) {
    comm.barrier();
    if (world.rank() == 0) fs::resize_file(file, bytes);
    comm.barrier();
  };

  refused([&] { trainer->load_checkpoint("/nowhere/at/all"); }, "could not read '/nowhere/at/all'");
  refused([&] { trainer->save_checkpoint("/nowhere/at/all"); }, "could not write");
  {
    lockstep::Trainer other(world, three_epochs(), TinyNet());
    refused([&] { other.load_checkpoint(file); }, "does not fit the model");
  }
  {
    auto other = maker(three_epochs(), momentum)();
    refused([&] { other->load_checkpoint(file); }, "SGD");
  }
  {
    auto options = three_epochs();
    options.seed = 12;
    auto other = maker(options, adam)();
    other->load_checkpoint(file);
    refused([&] { other->fit(data, loss); }, "the saved sampler has seed 11 and this one 12");
  }
  {
    lockstep::MovingAverage average(*trainer->model());
    refused([&] { trainer->load_checkpoint(file, average); }, "part_0");
  }
  // The model of a checkpoint can be had alone.
  {
    lockstep::Trainer other(world, three_epochs(), DropNet());
    other.load(file);
    auto resumed = make();
    resumed->load_checkpoint(file);
    CHECK(bytes_of(*other.model()) == bytes_of(*resumed->model()));
    CHECK(bytes_of(*other.model()) != before);
  }
  cut(fs::file_size(file) / 2);
  refused([&] { trainer->load_checkpoint(file); }, "damaged or cut short");
  trainer->save(file);
  refused([&] { trainer->load_checkpoint(file); }, "it is no checkpoint of a Trainer");
  CHECK(bytes_of(*trainer->model()) == before);

  refused(
      [&] {
        trainer->fit(data, loss, lockstep::OnStep{[&](const auto&) { trainer->load_checkpoint(file); }});
      },
      "inside fit");
  refused(
      [&] {
        trainer->fit(data, loss, lockstep::OnGradients{[&](const auto&) { trainer->save_checkpoint(file); }});
      },
      "called during a step");
}

TEST_CASE("a checkpoint that does not fit leaves the optimizer and all else of the trainer as they were") {
  const auto& world = test_world();
  const CommonFolder folder(world);
  const fs::path file = folder / "checkpoint";
  const auto data = samples_for(world);
  struct Unloadable {
    void save(torch::serialize::OutputArchive& archive) const { archive.write("part", c10::IValue(1)); }
    void load(torch::serialize::InputArchive&) { throw std::length_error("no such length"); }
  } unloadable;
  lockstep::CpuComm comm(world);
  for (const bool torchs : {false, true})
    for (const bool sharded : {false, true}) {
      const auto plain = [torchs](std::vector<torch::Tensor> p) {
        return torchs ? AnyOptimizer(new torch::optim::Adam(p)) : AnyOptimizer(new lockstep::Adam(p));
      };
      const auto make = maker_of(plain, comm, sharded);
      // The end of a run that loads `file`, unless `error` is empty, after `fits` times two steps, and goes on.
      const auto end_of = [&](int fits, const std::string& error) {
        auto trainer = make();
        for (int i = 0; i < fits; ++i) trainer->fit(data, loss);
        if (!error.empty())
          told(trainer->comm(), error_of([&] { trainer->load_checkpoint(file, unloadable); }), error);
        CHECK(trainer->step() == 2 * fits);
        trainer->fit(data, loss);
        return bytes_of(*trainer->model());
      };
      const std::string fresh = end_of(0, ""), later = end_of(1, "");
      auto saving = make();
      saving->fit(data, loss);
      saving->save_checkpoint(file, unloadable);
      CHECK(end_of(0, "no such length") == fresh);
      CHECK(end_of(1, "no such length") == later);
      if (sharded) continue;
      auto& state = *saving->optimizer().state().at(saving->model()->parameters()[0].unsafeGetTensorImpl());
      for (const auto& value : {torch::Tensor(), torch::ones({1}), torch::ones({32, 6}, torch::kLong)}) {
        CAPTURE(torchs, value.defined());
        if (torchs)
          static_cast<torch::optim::AdamParamState&>(state).exp_avg(value);
        else
          static_cast<lockstep::AdamState&>(state).exp_avg = value;
        saving->save_checkpoint(file, unloadable);
        CHECK(end_of(1, "exp_avg of parameter 0 of group 0 is ") == later);
      }
      auto spoilt = make();
      spoilt->optimizer().param_groups()[0].options().set_lr(-1);
      spoilt->save_checkpoint(file, unloadable);
      CHECK(end_of(1, "lr") == later);
    }
}

TEST_CASE("states of LibTorch's RMSprop and Adagrad that do not fit are refused") {
  const CommonFolder folder(test_world());
  const fs::path file = folder / "checkpoint";
  const auto refused = [&](auto make_optimizer, auto&& spoil, const char* what) {
    const auto make =
        maker({.steps = 2, .batch_size = 4, .progress = false}, lockstep::MakeOptimizer{make_optimizer});
    auto trainer = make(), other = make();
    trainer->fit(samples_for(test_world()), loss);
    trainer->save_checkpoint(file);
    other->load_checkpoint(file);
    spoil(*trainer->optimizer().state().at(trainer->model()->parameters()[0].unsafeGetTensorImpl()));
    trainer->save_checkpoint(file);
    told(other->comm(), error_of([&] { other->load_checkpoint(file); }), what);
  };
  using torch::optim::RMSpropParamState;
  const auto rmsprop = [](std::vector<torch::Tensor> p) {
    return torch::optim::RMSprop(std::move(p), torch::optim::RMSpropOptions(0.01).momentum(0.9));
  };
  refused(
      rmsprop, [](auto& state) { static_cast<RMSpropParamState&>(state).square_avg(torch::ones({1})); },
      "square_avg of parameter 0 of group 0 is ");
  refused(
      rmsprop, [](auto& state) { static_cast<RMSpropParamState&>(state).momentum_buffer(torch::Tensor()); },
      "momentum_buffer of parameter 0 of group 0 is missing");
  refused([](std::vector<torch::Tensor> p) { return torch::optim::Adagrad(std::move(p)); },
          [](auto& state) { static_cast<torch::optim::AdagradParamState&>(state).sum(torch::ones({7})); },
          "sum of parameter 0 of group 0 is ");
}

TEST_CASE("a failed load keeps the state of an optimizer that saves nothing") {
  const CommonFolder folder(test_world());
  const fs::path file = folder / "checkpoint";
  const auto data = samples_for(test_world());
  struct Unsaved : torch::optim::SGD {
    using SGD::SGD;
    void save(torch::serialize::OutputArchive&) const override {}
    void load(torch::serialize::InputArchive&) override {}
  };
  lockstep::CpuComm comm(test_world());
  for (const bool sharded : {false, true}) {
    const auto plain = [](std::vector<torch::Tensor> p) {
      return AnyOptimizer(new Unsaved(std::move(p), torch::optim::SGDOptions(0.1).momentum(0.9)));
    };
    const auto make = maker_of(plain, comm, sharded);
    make()->save_checkpoint(file, lockstep::GradScaler());
    const auto end_of = [&](bool loads) {
      auto trainer = make();
      trainer->fit(data, loss);
      lockstep::MovingAverage other(*trainer->model());
      if (loads) CHECK(!error_of([&] { trainer->load_checkpoint(file, other); }).empty());
      trainer->fit(data, loss);
      return bytes_of(*trainer->model());
    };
    CHECK(end_of(true) == end_of(false));
  }
}

namespace {
// A part of a checkpoint that one rank cannot load.
struct Part {
  bool bad = false;
  void save(torch::serialize::OutputArchive& archive) const { archive.write("part", c10::IValue(1)); }
  void load(torch::serialize::InputArchive&) {
    if (bad) throw std::length_error("no such length");
  }
};
// A hook whose state one rank cannot give.
struct Forgetful {
  bool bad = false, refuses = false;
  template <class Comm>
  void operator()(Comm& comm, const lockstep::GradientBucket& bucket) {
    bucket.flat.div_(comm.size());
    comm.all_reduce(bucket.flat, lockstep::ReduceOp::sum).synchronize();
  }
  [[nodiscard]] lockstep::HookState state() const {
    if (bad) throw std::runtime_error("no such state");
    return {};
  }
  void load_state(const lockstep::HookState&) {
    if (refuses) throw std::runtime_error("no such state");
  }
  void rollback() {}
  void reset() {}
};
}  // namespace

TEST_CASE("what one rank cannot save or load every rank is told, and works on") {
  const auto& world = test_world();
  const CommonFolder folder(world);
  const fs::path file = folder / "checkpoint";
  const bool culprit = world.rank() == world.size() - 1;
  const auto hook = lockstep::hook_of(Forgetful{});
  lockstep::Trainer trainer(world, {.steps = 1, .progress = false}, std::in_place_type<TinyNet>, hook);
  Part part;
  trainer.save_checkpoint(file, part);
  part.bad = culprit;
  const auto refused = [&](const char* words, const auto& act) {
    told(trainer.comm(), text_of<lockstep::CheckpointError>(act), words);
  };
  refused("no such length", [&] { trainer.load_checkpoint(file, part); });
  part.bad = false;
  trainer.load_checkpoint(file, part);
  trainer.ddp().hook().function().bad = culprit;
  refused("no such state", [&] { trainer.save_checkpoint(file, part); });
  {
    const torch::NoGradGuard no_grad;
    trainer.model()->parameters()[0].add_(1);
  }
  const auto before = bytes_of(*trainer.model());
  refused("no such state", [&] { trainer.load_checkpoint(file, part); });
  CHECK(bytes_of(*trainer.model()) == before);

  // The state of the wrapper: its buckets, and how many backwards there were.
  trainer.ddp().hook().function().bad = false;
  trainer.fit(three_classes(world.size() * 16), loss);
  trainer.save_checkpoint(file, part);
  lockstep::Trainer other(world, {.steps = 1, .progress = false}, std::in_place_type<TinyNet>, hook);
  other.ddp().hook().function().refuses = culprit;
  const std::string state = lockstep::pickle_state(other.ddp().state());
  refused("no such state", [&] { other.load_checkpoint(file, part); });
  CHECK(lockstep::pickle_state(other.ddp().state()) == state);
}

TEST_CASE("whether there is a checkpoint is what rank 0 sees") {
  const auto& world = test_world();
  const CommonFolder folder(world);
  const fs::path file = folder / "checkpoint";
  lockstep::Trainer trainer(world, {.steps = 3, .batch_size = 4, .progress = false}, DropNet());
  CHECK(!trainer.load_checkpoint_if_exists(file));
  trainer.fit(samples_for(world), loss);
  trainer.save_checkpoint(file);
  lockstep::Trainer other(world, {.steps = 3, .batch_size = 4, .progress = false}, DropNet());
  CHECK(other.load_checkpoint_if_exists(world.rank() == 0 ? file : fs::path("/nowhere/at/all")));
  CHECK(other.step() == 3);
  const auto saved = trainer.model()->parameters(), read = other.model()->parameters();
  for (std::size_t i = 0; i < saved.size(); ++i) CHECK(torch::equal(read[i], saved[i]));
  CHECK(!other.load_checkpoint_if_exists(world.rank() == 0 ? fs::path("/nowhere/at/all") : file));
  // One that is there and is none is an error.
  if (world.rank() == 0) lockstep::write_file_atomically(file, "no checkpoint");
  CHECK_THROWS_AS(other.load_checkpoint_if_exists(file), lockstep::CheckpointError);
}

namespace {
// Steps only where it likes.
struct Reluctant {
  int calls = 0;
  template <class Forward>
  decltype(auto) forward(Forward&& forward) const {
    return std::forward<Forward>(forward)();
  }
  const at::Tensor& scale(const at::Tensor& loss) const { return loss; }
  bool step(torch::optim::Optimizer& optimizer) {
    if (++calls == 2) return false;
    optimizer.step();
    return true;
  }
};

// Averages, and counts what it was told.
struct Remembering {
  int reductions = 0, rollbacks = 0;
  template <class Comm>
  void operator()(Comm& comm, const lockstep::GradientBucket& bucket) {
    bucket.flat.div_(comm.size());
    comm.all_reduce(bucket.flat, lockstep::ReduceOp::sum).synchronize();
    ++reductions;
  }
  [[nodiscard]] lockstep::HookState state() const { return {{"reductions", torch::tensor(reductions)}}; }
  void load_state(const lockstep::HookState& state) { reductions = state.at(0).second.item<int>(); }
  void rollback() { ++rollbacks; }
  void reset() {}
};
}  // namespace

TEST_CASE("a hook forgets the reduction of a step that was not taken") {
  const auto& world = test_world();
  const auto hook = lockstep::hook_of(Remembering{});
  lockstep::Trainer trainer(world, {.steps = 4, .batch_size = 4, .progress = false},
                            std::in_place_type<TinyNet>, Reluctant(), hook);
  const auto data = three_classes(world.size() * 16);
  trainer.fit(data, loss);
  CHECK(trainer.ddp().hook().function().rollbacks == 1);
  CHECK(trainer.ddp().hook().function().reductions >= 4);

  CHECK_THROWS_AS(trainer.fit(data, loss, lockstep::OnGradients{[](const auto&) {
                                throw lockstep::GradientError("enough");
                              }}),
                  lockstep::GradientError);
  CHECK(trainer.ddp().hook().function().rollbacks == 2);
}

}  // namespace checkpoint_ranks_test
