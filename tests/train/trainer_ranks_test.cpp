#include <filesystem>
#include <numeric>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/data/weighted_random_sampler.hpp"
#include "lockstep/grad/hooks/compression_hooks.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/train/trainer.hpp"
#include "support/mib.hpp"
#include "support/ranks.hpp"
#include "support/text_of.hpp"
#include "support/written.hpp"
#include "train/nets.hpp"

namespace trainer_ranks_test {

namespace {

using GlooTrainer =
    lockstep::Trainer<TinyNet, lockstep::DistributedSampler, lockstep::CpuComm, lockstep::Fp32>;

auto loss = [](TinyNet& net, const auto& batch) {
  return torch::cross_entropy_loss(net(batch.data), batch.target);
};

std::string bytes_of(const torch::nn::Module& module) {
  std::string bytes;
  auto add = [&](const auto& named) {
    for (const auto& item : named) {
      const auto tensor = item.value().contiguous();
      bytes.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
    }
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return bytes;
}

template <class Comm>
bool same_on_all_ranks(Comm& comm, const std::string& bytes) {
  for (const auto& other : comm.all_gather_bytes(bytes))
    if (other != bytes) return false;
  return true;
}

// A sampler that gives rank 0 one sample more than the others and does not tell, which training must refuse.
class UnevenSampler : public lockstep::EvaluationSampler {
 public:
  UnevenSampler(std::size_t length, const lockstep::CpuComm& group) : EvaluationSampler(length, group) {}
  std::size_t size_of(int rank) const = delete;
};
static_assert(lockstep::Sampler<UnevenSampler> && !lockstep::CountingSampler<UnevenSampler>);

// One that tells each rank something else.
class LyingSampler : public lockstep::EvaluationSampler {
 public:
  LyingSampler(std::size_t length, const lockstep::CpuComm& group) : EvaluationSampler(length, group) {}
  [[nodiscard]] std::size_t size_of(int) const { return size(); }
};
static_assert(lockstep::CountingSampler<LyingSampler>);

// What `fit` says against this run on every rank; nothing where it trains.
template <class Trainer, class... Hooks>
std::string refusal(Trainer& trainer, const lockstep::TensorDataset& dataset, Hooks... hooks) {
  const std::string text = text_of<lockstep::MismatchError>([&] { trainer.fit(dataset, loss, hooks...); });
  CHECK(same_on_all_ranks(trainer.comm(), text));
  return text;
}

void says(const std::string& text, const std::string& words) {
  CHECK_THAT(text, ContainsSubstring(words));
}

}  // namespace

TEST_CASE("a model whose initial values differ by rank: one warning, from rank 0", "[2+]") {
  const auto& world = test_world();
  const auto seed = [&](int number) { torch::manual_seed(static_cast<std::uint64_t>(number)); };
  const auto warning = [&](lockstep::DdpOptions options, const auto& model) {
    return written(2, [&] { lockstep::Trainer{world, {.ddp = std::move(options)}, model}; });
  };
  SECTION("on the last rank") {
    seed(world.rank() == world.size() - 1 ? 2 : 1);
    const TinyNet net;
    seed(1);
    const TinyNet of_rank_zero;
    const std::string text = warning({}, net);
    CAPTURE(text);
    if (world.rank() == 0) {
      says(text, fmt::format("(4 of 6 parameters, first 'hidden.weight' on rank {}): rank 0's are used;",
                             world.size() - 1));
      CHECK(std::count(text.begin(), text.end(), '\n') == 1);
    } else {
      CHECK(text.empty());
    }
    CHECK(bytes_of(*net) == bytes_of(*of_rank_zero));
  }
  SECTION("none for equal values, nor for a model that the Trainer constructs") {
    seed(1);
    CHECK(warning({}, TinyNet()).empty());
    seed(world.rank());
    CHECK(warning({}, std::in_place_type<TinyNet>).empty());
  }
  SECTION("none for values that are not broadcast") {
    seed(1);
    const TinyNet net;
    const torch::NoGradGuard no_grad;
    net->last->bias.fill_(world.rank());
    CHECK(warning({.ignored = {"last.bias"}}, net).empty());
    CHECK(warning({.init_sync = false}, net).empty());
  }
}

TEST_CASE("fit leaves the parameters of the loop by hand, bit for bit") {
  const auto& world = test_world();
  const auto train = three_classes(101);
  std::vector<double> losses;
  auto trainer = GlooTrainer{world, {.epochs = 3, .batch_size = 7, .lr = 0.1, .seed = 3407}};
  trainer.fit(train, loss, lockstep::OnStep{[&](const auto& report) { losses.push_back(report.loss()); }});

  torch::manual_seed(3407);
  TinyNet net;
  lockstep::CpuComm comm{world};
  lockstep::DistributedDataParallel ddp{net, comm};
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  lockstep::DataLoader loader{
      train, lockstep::DistributedSampler{train.size(), world, {.seed = 3407}}, {.batch_size = 7}};
  std::vector<double> by_hand;
  for (std::size_t epoch = 0; epoch < 3; ++epoch) {
    loader.set_epoch(epoch);
    for (auto& batch : loader) {
      optimizer.zero_grad();
      auto value = torch::cross_entropy_loss(ddp(batch.data), batch.target);
      by_hand.push_back(value.template item<float>());
      ddp.backward(value);
      optimizer.step();
    }
  }
  CHECK(losses == by_hand);
  const auto third = static_cast<std::ptrdiff_t>(losses.size() / 3);
  CHECK(std::reduce(losses.end() - third, losses.end()) <
        std::reduce(losses.begin(), losses.begin() + third));
  CHECK(bytes_of(*trainer.model()) == bytes_of(*net));

  std::string parameters;
  for (const auto& parameter : trainer.model()->parameters())
    parameters.append(static_cast<const char*>(parameter.const_data_ptr()), parameter.nbytes());
  CHECK(same_on_all_ranks(trainer.comm(), parameters));
}

TEST_CASE("an evaluation over all ranks is that of one process alone") {
  const auto& world = test_world();
  auto trainer = GlooTrainer{world, {.epochs = 2, .batch_size = 8, .lr = 0.1, .seed = 1}};
  trainer.fit(three_classes(64), loss);
  for (const std::int64_t samples : {1, 2, 3, 5, 64, 101}) {
    const auto test = three_classes(samples, 5);
    trainer.model()->norm->eval();  // a part that the user froze stays frozen
    const auto [accuracy, mean_loss, biggest] =
        trainer.evaluate(test, lockstep::Accuracy{}, lockstep::CrossEntropy{},
                         [](const torch::Tensor& output, const auto& batch) {
                           return lockstep::Mean{output.abs().amax(1).sum(), batch.data.size(0)};
                         });
    CHECK(trainer.model()->is_training());
    CHECK(!trainer.model()->norm->is_training());
    CHECK(trainer.model()->last->is_training());

    // Running statistics are rank 0's everywhere by now: each rank repeats the whole evaluation alone.
    trainer.model()->eval();
    const torch::NoGradGuard no_grad;
    const auto output = trainer.model()(test.data());
    trainer.model()->train();
    CHECK(accuracy == output.argmax(1).eq(test.target()).sum().item<double>() / static_cast<double>(samples));
    CHECK(mean_loss == Approx(torch::cross_entropy_loss(output, test.target()).item<double>()).epsilon(1e-5));
    CHECK(biggest == Approx(output.abs().amax(1).mean().item<double>()).epsilon(1e-5));
    CHECK(same_on_all_ranks(trainer.comm(), fmt::format("{} {}", accuracy, mean_loss)));
  }
}

TEST_CASE("an evaluation leaves the buffers that each rank keeps for itself") {
  const auto& world = test_world();
  lockstep::TrainerOptions options{.epochs = 1, .batch_size = 8, .lr = 0.1, .seed = 1};
  options.ddp.broadcast_buffers = false;
  auto trainer = GlooTrainer{world, options};
  trainer.fit(three_classes(64), loss);
  const auto before = trainer.model()->norm->running_mean.clone();
  if (world.size() > 1)
    CHECK(!same_on_all_ranks(trainer.comm(), fmt::format("{}", before[0].item<double>())));
  const double accuracy = trainer.evaluate(three_classes(32, 5), lockstep::Accuracy{});
  CHECK(same_on_all_ranks(trainer.comm(), fmt::format("{}", accuracy)));
  CHECK(torch::equal(trainer.model()->norm->running_mean, before));
}

TEST_CASE("a loss of sums and counts that differ between ranks is the mean over all of them") {
  const auto& world = test_world();
  const auto train = three_classes(24);
  // Weights each sample by its class: batches of equal size weigh differently.
  auto weighted = [](torch::nn::Sequential& net, const lockstep::Example& batch) {
    const auto each = torch::nn::functional::cross_entropy(
        net->forward(batch.data), batch.target,
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
    const auto weight = batch.target.to(torch::kFloat).pow(2);
    return lockstep::Mean{(each * weight).sum(), weight.sum().item<double>()};
  };
  torch::manual_seed(5);
  torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::Tanh(), torch::nn::Linear(8, 3));
  torch::nn::Sequential alone(std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone()));
  const std::int64_t ranks = world.size();
  auto trainer =
      lockstep::Trainer{world, {.epochs = 1, .batch_size = 24 / ranks, .lr = 0.5, .shuffle = false}, net};
  const auto report = trainer.fit(train, weighted);

