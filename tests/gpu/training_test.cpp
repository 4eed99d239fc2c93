// The parts of training that have a way of their own on a GPU, each beside its way on the CPU; alone, without
// other ranks.
#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "lockstep/comm/local_comm.hpp"
#include "lockstep/data/generator.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/nn/detail/batch_norm_kernels.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/precision/precision.hpp"
#include "lockstep/train/captured_step.hpp"
#include "lockstep/train/checkpoint.hpp"
#include "lockstep/train/peak_memory.hpp"
#include "support/ranks.hpp"
#include "train/nets.hpp"

using lockstep::Implementation;

namespace {

// Each rank has a GPU of its own, and this is the only one it uses.
torch::Device gpu() {
  const auto count = static_cast<int>(torch::cuda::device_count());
  return {torch::kCUDA, static_cast<c10::DeviceIndex>(test_world().local_rank() % std::max(1, count))};
}

const lockstep::World& alone() {
  static const lockstep::World world;
  return world;
}

lockstep::Example batch_of(int step) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(step) + 1);
  const auto data = torch::randn({8, 6}, generator);
  return {data.to(gpu()), data.slice(1, 0, 3).argmax(1).to(gpu())};
}

const auto loss = [](TinyNet& net, const lockstep::Example& batch) {
  return torch::cross_entropy_loss(net(batch.data), batch.target);
};

TinyNet seeded_net() {
  torch::manual_seed(3);
  TinyNet net;
  net->to(gpu());
  return net;
}

bool close(const torch::Tensor& a, const torch::Tensor& b, double tolerance = 1e-4) {
  return torch::allclose(a.cpu().to(torch::kDouble), b.cpu().to(torch::kDouble), tolerance, tolerance);
}

}  // namespace

TEST_CASE("peak memory is that of the GPU", "[gpu]") {
  const auto bytes = std::int64_t{64} << 20;
  const auto held = torch::empty({bytes}, torch::TensorOptions(torch::kByte).device(gpu()));
  const auto before = lockstep::peak_memory();
  CHECK(before >= bytes);
  torch::empty({4 * bytes}, torch::TensorOptions(torch::kByte).device(gpu()));
  CHECK(lockstep::peak_memory() >= 5 * bytes);
}

TEST_CASE("a fused step under a scaler skips and counts on the GPU", "[gpu]") {
  auto parameter = torch::full({100}, 3.0F, torch::TensorOptions(gpu())).requires_grad_();
  lockstep::AdamW optimizer({parameter}, {.lr = 0.5, .implementation = Implementation::fused});
  lockstep::GradScaler scaler({.init_scale = 8});
  for (const double factor : {1.0, std::numeric_limits<double>::infinity(), 1.0}) {
    optimizer.zero_grad();
    scaler.scale((parameter * factor).sum()).backward();
    const auto stepped = scaler.step(optimizer);
    CHECK(!stepped.known());
    CHECK(stepped == (factor == 1));
    scaler.update();
  }
  CHECK(scaler.skipped() == 1);
  CHECK(scaler.get_scale() == 4);
  CHECK(torch::isfinite(parameter).all().item<bool>());
}

TEST_CASE("half precisions train on the GPU", "[gpu]") {
  const auto check = [](auto precision) {
    TinyNet net = seeded_net();
    lockstep::SGD optimizer(net->parameters(), {.lr = 0.3, .implementation = Implementation::fused});
    double first = 0, last = 0;
    for (int step = 0; step < 60; ++step) {
      optimizer.zero_grad();
      auto batch = batch_of(step % 4);
      const auto value = precision.forward([&] { return loss(net, batch); });
      precision.scale(value).backward();
      precision.step(optimizer);
      (step == 0 ? first : last) = value.template item<double>();
    }
    CHECK(last < first / 2);
  };
  check(lockstep::Tf32());
  check(lockstep::Bf16());
  check(lockstep::Fp16());
}

TEST_CASE("batches come over on a side stream, each whole", "[gpu]") {
  const auto data = torch::arange(4096 * 256).view({4096, 256}).to(torch::kFloat);
  lockstep::DataLoader loader{lockstep::TensorDataset{data, torch::arange(4096)},
                              lockstep::DistributedSampler{4096, 0, 1, {.shuffle = false}},
                              {.batch_size = 64, .num_workers = 2, .pin_memory = true}};
  std::int64_t row = 0;
  for (auto& batch : lockstep::StagedBatches{loader, gpu()}) {
    CHECK(batch.data.device() == gpu());
    // Work that keeps the GPU busy while the next batch comes.
    const auto weights = torch::ones({256, 256}, torch::TensorOptions(gpu()));
    auto product = batch.data;
    for (int i = 0; i < 20; ++i) product = product.matmul(weights).mul_(1.0 / 256);
    CHECK(torch::equal(batch.data.cpu(), data.narrow(0, row, batch.data.size(0))));
    CHECK(batch.target[0].item<std::int64_t>() == row);
    row += batch.data.size(0);
  }
  CHECK(row == 4096);
}

