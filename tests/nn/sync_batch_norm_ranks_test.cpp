// The joined batch of all ranks against one process that has it all.
#include "lockstep/nn/sync_batch_norm.hpp"

#include <numeric>
#include <random>

#include "lockstep/comm/cpu_comm.hpp"
#include "support/catch.hpp"
#include "support/ranks.hpp"

namespace sync_batch_norm_ranks_test {

using lockstep::detail::BatchNormGroup;
using torch::nn::BatchNormOptions;

namespace {

lockstep::CpuComm& shared_comm() {
  static lockstep::CpuComm comm{test_world()};
  return comm;
}

BatchNormGroup& shared_group() {
  static BatchNormGroup group{shared_comm()};
  return group;
}

struct Case {
  std::vector<std::int64_t> counts;  // samples, by rank
  std::vector<std::int64_t> inner;   // the sizes behind the channels
  std::int64_t channels = 3;
  torch::Dtype dtype = torch::kDouble;
  bool channels_last = false;
  double mean = 0, deviation = 1;

  [[nodiscard]] std::vector<std::int64_t> shape(std::int64_t samples) const {
    std::vector<std::int64_t> result{samples, channels};
    result.insert(result.end(), inner.begin(), inner.end());
    return result;
  }
  [[nodiscard]] torch::MemoryFormat format() const {
    if (!channels_last) return torch::MemoryFormat::Contiguous;
    return inner.size() == 2 ? torch::MemoryFormat::ChannelsLast : torch::MemoryFormat::ChannelsLast3d;
  }
};

// Each element within `tolerance` times the largest.
bool close(const torch::Tensor& actual, const torch::Tensor& expected, double tolerance) {
  if (actual.sizes() != expected.sizes()) return false;
  if (expected.numel() == 0) return true;
  const double scale = std::max(expected.abs().max().item<double>(), 1e-30);
  return (actual - expected).abs().max().item<double>() <= tolerance * scale;
}

// Three steps of a batch norm over the ranks of `comm`, each on its slice, and of torch's on the whole.
template <class Sync, class Plain>
void compare(Sync sync, Plain plain, const Case& the, lockstep::CpuComm& comm, double tolerance) {
  sync->to(the.dtype);
  plain->to(the.dtype);
  if (plain->options.affine()) {
    torch::NoGradGuard no_grad;
    for (auto* norm : {&plain->weight, &plain->bias}) norm->copy_(torch::randn({the.channels}, the.dtype));
    sync->weight.copy_(plain->weight);
    sync->bias.copy_(plain->bias);
  }
  const auto total = std::accumulate(the.counts.begin(), the.counts.end(), std::int64_t{0});
  const auto own = the.counts[static_cast<std::size_t>(comm.rank())];
  const auto before = std::accumulate(the.counts.begin(), the.counts.begin() + comm.rank(), std::int64_t{0});
  for (int step = 0; step < 3; ++step) {
    CAPTURE(step);
    const auto data = torch::randn(the.shape(total), the.dtype) * the.deviation + the.mean;
    const auto slope = torch::randn(the.shape(total), the.dtype);
    const auto slice = [&](const torch::Tensor& whole) {
      return whole.detach().narrow(0, before, own).clone().contiguous(the.format());
    };
    const auto whole = data.clone().requires_grad_();
    const auto expected = plain(whole);
    (expected * slope).sum().backward();
    const auto part = slice(data).requires_grad_();
    const auto actual = sync(part);
    (actual * slice(slope)).sum().backward();

    CHECK(actual.is_contiguous(the.format()));
    CHECK(close(actual, slice(expected), tolerance));
    CHECK(close(part.grad(), slice(whole.grad()), tolerance));
    if (!plain->options.affine()) continue;
    for (auto [mine, theirs] : {std::pair{sync->weight, plain->weight}, std::pair{sync->bias, plain->bias}}) {
      auto sum = mine.grad().clone();
      comm.all_reduce(sum).synchronize();
      CHECK(close(sum, theirs.grad(), tolerance));
    }
  }
  if (!plain->options.track_running_stats()) return;
  CHECK(close(sync->running_mean, plain->running_mean, tolerance));
  CHECK(close(sync->running_var, plain->running_var, tolerance));
  CHECK(torch::equal(sync->num_batches_tracked, plain->num_batches_tracked));
  for (const auto& running : {sync->running_mean, sync->running_var}) {
    auto all = torch::empty({comm.size(), the.channels}, the.dtype);
    comm.all_gather(all, running).synchronize();
    for (int rank = 0; rank < comm.size(); ++rank) CHECK(torch::equal(all[rank], running));  // the same bits
  }
}

void compare(const BatchNormOptions& options, const Case& the, double tolerance,
             lockstep::CpuComm& comm = shared_comm(), const BatchNormGroup& group = shared_group()) {
  CAPTURE(the.counts, the.inner, the.channels, options.eps(), options.affine(), the.channels_last);
  const bool one = the.inner.size() < 2, two = the.inner.size() == 2;
  if (one)
    compare(lockstep::SyncBatchNorm1d(options, group), torch::nn::BatchNorm1d(options), the, comm, tolerance);
  else if (two)
    compare(lockstep::SyncBatchNorm2d(options, group), torch::nn::BatchNorm2d(options), the, comm, tolerance);
  else
    compare(lockstep::SyncBatchNorm3d(options, group), torch::nn::BatchNorm3d(options), the, comm, tolerance);
}

}  // namespace

TEST_CASE("random shapes, unequal and empty batches equal one process's on the joined batch") {
  std::mt19937 random(7);
  const auto draw = [&](int least, int most) {
    return least + static_cast<std::int64_t>(random() % static_cast<unsigned>(most - least + 1));
  };
  for (int round = 0; round < 40; ++round) {
    Case the;
    for (int rank = 0; rank < test_world().size(); ++rank)
      the.counts.push_back(draw(0, 3) == 0 ? 0 : draw(1, 5));
    the.counts[static_cast<std::size_t>(draw(0, test_world().size() - 1))] += 2;
    for (auto left = draw(0, 3); left > 0; --left) the.inner.push_back(draw(1, 5));
    the.channels = draw(1, 9);
    the.dtype = draw(0, 1) ? torch::kDouble : torch::kFloat;
    the.channels_last = the.inner.size() >= 2 && draw(0, 1);
    auto options = BatchNormOptions(the.channels).eps(draw(0, 1) ? 1e-5 : 1e-2).affine(draw(0, 2) > 0);
    options.track_running_stats(draw(0, 3) > 0);
    if (draw(0, 1)) options.momentum(std::nullopt);
    torch::manual_seed(round);
    compare(options, the, the.dtype == torch::kDouble ? 1e-10 : 1e-4);
  }
}

TEST_CASE("a variance far below eps and a mean far from 0 survive the exchange") {
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(test_world().size()), 8);
  torch::manual_seed(1);
  compare(BatchNormOptions(3).momentum(1), {.counts = counts, .inner = {5, 5}, .deviation = 1e-7}, 1e-8);
  compare(BatchNormOptions(3).momentum(1),
          {.counts = counts, .inner = {5, 5}, .dtype = torch::kFloat, .deviation = 1e-5}, 1e-4);
  compare(BatchNormOptions(3).momentum(1), {.counts = counts, .inner = {5, 5}, .mean = 1e4}, 1e-8);
}

