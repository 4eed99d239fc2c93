// Batches on their way to a device, whose streams are played here: a copy is done only when something makes
// the side stream go on, and a tensor that was not waited for holds nothing of its batch yet.
#include "lockstep/data/loader.hpp"

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/data/sampler.hpp"
#include "support/catch.hpp"
#include "support/text_of.hpp"

namespace staging_test {

namespace {

class PlayedStream {
 public:
  struct Event {
    std::size_t place;
    bool joined = false;
  };

  at::Tensor pinned(const at::Tensor& tensor) { return tensor.clone(); }
  at::Tensor copy(const at::Tensor& tensor) {
    if (fails_at-- == 0) throw std::runtime_error("the device has failed");
    const at::Tensor there = torch::full_like(tensor, -1);
    // The stream keeps neither of them alive.
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> source(tensor.getIntrusivePtr());
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> target(there.getIntrusivePtr());
    queue_.push_back([this, source, target] {
      const auto alive = source.lock();
      if (!alive) ++read_after_free;
      const auto to = target.lock();
      if (alive && to) at::Tensor(to).copy_(at::Tensor(alive));
    });
    return there;
  }
  Event record() { return {queue_.size()}; }
  void wait(const Event& event) {
    ++waits;
    go_on(event.place);
  }
  void hand_over(const at::Tensor& tensor) { handed_over.push_back(tensor); }
  bool done(const Event& event) { return done_ >= event.place; }
  void synchronize(const Event& event) {
    if (!done(event)) ++host_waits;
    go_on(event.place);
  }

  void go_on(std::size_t place) {
    while (done_ < place) queue_[done_++]();
  }
  [[nodiscard]] std::size_t begun() const { return queue_.size(); }
  [[nodiscard]] std::size_t finished() const { return done_; }

  int read_after_free = 0, waits = 0, host_waits = 0;
  int fails_at = -1;  // the number of the copy that fails
  std::vector<at::Tensor> handed_over;

