// SyncBatchNorm in one process: alone, and with a rank that is made up.
#include "lockstep/nn/sync_batch_norm.hpp"

#include <sstream>

#include "lockstep/comm/local_comm.hpp"
#include "nn/twin.hpp"
#include "support/refuses.hpp"

namespace sync_batch_norm_test {

using lockstep::SyncBatchNorm1d;
using lockstep::SyncBatchNorm2d;
using lockstep::SyncBatchNorm3d;
using torch::nn::BatchNormOptions;

namespace {

// Ranks that do not meet.
template <class Failure>
struct Broken : Twin {
  [[nodiscard]] at::Tensor gather(const at::Tensor&) override { throw Failure("rank 1 has not come", 0); }
  void sum(const at::Tensor&) override { throw Failure("rank 1 has not come", 0); }
};

// Meets in forward alone.
struct Alone : Twin {
  [[nodiscard]] int size() const override { return 1; }
};

struct BrokenInBackward : Twin {
  void sum(const at::Tensor&) override { throw lockstep::PeerError("rank 1 failed first: why", 0); }
};

}  // namespace

TEST_CASE("a batch norm alone is torch's") {
  lockstep::LocalComm comm{lockstep::World::from_environment()};
  torch::manual_seed(1);
  const auto x = torch::randn({4, 3, 5, 5});
  SyncBatchNorm2d sync(3, comm);
  torch::nn::BatchNorm2d plain(3);
  CHECK(sync->ranks() == 1);
  for (int step = 0; step < 2; ++step) {
    const auto ours = sync(x), theirs = plain(x);
    CHECK(torch::equal(ours, theirs));
    CHECK(std::string(ours.grad_fn()->name()) == theirs.grad_fn()->name());  // nothing in between
  }
  CHECK(torch::equal(sync->running_var, plain->running_var));
  CHECK(sync->num_batches_tracked.item<int>() == 2);
}

TEST_CASE("gradients of gradients are refused before the ranks meet") {
  const auto twin = std::make_shared<Twin>();
  SyncBatchNorm1d norm(3, group_of(twin));
  const auto x = torch::randn({4, 3}, torch::requires_grad());
  const auto y = norm(x).square().sum();
  const auto calls = twin->calls;
  CHECK_THROWS_AS(torch::autograd::grad({y}, {x}, {}, true, true), lockstep::GradientError);
  CHECK(twin->calls == calls);
  torch::autograd::grad({y}, {x});
  CHECK(twin->calls == calls + 1);
}

TEST_CASE("one collective forward, one backward, and none for what needs none") {
  const auto twin = std::make_shared<Twin>();
  SyncBatchNorm2d norm(3, group_of(twin));
  norm(torch::randn({2, 3, 4, 4})).sum().backward();  // an input without a gradient: nothing to exchange
  CHECK(twin->calls == 1);
  CHECK(norm->weight.grad().defined());
  norm(torch::randn({2, 3, 4, 4}, torch::requires_grad())).sum().backward();
  CHECK(twin->calls == 3);
  norm->eval();
  norm(torch::randn({2, 3, 4, 4}, torch::requires_grad())).sum().backward();
  SyncBatchNorm2d untracked(BatchNormOptions(3).track_running_stats(false), group_of(twin));
  untracked->eval();
  untracked(torch::randn({2, 3, 4, 4}));
  CHECK(twin->calls == 3);
}

TEST_CASE("an input that does not fit is refused, in words") {
  const auto of = [](auto norm, torch::IntArrayRef shape, torch::Dtype dtype = torch::kFloat) {
    return text_of<lockstep::UsageError>([&] { norm(torch::ones(shape, dtype)); });
  };
  SyncBatchNorm1d one(4, group_of());
  SyncBatchNorm2d two(4, group_of());
  SyncBatchNorm3d three(4, group_of());
  CHECK(of(one, {2, 4}).empty());
  CHECK(of(one, {2, 4, 3}).empty());
  CHECK(of(two, {2, 4, 3, 3}).empty());
  CHECK(of(three, {2, 4, 3, 3, 3}).empty());
  CHECK(of(two, {2, 4, 3}) ==
        "SyncBatchNorm2d of 4 channels takes an input [N, C, H, W] with 4 channels, but got [2, 4, 3] "
        "float32");
  const auto refused = [](auto norm, const torch::Tensor& x, const char* words) {
    refuses<lockstep::UsageError>([&] { norm(x); }, words);
  };
  refused(one, torch::ones({4}), "[N, C] or [N, C, L] with 4 channels, but got [4] float32");
  refused(one, torch::ones({2, 4, 3, 3}), "got [2, 4, 3, 3]");
  refused(three, torch::ones({2, 4, 3, 3}), "[N, C, D, H, W]");
  refused(two, torch::ones({2, 5, 3, 3}), "with 4 channels, but got [2, 5, 3, 3]");
  refused(two, torch::ones({2, 4, 3, 3}, torch::kLong), "int64, which is no floating type");
  refused(two, torch::Tensor(), "got none");
  refused(two, torch::ones({2, 4, 3, 3}, torch::kMeta), "the input is on meta");
  for (const bool training : {true, false}) {
    two->train(training);
    refused(two, torch::ones({2, 4, 3, 3}, torch::kDouble), "float64, which does not fit its float32");
    CHECK(of(two, {2, 4, 3, 3}, torch::kBFloat16).empty());
  }
  CHECK_THROWS_AS(two(torch::ones({2, 4, 3})), lockstep::UsageError);
}

TEST_CASE("an input of another dtype is refused at one rank as at several") {
  SyncBatchNorm2d one(4, group_of(std::make_shared<Alone>()));
  CHECK(one->ranks() == 1);
  CHECK_THROWS_AS(one(torch::ones({2, 4, 3, 3}, torch::kDouble)), lockstep::UsageError);
}

TEST_CASE("training without ranks is refused, and eval is not") {
  SyncBatchNorm2d norm(4);
  CHECK(norm->ranks() == 0);
  const auto x = torch::randn({2, 4, 3, 3});
  refuses<lockstep::UsageError>([&] { norm(x); }, "call convert_sync_batchnorm(model, comm) before training");
  norm->eval();
  CHECK(norm(x).defined());
}

TEST_CASE("ranks that do not meet are reported with the module and the kind of failure") {
  const auto x = torch::randn({2, 4, 3, 3}, torch::requires_grad());
  const auto thrown = [&]<class Failure>(std::type_identity<Failure>) {
    SyncBatchNorm2d norm(4, group_of(std::make_shared<Broken<Failure>>()));
    norm->synchronize(group_of(std::make_shared<Broken<Failure>>()), "SyncBatchNorm2d 'layer1.1'");
    return text_of<Failure>([&] { norm(x); });
  };
  const std::string text = "SyncBatchNorm2d 'layer1.1', forward: rank 1 has not come";
  CHECK(thrown(std::type_identity<lockstep::TimeoutError>()) == text);
  CHECK(thrown(std::type_identity<lockstep::PeerError>()) == text);
  CHECK(thrown(std::type_identity<lockstep::CommunicationError>()) == text);
  CHECK(thrown(std::type_identity<lockstep::MismatchError>()) == text);

  SyncBatchNorm2d norm(4, group_of(std::make_shared<BrokenInBackward>()));
  const auto y = norm(x).sum();
  CHECK(text_of<lockstep::PeerError>([&] { y.backward(); }) ==
        "SyncBatchNorm2d of 4 channels, backward: rank 1 failed first: why");
}

TEST_CASE("float16 and bfloat16 keep their dtype, with statistics in float32") {
  const auto dtype = GENERATE(torch::kHalf, torch::kBFloat16);
  torch::manual_seed(3);
  SyncBatchNorm2d sync(4, group_of());
  torch::nn::BatchNorm2d plain(4);
  const auto data = torch::randn({3, 4, 5, 5}).to(dtype);
  const auto x = data.clone().requires_grad_();
  const auto both = torch::cat({data, data}).requires_grad_();
  const auto y = sync(x), expected = plain(both);
  const auto slope = torch::randn({3, 4, 5, 5}).to(dtype);
  (y * slope).sum().backward();
  (expected * torch::cat({slope, slope})).sum().backward();
  CHECK(y.scalar_type() == dtype);
  CHECK(x.grad().scalar_type() == dtype);
  CHECK(sync->weight.grad().scalar_type() == torch::kFloat);
  CHECK(torch::allclose(y, expected.narrow(0, 0, 3), 1e-2, 1e-2));
  CHECK(torch::allclose(x.grad(), both.grad().narrow(0, 0, 3), 3e-2, 3e-2));
  CHECK(torch::allclose(sync->running_var, plain->running_var, 1e-3, 1e-4));
}

TEST_CASE(
    "in float16 and bfloat16 a gradient that is mostly an offset loses no more than torch's own batch norm") {
  const auto dtype = GENERATE(torch::kHalf, torch::kBFloat16);
  torch::manual_seed(4);
  const auto data = torch::randn({8, 4, 6, 6}).to(dtype), slope = (torch::randn({8, 4, 6, 6}) + 10).to(dtype);
  const auto gradient = [&](auto& norm, torch::Dtype type) {
    const auto both = torch::cat({data, data}).to(type).requires_grad_();
    const auto x = std::is_same_v<std::decay_t<decltype(norm)>, SyncBatchNorm2d>
                       ? data.to(type).detach().requires_grad_()
                       : both;
    (norm(x) * (x.size(0) == 8 ? slope : torch::cat({slope, slope})).to(type)).sum().backward();
    return x.grad().narrow(0, 0, 8).to(torch::kDouble);
  };
  SyncBatchNorm2d sync(4, group_of());
  torch::nn::BatchNorm2d plain(4), exact(4);
  exact->to(torch::kDouble);
  const auto truth = gradient(exact, torch::kDouble);
  const auto error = [&](const torch::Tensor& found) { return (found - truth).abs().max().item<double>(); };
  CHECK(error(gradient(sync, dtype)) < 2 * error(gradient(plain, dtype)) + 1e-6);
}

TEST_CASE("a clone has tensors of its own and meets the same ranks") {
  const auto twin = std::make_shared<Twin>();
  SyncBatchNorm2d norm(BatchNormOptions(3).momentum(0.5), group_of(twin));
  norm->to(torch::kDouble);
  const auto copy = std::dynamic_pointer_cast<lockstep::SyncBatchNormImpl<2>>(norm->clone());
  REQUIRE(copy);
  copy->forward(torch::randn({2, 3, 4, 4}, torch::kDouble));
  CHECK(twin->calls == 1);
  CHECK(norm->num_batches_tracked.item<int>() == 0);
  CHECK(copy->num_batches_tracked.item<int>() == 1);
}

TEST_CASE("a batch norm says what it is") {
  std::ostringstream text;
  text << SyncBatchNorm3d(BatchNormOptions(8).momentum(std::nullopt).affine(false));
  CHECK(text.str() ==
        "lockstep::SyncBatchNorm3d(8, eps=1e-05, momentum=None, affine=false, track_running_stats=true)");
}

}  // namespace sync_batch_norm_test
