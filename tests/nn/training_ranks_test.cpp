// A convolutional network with SyncBatchNorm in DistributedDataParallel against one process on the joined batch.
#include <torch/torch.h>

#include <numeric>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/nn/sync_batch_norm.hpp"
#include "support/catch.hpp"
#include "support/mib.hpp"
#include "support/ranks.hpp"

namespace training_ranks_test {

namespace nn = torch::nn;

namespace {

// Norm1d is torch's, or lockstep's.
template <class Norm1d>
struct SmallConvNetImpl : nn::Module {
  SmallConvNetImpl() {
    const auto layer = [](int in, int out) {
      return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1)), nn::BatchNorm2d(out),
                            nn::ReLU(), nn::MaxPool2d(2));
    };
    one = this->register_module("one", layer(1, 4));
    two = this->register_module("two", layer(4, 6));
    hidden = this->register_module("hidden", nn::Linear(6 * 2 * 2, 8));
    norm = this->register_module("norm", Norm1d(8));
    out = this->register_module("out", nn::Linear(8, 5));
    this->to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return out(torch::tanh(norm(hidden(two->forward(one->forward(x)).flatten(1)))));
  }
  nn::Sequential one, two;
  nn::Linear hidden{nullptr}, out{nullptr};
  Norm1d norm{nullptr};
};
template <class Norm1d>
using SmallConvNet = nn::ModuleHolder<SmallConvNetImpl<Norm1d>>;

// How far the parameters and buffers of two models are apart, relative to the largest of each tensor.
double distance(const nn::Module& actual, const nn::Module& expected) {
  double largest = 0;
  const auto compare = [&](const auto& left, const auto& right) {
    REQUIRE(left.keys() == right.keys());
    for (const auto& item : right) {
      const auto theirs = item.value().to(torch::kDouble), ours = left[item.key()].to(torch::kDouble);
      const double scale = std::max(theirs.abs().max().template item<double>(), 1e-3);
      largest = std::max(largest, (ours - theirs).abs().max().template item<double>() / scale);
    }
  };
  compare(actual.named_parameters(), expected.named_parameters());
  compare(actual.named_buffers(), expected.named_buffers());
  return largest;
}

// Trains 6 steps on all ranks and in one process; `prepare(net, comm)` before. Some batches are unequal, one
// rank's may be empty; each loss is a mean, weighted so that the sum is the mean over all.
template <class Norm1d, class Prepare>
double distance_after_training(Prepare&& prepare) {
  const int ranks = test_world().size(), rank = test_world().rank();
  torch::manual_seed(5);
  SmallConvNet<Norm1d> net;
  torch::manual_seed(5);
  SmallConvNet<nn::BatchNorm1d> alone;
  lockstep::CpuComm comm{test_world()};
  prepare(net, comm);
  lockstep::DistributedDataParallel ddp{net, comm, {.bucket_cap_mb = lockstep_test::mib({256, 2048})}};
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD reference(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 6; ++step) {
    std::vector<std::int64_t> counts;
    for (int r = 0; r < ranks; ++r) counts.push_back(step == 4 && r == 1 ? 0 : 4 + (step + r) % 3);
    const auto total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    const auto before = std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
    const auto own = counts[static_cast<std::size_t>(rank)];
    torch::manual_seed(100 + step);
    const auto data = torch::randn({total, 1, 8, 8}, torch::kDouble);
    const auto target = torch::randint(5, {total}, torch::kLong);

    optimizer.zero_grad();
    const auto loss = torch::nn::functional::cross_entropy(
        ddp(data.narrow(0, before, own)), target.narrow(0, before, own),
        nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
    ddp.backward(loss * ranks / total);
    optimizer.step();

    reference.zero_grad();
    nn::functional::cross_entropy(alone(data), target).backward();
    reference.step();
  }
  return distance(*net, *alone);
}

}  // namespace

TEST_CASE("a wrapped network with SyncBatchNorm trains as one process on the joined batch") {
  const double apart = distance_after_training<lockstep::SyncBatchNorm1d>([](auto& net,
                                                                             lockstep::CpuComm& comm) {
    CHECK(lockstep::convert_sync_batchnorm(net, comm) == std::vector<std::string>{"one.1", "two.1", "norm"});
  });
  CHECK(apart < 1e-6);
}

TEST_CASE("with the statistics of each rank alone it does not", "[2+]") {
  CHECK(distance_after_training<nn::BatchNorm1d>([](auto&, lockstep::CpuComm&) {}) > 1e-2);
}

TEST_CASE("a model wrapped before it is converted trains alike") {
  torch::manual_seed(1);
  lockstep::CpuComm comm{test_world()};
  nn::Sequential early(nn::Linear(3, 4), nn::BatchNorm1d(4), nn::Linear(4, 1));
  auto late = nn::Sequential(std::dynamic_pointer_cast<nn::SequentialImpl>(early->clone()));
  lockstep::convert_sync_batchnorm(early, comm);
  lockstep::DistributedDataParallel first{*early, comm}, second{*late, comm};
  torch::optim::SGD one(early->parameters(), 0.1), two(late->parameters(), 0.1);
  lockstep::convert_sync_batchnorm(late, comm);
  torch::manual_seed(test_world().rank());
  for (int step = 0; step < 3; ++step) {
    const auto x = torch::randn({4, 3});
    first.before_forward();
    second.before_forward();
    one.zero_grad();
    two.zero_grad();
    first.backward(early->forward(x).square().mean());
    second.backward(late->forward(x).square().mean());
    one.step();
    two.step();
  }
  CHECK(distance(*late, *early) == 0);
}

}  // namespace training_ranks_test
