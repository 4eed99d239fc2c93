// StagedBatches without a device. tests/gpu/training_test.cpp copies batches to a GPU.
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

lockstep::TensorDataset numbers(std::int64_t samples) {
  const auto data = torch::arange(samples).to(torch::kFloat);
  return {data, data + 100};
}

auto loader_of(std::int64_t samples, std::int64_t workers = 0) {
  return lockstep::DataLoader{
      numbers(samples),
      lockstep::DistributedSampler{static_cast<std::size_t>(samples), 0, 1, {.shuffle = false}},
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