 private:
  std::vector<std::function<void()>> queue_;
  std::size_t done_ = 0;
};

static_assert(lockstep::detail::CopyStream<PlayedStream>);

lockstep::TensorDataset numbers(std::int64_t samples) {
  const auto data = torch::arange(samples).to(torch::kFloat);
  return {data, data + 100};
}

auto loader_of(std::int64_t samples, std::size_t workers = 0) {
  return lockstep::DataLoader{
      numbers(samples),
      lockstep::PermutationSampler{static_cast<std::size_t>(samples), 0, 1, {.shuffle = false}},
      {.batch_size = 2, .num_workers = workers}};
}

template <class Pass>
std::vector<float> all_of(Pass& pass) {
  std::vector<float> seen;
  for (; !(pass == std::default_sentinel); ++pass) {
    const auto data = pass->data.contiguous(), target = pass->target.contiguous();
    CHECK(at::equal(data + 100, target));
    for (std::int64_t i = 0; i < data.size(0); ++i) seen.push_back(data[i].template item<float>());
  }
  return seen;
}

}  // namespace

TEST_CASE("staged batches are those of the loader, in order, each waited for before it is used") {
  for (const std::size_t workers : {0, 2}) {
    auto loader = loader_of(7, workers);
    PlayedStream stream;
    for (int epoch = 0; epoch < 2; ++epoch) {
      lockstep::StagedPass pass(loader, &stream);
      CHECK(all_of(pass) == std::vector<float>{0, 1, 2, 3, 4, 5, 6});
    }
    CHECK(stream.waits == 8);
    CHECK(stream.handed_over.size() == 16);
    CHECK(stream.read_after_free == 0);
    CHECK(stream.host_waits == 0);
  }
}

TEST_CASE("the next batch is on its way while one is in use, and none after it") {
  auto loader = loader_of(8);
  PlayedStream stream;
  lockstep::StagedPass pass(loader, &stream);
  CHECK(stream.begun() == 4);
  CHECK(stream.finished() == 2);
  CHECK(stream.handed_over.size() == 2);
  CHECK(stream.handed_over[0].is_same(pass->data));
  ++pass;
  CHECK(stream.begun() == 6);
  CHECK(stream.finished() == 4);
}

TEST_CASE("pinned memory lives until its copy is done, also where the pass is left") {
  auto loader = loader_of(8);
  PlayedStream stream;
  {
    lockstep::StagedPass pass(loader, &stream);
    CHECK(stream.finished() == 2);
  }
  CHECK(stream.finished() == stream.begun());
  CHECK(stream.read_after_free == 0);
  // The loader is free for another pass.
  lockstep::StagedPass again(loader, &stream);
  CHECK(all_of(again).size() == 8);
}

TEST_CASE("what the loader throws comes with the batch it was about") {
  struct Breaks {
    static std::size_t size() { return 6; }
    static lockstep::Example get(std::size_t index) {
      if (index == 4) throw std::runtime_error("no such sample");
      return {torch::full({1}, static_cast<float>(index)), torch::zeros({1})};
    }
  };
  lockstep::DataLoader loader{
      Breaks{}, lockstep::PermutationSampler{6, 0, 1, {.shuffle = false}}, {.batch_size = 2}};
  PlayedStream stream;
  lockstep::StagedPass pass(loader, &stream);
  ++pass;
  CHECK(pass->data[1].item<float>() == 3);
  CHECK_THAT(text_of<lockstep::DataError>([&] { ++pass; }), ContainsSubstring("batch 2"));
  CHECK(pass == std::default_sentinel);
}

TEST_CASE("copies that were begun before one failed keep their memory") {
  auto loader = loader_of(8);
  PlayedStream stream;
  stream.fails_at = 3;  // the target of the second batch
  {
    lockstep::StagedPass pass(loader, &stream);
    CHECK(pass->data[1].item<float>() == 1);
    CHECK_THROWS_AS(++pass, std::runtime_error);
  }
  CHECK(stream.finished() == stream.begun());
  CHECK(stream.read_after_free == 0);
}

TEST_CASE("without a stream the loader's batches are handed out, none ahead") {
  auto loader = loader_of(7);
  lockstep::StagedPass<decltype(loader)> pass(loader, nullptr);
  CHECK(all_of(pass) == std::vector<float>{0, 1, 2, 3, 4, 5, 6});
  std::size_t batches = 0;
  for (auto& batch : lockstep::StagedBatches{loader, torch::kCPU}) {
    CHECK(batch.data.is_cpu());
    ++batches;
  }
  CHECK(batches == 4);
}

TEST_CASE("the tensors of a batch are found in what holds them") {
  const auto count = [](auto batch) {
    std::size_t found = 0;
    lockstep::for_each_tensor(batch, [&](torch::Tensor& tensor) {
      tensor = tensor + 1;
      ++found;
    });
    return found;
  };
  const auto one = torch::zeros({1});
  CHECK(count(one) == 1);
  CHECK(count(torch::Tensor()) == 0);
  CHECK(count(lockstep::Example(one, one)) == 2);
  CHECK(count(torch::data::TensorExample(one)) == 1);
  CHECK(count(std::vector<torch::Tensor>{one, one, one}) == 3);
  CHECK(count(std::tuple(one, std::pair(one, std::optional(one)))) == 3);
  CHECK(count(std::map<std::string, std::vector<torch::Tensor>>{{"a", {one}}, {"b", {one, one}}}) == 3);
  struct Own {
    torch::Tensor image, mask;
    void each_tensor(const std::function<void(torch::Tensor&)>& visit) {
      visit(image);
      visit(mask);
    }
  };
  CHECK(count(Own{one, one}) == 2);
  CHECK(one.item<float>() == 0);
  static_assert(!lockstep::TensorBatch<std::vector<std::string>> && !lockstep::TensorBatch<int>);
}

}  // namespace staging_test
