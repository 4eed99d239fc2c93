#include "lockstep/data/loader.hpp"

#include <dirent.h>
#include <pthread.h>

#include <atomic>
#include <sstream>
#include <thread>

#include "data/passes.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/detail/const_data.hpp"
#include "support/catch.hpp"
#include "support/text_of.hpp"

namespace loader_test {

using lockstep::DataLoader;
using lockstep::DistributedSampler;
using lockstep::Example;
using lockstep::LoaderOptions;
using lockstep::TensorDataset;

namespace {

TensorDataset counting(std::int64_t length) {
  return {torch::arange(length).to(torch::kFloat).view({length, 1}).repeat({1, 3}), torch::arange(length)};
}

std::vector<std::int64_t> values_of(const Example& batch) {
  const auto* targets = batch.target.data_ptr<std::int64_t>();
  return {targets, targets + batch.target.size(0)};
}

template <class Loader>
std::vector<std::vector<std::int64_t>> pass(Loader& loader) {
  std::vector<std::vector<std::int64_t>> batches;
  for (auto& batch : loader) batches.push_back(values_of(batch));
  return batches;
}

std::vector<std::vector<std::int64_t>> sampled(DistributedSampler sampler, std::size_t batch_size) {
  std::vector<std::vector<std::int64_t>> batches;
  sampler.reset();
  while (const auto indices = sampler.next(batch_size))
    batches.emplace_back(indices->begin(), indices->end());
  return batches;
}

int threads_here() {
  int count = 0;
  DIR* tasks = opendir("/proc/self/task");
  while (const dirent* entry = readdir(tasks)) count += entry->d_name[0] != '.' ? 1 : 0;
  closedir(tasks);
  return count;
}

// Threads leave /proc a moment after they were joined.
bool threads_return_to(int count) {
  for (int i = 0; i < 100 && threads_here() > count; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return threads_here() <= count;
}

struct Slow {  // single samples, some of which take long
  [[nodiscard]] std::size_t size() const { return 40; }
  [[nodiscard]] Example get(std::size_t i) const {
    if (i % 5 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
    return {torch::full({2}, static_cast<double>(i)), torch::tensor(static_cast<std::int64_t>(i))};
  }
};

struct Broken {
  [[nodiscard]] std::size_t size() const { return 40; }
  [[nodiscard]] Example get(std::size_t i) const {
    if (i == 13) throw std::runtime_error("sample 13 is bad");
    if (i == 33) throw lockstep::DataError("file x, offset 3");
    return {torch::zeros(1), torch::tensor(std::int64_t{0})};
  }
};

const auto in_order = [](std::size_t length) { return DistributedSampler{length, 0, 1, {.shuffle = false}}; };

}  // namespace

static_assert(lockstep::ResumableSampler<DistributedSampler>);
static_assert(lockstep::ResumableSampler<lockstep::RandomSampler>);
static_assert(lockstep::ResumableSampler<lockstep::EvaluationSampler>);

// A Sampler that knows nothing of passes beyond the concept.
class PlainSampler final : public torch::data::samplers::Sampler<> {
 public:
  void set_epoch(std::size_t epoch) { epoch_ = epoch; }
  void reset(std::optional<std::size_t> = std::nullopt) override { given_ = 0; }
  std::optional<std::vector<std::size_t>> next(std::size_t count) override {
    std::vector<std::size_t> indices;
    for (; given_ < size() && indices.size() < count; ++given_) indices.push_back((given_ + epoch_) % size());
    return indices.empty() ? std::nullopt : std::optional(indices);
  }
  [[nodiscard]] std::size_t size() const { return 6; }
  void save(torch::serialize::OutputArchive& archive) const override {
    archive.write("given", c10::IValue(static_cast<std::int64_t>(given_)));
  }
  void load(torch::serialize::InputArchive&) override {}

 private:
  std::size_t epoch_ = 0, given_ = 0;
};
static_assert(lockstep::Sampler<PlainSampler> && !lockstep::ResumableSampler<PlainSampler>);

TEST_CASE("a loader counts the passes and samples of a plain sampler") {
  DataLoader loader{counting(6), PlainSampler(), {.batch_size = 4, .draw_base_seed = false}};
  std::vector<std::int64_t> firsts;
  for (int pass = 0; pass < 3; ++pass)
    for (auto& batch : loader) firsts.push_back(batch.target[0].item<std::int64_t>());
  CHECK(loader.epoch() == 2);
  CHECK(firsts == std::vector<std::int64_t>{0, 4, 1, 5, 2, 0});
  torch::serialize::OutputArchive archive;
  loader.save(archive, 3);
  std::stringstream bytes;
  archive.save_to(bytes);
  auto saved = archive_of(bytes.str());
  c10::IValue given;
  saved.read("given", given);
  CHECK(given.toInt() == 3);
}

TEST_CASE("batches are the sampler's, in its order, with any number of workers") {
  for (const std::int64_t workers : {0, 1, 3}) {
    const DistributedSampler sampler{103, 1, 2, {.seed = 7}};
    DataLoader loader{counting(103), sampler, {.batch_size = 8, .num_workers = workers}};
    CHECK(loader.size() == 7);
    const auto batches = pass(loader);
    CHECK(batches.size() == loader.size());
    DistributedSampler twin{103, 1, 2, {.seed = 7}};
    CHECK(batches == sampled(twin, 8));
  }
}

TEST_CASE("slow samples do not change the order") {
  DataLoader alone{Slow{}, DistributedSampler{40, 0, 1, {}}, {.batch_size = 3}};
  DataLoader helped{
      Slow{}, DistributedSampler{40, 0, 1, {}}, {.batch_size = 3, .num_workers = 4, .prefetch_factor = 3}};
  CHECK(pass(alone) == pass(helped));
}

TEST_CASE("drop_last leaves out a batch that is not full") {
  for (const std::int64_t workers : {0, 2}) {
    DataLoader loader{
        counting(20), in_order(20), {.batch_size = 8, .num_workers = workers, .drop_last = true}};
    CHECK(loader.size() == 2);
    CHECK(pass(loader).size() == 2);
    DataLoader whole{
        counting(16), in_order(16), {.batch_size = 8, .num_workers = workers, .drop_last = true}};
    CHECK(pass(whole).size() == 2);
  }
}

TEST_CASE("each pass is another epoch, set or not") {
  DistributedSampler reference{30, 0, 1, {}};
  DataLoader loader{counting(30), DistributedSampler{30, 0, 1, {}}, {.batch_size = 30}};
  auto epoch = [&](std::size_t e) {
    reference.set_epoch(e);
    return sampled(reference, 30);
  };
  CHECK(pass(loader) == epoch(0));
  CHECK(pass(loader) == epoch(1));  // forgotten, and yet not the same again
  loader.set_epoch(7);
  CHECK(pass(loader) == epoch(7));
  loader.set_epoch(7);
  CHECK(pass(loader) == epoch(7));
  CHECK(pass(loader) == epoch(8));
  CHECK(loader.epoch() == 8);

  SECTION("set on a copy of the sampler that was kept") {
    DistributedSampler kept{30, 0, 1, {}};
    DataLoader from_kept{counting(30), kept, {.batch_size = 30}};
    for (const std::size_t e : {0, 0, 4, 5}) {
      kept.set_epoch(e);
      CHECK(pass(from_kept) == epoch(e));
    }
  }
  SECTION("set during a pass, for the next one") {
    DataLoader small{counting(30), DistributedSampler{30, 0, 1, {}}, {.batch_size = 7}};
    std::vector<std::vector<std::int64_t>> given;
    for (auto& batch : small) {
      small.set_epoch(4);
      given.push_back(values_of(batch));
    }
    DataLoader twin{counting(30), DistributedSampler{30, 0, 1, {}}, {.batch_size = 7}};
    CHECK(given == pass(twin));
    twin.set_epoch(4);
    CHECK(pass(small) == pass(twin));
    for (auto& batch : small) {
      static_cast<void>(batch);
      small.set_epoch(9);
    }
    small.set_epoch(2);  // the last call holds
    twin.set_epoch(2);
    CHECK(pass(small) == pass(twin));
  }
  SECTION("set before the loader was made") {
    DistributedSampler early{30, 0, 1, {}};
    early.set_epoch(3);
    DataLoader late{counting(30), early, {.batch_size = 30}};
    CHECK(pass(late) == epoch(3));
    CHECK(pass(late) == epoch(4));
  }
  SECTION("unless told to stay") {
    DataLoader same{
        counting(30), DistributedSampler{30, 0, 1, {}}, {.batch_size = 30, .advance_epoch = false}};
    CHECK(pass(same) == pass(same));
  }
}

TEST_CASE("leaving the loop early leaves no thread and the next pass is whole") {
  const int before = threads_here();
  DataLoader loader{Slow{}, in_order(40), {.batch_size = 2, .num_workers = 3}};
  for (auto& batch : loader) {
    (void)batch;
    CHECK(threads_here() >= before + 3);
    break;
  }
  CHECK(threads_return_to(before));
  CHECK_THROWS_AS(
      [&] {
        for (auto& batch : loader) throw std::runtime_error(std::to_string(batch.data.numel()));
      }(),
      std::runtime_error);
  CHECK(threads_return_to(before));
  CHECK(pass(loader).size() == 20);
  CHECK(threads_return_to(before));
}

TEST_CASE("workers load at the same time, and no more than prefetch_factor batches ahead each") {
  struct Pairs {  // each sample of a pair waits for the other: one worker alone would never end
    std::shared_ptr<std::atomic<int>> begun = std::make_shared<std::atomic<int>>(0);
    [[nodiscard]] std::size_t size() const { return 2; }
    [[nodiscard]] Example get(std::size_t i) const {
      ++*begun;
      while (*begun < 2) std::this_thread::yield();
      return {torch::zeros(1), torch::tensor(static_cast<std::int64_t>(i))};
    }
  };
  DataLoader pairs{Pairs{}, in_order(2), {.batch_size = 1, .num_workers = 2}};
  CHECK(pass(pairs) == std::vector<std::vector<std::int64_t>>{{0}, {1}});

  struct Counted {
    std::shared_ptr<std::atomic<int>> drawn = std::make_shared<std::atomic<int>>(0);
    [[nodiscard]] std::size_t size() const { return 100; }
    [[nodiscard]] Example get(std::size_t) const {
      ++*drawn;
      return {torch::zeros(1), torch::zeros(1)};
    }
  };
  const Counted counted;
  DataLoader loader{counted, in_order(100), {.batch_size = 1, .num_workers = 2, .prefetch_factor = 2}};
  CHECK(*counted.drawn == 0);
  int given = 0;
  for (auto& batch : loader) {
    given += static_cast<int>(batch.data.size(0));
    CHECK(*counted.drawn <= given + 4);
    if (given == 50) break;
  }
}

TEST_CASE("threads that the machine does not give are missed in words") {
  // No address space holds such a stack: starting a thread fails as it does where there are too many.
  pthread_attr_t usual, huge;
  REQUIRE(pthread_getattr_default_np(&usual) == 0);
  REQUIRE(pthread_getattr_default_np(&huge) == 0);
  REQUIRE(pthread_attr_setstacksize(&huge, std::size_t{1} << 56) == 0);
  REQUIRE(pthread_setattr_default_np(&huge) == 0);
  DataLoader loader{counting(10), in_order(10), {.num_workers = 3}};
  const std::string message = text_of<lockstep::Error>([&] { (void)loader.begin(); });
  REQUIRE(pthread_setattr_default_np(&usual) == 0);
  CHECK_THAT(message, ContainsSubstring("only 0 of 3 worker threads could be started ("));
}

TEST_CASE("what a dataset throws reaches the consumer with rank and batch") {
  for (const std::int64_t workers : {0, 2}) {
    const int before = threads_here();
    DataLoader loader{Broken{}, in_order(40), {.batch_size = 4, .num_workers = workers, .rank = 5}};
    int batches = 0;
    auto read = [&] {
      for (auto& batch : loader) batches += batch.data.defined() ? 1 : 0;
    };
    CHECK_THROWS_WITH(read(), ContainsSubstring("rank 5") && ContainsSubstring("batch 4 of epoch 1") &&
                                  ContainsSubstring("sample 13 is bad"));
    CHECK(batches == 3);
    CHECK(threads_return_to(before));
    CHECK_THROWS_AS(read(), lockstep::DataError);
    try {
      read();
    } catch (const lockstep::DataError& error) {
      CHECK_THROWS_AS(std::rethrow_if_nested(error), std::runtime_error);
    }
  }
  struct OneBad : Broken {
    [[nodiscard]] Example get(std::size_t i) const { return Broken::get(i == 13 ? 33 : i); }
  };
  DataLoader loader{OneBad{}, in_order(40), {.batch_size = 4, .num_workers = 1}};
  CHECK_THROWS_WITH(pass(loader), "file x, offset 3");  // errors of lockstep speak for themselves
}

TEST_CASE("transforms draw the same with any number of workers, and differ by rank, epoch and batch") {
  auto noise = [](Example example, at::Generator& generator) {
    example.data = example.data + torch::rand(example.data.sizes(), generator);
    return example;
  };
  auto run = [&](std::int64_t workers, int rank, std::uint64_t seed, bool whole_batches,
                 std::size_t epoch = 0) {
    LoaderOptions options{.batch_size = 4, .num_workers = workers, .seed = seed, .rank = rank};
    (whole_batches ? options.batch_transform : options.transform) = noise;
    DataLoader loader{TensorDataset{torch::zeros({20, 2}), torch::arange(20)}, in_order(20), options};
    loader.set_epoch(epoch);
    std::vector<at::Tensor> data;
    for (auto& batch : loader) data.push_back(batch.data);
    return torch::cat(data);
  };
  for (const bool whole_batches : {false, true}) {
    const at::Tensor first = run(0, 0, 1, whole_batches);
    CHECK(first.sizes() == at::IntArrayRef({20, 2}));
    CHECK(torch::equal(first, run(0, 0, 1, whole_batches)));
    CHECK(torch::equal(first, run(3, 0, 1, whole_batches)));
    for (const at::Tensor& other :
         {run(0, 1, 1, whole_batches), run(0, 0, 2, whole_batches), run(0, 0, 1, whole_batches, 1)})
      CHECK((first - other).abs().min().item<float>() > 0);
    // No number twice: batches have draws of their own.
    CHECK(std::get<0>(at::_unique(first)).numel() == 40);
  }
}

TEST_CASE("a pass that was resumed draws as the whole pass would have") {
  auto noise = [](Example example, at::Generator& generator) {
    example.data = torch::rand({1}, generator);
    return example;
  };
  auto make = [&] { return DistributedSampler{20, 0, 2, {}}; };
  DataLoader whole{counting(20), make(), {.batch_size = 2, .transform = noise}};
  std::vector<at::Tensor> data;
  for (auto& batch : whole) data.push_back(batch.data);
  DistributedSampler saved = make();
  (void)saved.next(4);
  DistributedSampler resumed = make();
  lockstep_test::carry(saved, resumed);
  DataLoader rest{counting(20), resumed, {.batch_size = 2, .transform = noise}};
  CHECK(rest.size() == 3);
  std::size_t at = 2;
  for (auto& batch : rest) CHECK(torch::equal(batch.data, data.at(at++)));
  CHECK(at == 5);
}

TEST_CASE("what workers have read ahead does not count as given") {
  auto make = [](std::int64_t workers) {
    return DataLoader{
        counting(40), DistributedSampler{40, 1, 2, {}}, {.batch_size = 3, .num_workers = workers}};
  };
  auto loader = make(2);
  loader.set_epoch(3);
  std::vector<at::Tensor> batches;
  for (auto& batch : loader) batches.push_back(batch.data);
  for (const std::size_t given : {0, 1, 4}) {
    torch::serialize::OutputArchive out;
    loader.save(out, 3 * given);
    std::stringstream stream;
    out.save_to(stream);
    auto rest = make(0);
    load(rest.sampler(), stream.str());
    std::size_t at = given;
    for (auto& batch : rest) CHECK(torch::equal(batch.data, batches.at(at++)));
    CHECK(at == batches.size());
  }
}

TEST_CASE("a random sampler with a generator goes on as if it had not been saved, wherever that was") {
  const auto make = [](std::int64_t workers) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
    return DataLoader{counting(40),
                      lockstep::RandomSampler{40, {.generator = generator}},
                      {.batch_size = 12, .num_workers = workers}};
  };
  for (const std::int64_t workers : {0, 2})
    for (const std::size_t given : {12, 36, 40}) {
      CAPTURE(workers, given);
      auto whole = make(workers);
      pass(whole);
      std::string saved;
      std::size_t seen = 0;
      std::vector<std::vector<std::int64_t>> rest;
      for (auto it = whole.begin(); it != std::default_sentinel; ++it) {
        if (!saved.empty()) rest.push_back(values_of(*it));
        seen += values_of(*it).size();
        if (seen != given) continue;
        torch::serialize::OutputArchive out;
        whole.save(out, given);
        std::stringstream stream;
        out.save_to(stream);
        saved = stream.str();
      }
      auto resumed = make(0);
      load(resumed.sampler(), saved);
      CHECK(pass(resumed) == rest);
      CHECK(resumed.epoch() == whole.epoch());
      CHECK(pass(resumed) == pass(whole));
    }
}

TEST_CASE("bytes become floats by a batch transform") {
  const at::Tensor bytes = torch::arange(6).to(torch::kByte).mul(51).view({6, 1});
  DataLoader loader{TensorDataset{bytes, torch::arange(6)},
                    in_order(6),
                    {.batch_size = 6, .num_workers = 1, .batch_transform = [](Example batch, at::Generator&) {
                       return Example{batch.data.to(torch::kFloat).div_(255), batch.target};
                     }}};
  for (auto& batch : loader)
    CHECK(torch::equal(batch.data, torch::arange(6).view({6, 1}).mul(51).to(torch::kFloat) / 255));
}

TEST_CASE("workers keep their tensor operations on their own thread, and training's threads as they are") {
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  std::atomic<int> most = 0;
  auto look = [&most](Example batch, at::Generator&) {
    most = std::max(most.load(), at::get_num_threads());
    return batch;
  };
  DataLoader loader{counting(20), in_order(20), {.batch_size = 4, .num_workers = 2, .batch_transform = look}};
  CHECK(pass(loader).size() == 5);
  CHECK(most == 1);
  CHECK(at::get_num_threads() == 2);
  int elsewhere = 0;
  std::thread([&elsewhere] { elsewhere = at::get_num_threads(); }).join();
  CHECK(elsewhere == 2);
  at::set_num_threads(before);
}

TEST_CASE("batches take part in training: they are no inference tensors and need no gradient") {
  for (const std::int64_t workers : {0, 1}) {
    DataLoader loader{counting(4), in_order(4), {.batch_size = 4, .num_workers = workers}};
    for (auto& batch : loader) {
      const at::Tensor weight = torch::ones({3}, torch::requires_grad());
      (batch.data * weight).sum().backward();
      CHECK(weight.grad()[0].item<float>() == 6);
      CHECK_FALSE(batch.data.requires_grad());
    }
    CHECK(torch::GradMode::is_enabled());
  }
}

TEST_CASE("torch's datasets and every sampler are taken") {
  DataLoader mapped{torch::data::datasets::TensorDataset(torch::arange(10))
                        .map(torch::data::transforms::Stack<torch::data::TensorExample>()),
                    lockstep::EvaluationSampler{10, 1, 3},
                    {.batch_size = 2, .num_workers = 1}};
  std::vector<int> seen;
  for (auto& batch : mapped)
    for (std::int64_t i = 0; i < batch.data.size(0); ++i) seen.push_back(batch.data[i].item<int>());
  CHECK(seen == std::vector<int>{4, 5, 6});
  DataLoader shuffled{counting(10), lockstep::RandomSampler{10}, {.batch_size = 5}};
  CHECK(pass(shuffled).size() == 2);
}

TEST_CASE("an empty dataset gives an empty pass") {
  for (const std::int64_t workers : {0, 2}) {
    DataLoader loader{counting(0), DistributedSampler{0, 0, 2}, {.num_workers = workers}};
    CHECK(loader.size() == 0);
    CHECK(pass(loader).empty());
  }
}

TEST_CASE("what cannot work is refused before it starts") {
  CHECK_THROWS_AS((DataLoader{counting(4), in_order(4), {.batch_size = 0}}), lockstep::UsageError);
  struct Whole {
    [[nodiscard]] std::size_t size() const { return 4; }
    [[nodiscard]] Example get_batch(c10::ArrayRef<std::size_t>) const { return {}; }
  };
  const lockstep::Transform nothing = [](Example example, at::Generator&) { return example; };
  CHECK_THROWS_AS((DataLoader{Whole{}, in_order(4), {.transform = nothing}}), lockstep::UsageError);
  DataLoader loader{counting(4), in_order(4), {.batch_size = 2}};
  auto running = loader.begin();
  CHECK_THROWS_AS(loader.begin(), lockstep::UsageError);
}

}  // namespace loader_test