// Torch's own refuses one value.
TEST_CASE("one value in all, and none at all, change no variance and give nothing that is not finite",
          "[2+]") {
  lockstep::SyncBatchNorm2d norm(2, shared_group());
  const bool first = test_world().rank() == 0;
  const auto step = [&](bool has_one) {
    const auto x = torch::full({has_one ? 1 : 0, 2, 1, 1}, 3.0, torch::requires_grad());
    const auto y = norm(x);
    y.sum().backward();
    CHECK(y.sizes() == x.sizes());
    CHECK(x.grad().sizes() == x.sizes());
    CHECK(torch::allclose(y, torch::zeros_like(y), 0, 1e-3));  // the value is the mean
    CHECK(torch::allclose(x.grad(), torch::zeros_like(x), 0, 1e-3));
    CHECK(norm->weight.grad().isfinite().all().item<bool>());
  };
  step(first);
  CHECK(torch::allclose(norm->running_mean, torch::full({2}, 0.3)));
  CHECK(torch::equal(norm->running_var, torch::ones({2})));
  step(false);
  CHECK(torch::allclose(norm->running_mean, torch::full({2}, 0.3)));
  CHECK(torch::equal(norm->running_var, torch::ones({2})));
  CHECK(norm->num_batches_tracked.item<int>() == 2);
}

TEST_CASE("a sub-group joins the batches of its own ranks", "[3+]") {
  const int size = test_world().size();
  std::vector<int> middle(static_cast<std::size_t>(size - 2));
  std::iota(middle.begin(), middle.end(), 1);
  auto of_ends = shared_comm().new_group({0, size - 1}), of_middle = shared_comm().new_group(middle);
  lockstep::CpuComm& mine = of_ends ? *of_ends : *of_middle;
  std::vector<int> all(static_cast<std::size_t>(mine.size()));
  std::iota(all.begin(), all.end(), 0);
  const BatchNormGroup group{*mine.new_group(all)};
  CHECK(group.size() == mine.size());
  Case the{.counts = {}, .inner = {4}};
  for (int rank = 0; rank < mine.size(); ++rank) the.counts.push_back(2 + rank);
  torch::manual_seed(of_ends ? 1 : 2);
  compare(BatchNormOptions(3), the, 1e-10, mine, group);
  shared_comm().barrier();
}

TEST_CASE("a module given a communicator forms a group of its own") {
  lockstep::SyncBatchNorm1d norm(4, shared_comm());
  CHECK(norm->ranks() == test_world().size());
  norm(torch::randn({3, 4}, torch::requires_grad())).sum().backward();
}

}  // namespace sync_batch_norm_ranks_test