  auto optimizer = torch::optim::SGD(alone->parameters(), 0.5);
  lockstep::Example all{train.data(), train.target()};
  const auto mean = weighted(alone, all);
  (mean.sum / mean.count).backward();
  optimizer.step();
  for (std::size_t i = 0; i < alone->parameters().size(); ++i)
    CHECK(torch::allclose(alone->parameters()[i], net->parameters()[i], 1e-5, 1e-6));
  CHECK(report.loss == Approx(mean.sum.item<double>() / mean.count).epsilon(1e-5));

  // The loss is a metric itself, with the same counts; of one with named parts the loss alone is.
  const auto in_parts = [&](torch::nn::Sequential& model, const lockstep::Example& batch) {
    return std::tuple{weighted(model, batch), lockstep::named<"half">(torch::tensor(0.5))};
  };
  const auto after = weighted(net, all);
  const auto [loss, total] = trainer.evaluate(train, weighted, in_parts);
  CHECK(loss == Approx(after.sum.item<double>() / after.count).epsilon(1e-5));
  CHECK(total == loss);
}

TEST_CASE("ranks start alike and draw differently") {
  auto trainer = GlooTrainer{test_world(), {.seed = 11}};
  CHECK(same_on_all_ranks(trainer.comm(), bytes_of(*trainer.model())));
  const auto drawn = fmt::format("{}", torch::rand(1).item<float>());
  if (test_world().size() > 1) CHECK(!same_on_all_ranks(trainer.comm(), drawn));
}

TEST_CASE("runs that differ between the ranks are refused with the same error on every rank", "[2+]") {
  const auto& world = test_world();
  const auto refused = [](auto&& trainer, const lockstep::TensorDataset& data, const std::string& words) {
    says(refusal(trainer, data), words);
  };
  const std::string next = world.size() == 2 ? " on rank 0 and " : " on rank 0, ";
  const auto odd = three_classes(4 * world.size() + 1), even = three_classes(40);
  refused(lockstep::Trainer<TinyNet, UnevenSampler>{world, {}}, odd,
          "the data is 5 samples an epoch on rank 0 and 4 samples an epoch on rank");
  // Samplers that do not agree on who has what.
  refused(lockstep::Trainer<TinyNet, LyingSampler>{world, {}}, odd,
          "the data is 5 samples an epoch on rank 0 and 4 samples an epoch on rank");
  refused(GlooTrainer{world, {.accumulate = 1 + world.rank()}}, even,
          "accumulate is 1" + next + "2 on rank 1");
  refused(GlooTrainer{world, {.lr = world.rank() == 0 ? 0.1 : 0.01}}, even,
          "lr is 0.1 on rank 0 and 0.01 on");
  refused(GlooTrainer{world, {.shuffle = world.rank() == 0}}, even, "shuffle is true on rank 0 and false on");
  refused(GlooTrainer{world, {.batch_size = 4 + world.rank()}}, even,
          "batch_size is 4" + next + "5 on rank 1");
  refused(GlooTrainer{world, {}}, three_classes(40 + world.rank()), "dataset");
  refused(GlooTrainer{world, {}}, three_classes(40, 1 + static_cast<std::uint64_t>(world.rank())),
          "fingerprint");
}

TEST_CASE("parameters that part are found at the end of the epoch, alike on every rank") {
  const auto& world = test_world();
  const bool last = world.size() > 1 && world.rank() == world.size() - 1;
  const lockstep::OnGradients meddle{[&](const lockstep::Gradients& gradients) {
    if (last) gradients.parameters[0].mutable_grad().mul_(2);
  }};
  const auto train = [&](lockstep::TrainerOptions options) {
    options.lr = 0.1;
    options.progress = false;
    GlooTrainer trainer{world, options};
    return refusal(trainer, three_classes(40), meddle);
  };
  if (world.size() == 1) {
    CHECK(train({}).empty());
    return;
  }
  says(train({}), fmt::format("on rank {}", world.size() - 1));
  CHECK(train({.compare_parameters = false}).empty());
  // A hook by which they part says so.
  lockstep::Trainer apart{
      world, {.lr = 0.1, .progress = false}, std::in_place_type<TinyNet>, lockstep::NoOpHook()};
  CHECK(refusal(apart, three_classes(40)).empty());
}

TEST_CASE("a rate that an optimizer of one's own would not use is refused") {
  const auto make = lockstep::MakeOptimizer{[](std::vector<torch::Tensor> parameters) {
    return lockstep::SGD(std::move(parameters), {.lr = 0.05});
  }};
  const auto net = std::in_place_type<TinyNet>;
  CHECK_THROWS_AS((lockstep::Trainer{test_world(), {.lr = 0.1}, net, make}), lockstep::UsageError);
  CHECK_NOTHROW((lockstep::Trainer{test_world(), {}, net, make}));
}

TEST_CASE("a model is saved by rank 0 and loaded for all") {
  const auto& world = test_world();
  auto trainer = GlooTrainer{world, {.steps = 3, .seed = 2}};
  auto folder = std::filesystem::temp_directory_path() /
                trainer.comm().broadcast_bytes(fmt::format("lockstep-train-{}", ::getpid()), 0);
  if (world.rank() == 0) std::filesystem::create_directories(folder);
  trainer.comm().barrier();
  const auto path = folder / "net.pt";
  trainer.fit(three_classes(64), loss);
  trainer.save(path);
  CHECK(std::filesystem::exists(path));

  SECTION("into another trainer, whose optimizer goes on with the same tensors") {
    auto other = GlooTrainer{world, {.steps = 2, .seed = 77}};
    CHECK(bytes_of(*other.model()) != bytes_of(*trainer.model()));
    lockstep::broadcast_buffers(*trainer.model(), trainer.comm());
    other.load(path);
    CHECK(bytes_of(*other.model()) == bytes_of(*trainer.model()));
    other.fit(three_classes(64), loss);
    CHECK(bytes_of(*other.model()) != bytes_of(*trainer.model()));
  }
  SECTION("by torch::load") {
    TinyNet net;
    torch::load(net, path);
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      CHECK(torch::equal(net->parameters()[i], trainer.model()->parameters()[i]));
  }
  SECTION("not by torch::load into a trainer's model: the next backward finds no gradients") {
    auto other = GlooTrainer{world, {.steps = 2, .seed = 77}};
    torch::load(other.model(), path);
    CHECK_THROWS_AS(other.fit(three_classes(64), loss), lockstep::UsageError);
    // A checkpoint is no model for LibTorch.
    trainer.save_checkpoint(folder / "run.ckpt");
    TinyNet net;
    CHECK_THROWS_AS(torch::load(net, folder / "run.ckpt"), c10::Error);
  }
  SECTION("not into another model: every rank hears which tensors differ") {
    auto other = lockstep::Trainer{world, {}, TinyNet(6, 4)};
    const std::string text = text_of<lockstep::CheckpointError>([&] { other.load(path); });
    says(text, "last.weight");
    CHECK(same_on_all_ranks(other.comm(), text));
  }
  SECTION("not where nothing can be written, or read: every rank hears it") {
    CHECK_THROWS_AS(trainer.save(folder / "no" / "net.pt"), lockstep::CheckpointError);
    CHECK_THROWS_AS(trainer.load(folder / "absent.pt"), lockstep::CheckpointError);
  }
  SECTION("not by rank 0 alone") {
    world.rank_zero([&] { CHECK_THROWS_AS(trainer.save(path), lockstep::CommunicationError); });
    CHECK(std::filesystem::exists(path));
  }
  trainer.comm().barrier();
  if (world.rank() == 0) std::filesystem::remove_all(folder);
}

TEST_CASE("a communication hook is one more extra, and DDP's options one more option") {
  const auto train = three_classes(60);
  const auto run = [&](auto... extras) {
    lockstep::TrainerOptions options{.epochs = 2, .batch_size = 5, .lr = 0.1};
    options.ddp.bucket_cap_mb = lockstep_test::mib({64});
    lockstep::Trainer trainer{test_world(), options, std::in_place_type<TinyNet>, extras...};
    trainer.fit(train, loss);
    CHECK(trainer.ddp().buckets().size() > 1);
    trainer.ddp().sync_buffers();
    CHECK(same_on_all_ranks(trainer.comm(), bytes_of(*trainer.model())));
    return std::pair(trainer.ddp().report(), bytes_of(*trainer.model()));
  };
  const auto [plain, plain_bytes] = run();
  const auto [halved, halved_bytes] = run(lockstep::Fp16Hook{});
  CHECK(plain.hook == "all_reduce");
  CHECK(halved.hook != plain.hook);
  CHECK(2 * halved.bytes_so_far == plain.bytes_so_far);
  CHECK(halved_bytes != plain_bytes);
}

TEST_CASE("a sampler that is made of a dataset gets that of fit") {
  struct Weighted : lockstep::TensorDataset {
    using TensorDataset::TensorDataset;
    [[nodiscard]] at::Tensor sample_weights() const { return target().eq(1); }
  };
  const auto all = three_classes(60);
  Weighted data(all.data(), all.target());
  lockstep::Trainer trainer{test_world(),
                            {.epochs = 2, .batch_size = 4, .progress = false},
                            TinyNet(),
                            std::in_place_type<lockstep::WeightedRandomSampler>};
  std::int64_t samples = 0;
  const auto report = trainer.fit(data, [&](TinyNet& net, const auto& batch) {
    CHECK(batch.target.eq(1).all().template item<bool>());
    samples += batch.target.size(0);
    return loss(net, batch);
  });
  CHECK(std::isfinite(report.loss));
  CHECK(samples == (60 + test_world().size() - 1) / test_world().size() * 2);
}

}  // namespace trainer_ranks_test