TEST_CASE("the state of a GPU's generator comes back", "[gpu]") {
  const auto state = lockstep::detail::default_generator_state(gpu());
  const auto first = torch::rand({16}, torch::TensorOptions(gpu()));
  lockstep::detail::set_default_generator_state(state, gpu());
  CHECK(torch::equal(torch::rand({16}, torch::TensorOptions(gpu())), first));
}

TEST_CASE("CUDA's kernels of batch norm give what the CPU's give", "[gpu]") {
  namespace parts = lockstep::detail;
  torch::manual_seed(5);
  for (const bool channels_last : {false, true}) {
    std::vector<torch::Tensor> inputs, gradients;
    for (const std::int64_t batch : {0, 5, 3}) {
      inputs.push_back(torch::randn({batch, 8, 4, 2}).add_(1));
      gradients.push_back(torch::randn({batch, 8, 4, 2}));
      if (!channels_last || batch == 0) continue;
      inputs.back() = inputs.back().contiguous(at::MemoryFormat::ChannelsLast);
      gradients.back() = gradients.back().contiguous(at::MemoryFormat::ChannelsLast);
    }
    const auto weight = torch::rand({8}).add_(0.5), bias = torch::rand({8});
    const auto run = [&](const parts::BatchNormKernels& kernels, const torch::Device& device) {
      std::vector<torch::Tensor> rows, found;
      for (const auto& input : inputs) rows.push_back(kernels.local(input.to(device), 1e-5));
      const auto mean = torch::zeros({8}).to(device), variance = torch::ones({8}).to(device);
      const auto joined = kernels.join(torch::stack(rows), inputs[1].to(device), 1e-5, {mean, variance, 0.1});
      torch::Tensor total;
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        const auto sums = kernels.sums(gradients[i].to(device), inputs[i].to(device), joined);
        total = total.defined() ? total + sums : sums;
      }
      for (std::size_t i = 1; i < inputs.size(); ++i) {
        const auto input = inputs[i].to(device);
        found.push_back(kernels.normalize(input, weight.to(device), bias.to(device), joined));
        found.push_back(
            kernels.input_gradient(gradients[i].to(device), input, weight.to(device), joined, total));
      }
      for (const auto& tensor : {joined.mean, joined.invstd, mean, variance, total}) found.push_back(tensor);
      return found;
    };
    const auto here = run(parts::cpu_batch_norm::kernels, torch::kCPU),
               there = run(parts::cuda_batch_norm::kernels, gpu());
    for (std::size_t i = 0; i < here.size(); ++i) CHECK(close(here[i], there[i]));
  }
}

TEST_CASE("a captured step makes the parameters of the plain one on the GPU", "[gpu][capture]") {
  lockstep::LocalComm comm(alone());
  const auto check = [&]<class Precision>(Precision precision, Precision other) {
    const auto optimizer_of = [](TinyNet& net) {
      return lockstep::AdamW(net->parameters(),
                             {.implementation = Implementation::fused,
                              .lr_tensor = torch::full({}, 0.01, torch::TensorOptions(gpu()))});
    };
    TinyNet net = seeded_net(), by_hand = seeded_net();
    auto optimizer = optimizer_of(net), plain = optimizer_of(by_hand);
    lockstep::CapturedStep step(gpu(), net, comm, optimizer, precision, loss);
    for (int i = 0; i < 12; ++i) {
      auto batch = batch_of(i);
      const double rate = 0.01 / (1 + i);
      optimizer.param_groups()[0].options().set_lr(rate);
      plain.param_groups()[0].options().set_lr(rate);
      const double value = step(batch).template item<double>();
      plain.zero_grad();
      const auto expected = other.forward([&] { return loss(by_hand, batch); });
      other.scale(expected).backward();
      other.step(plain);
      CHECK(value == Approx(expected.template item<double>()).epsilon(1e-4));
    }
    CHECK(step.captured());
    const auto one = net->parameters(), two = by_hand->parameters();
    for (std::size_t i = 0; i < one.size(); ++i) CHECK(close(one[i], two[i]));
  };
  check(lockstep::Fp32(), lockstep::Fp32());
  check(lockstep::Bf16(), lockstep::Bf16());
  check(lockstep::Fp16({.init_scale = 1024}), lockstep::Fp16({.init_scale = 1024}));
}
