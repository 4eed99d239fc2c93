#include "lockstep/optim/optimizers.hpp"

#include <torch/torch.h>

#include <vector>

#include "optim/common.hpp"

namespace adam_test {

using lockstep::Adam;
using lockstep::AdamOptions;
using lockstep::AdamState;
using lockstep::AdamW;
using lockstep::AdamWOptions;
using lockstep::Implementation;

namespace {

const AdamState& state_of(const torch::optim::Optimizer& optimizer, const torch::Tensor& parameter) {
  return static_cast<const AdamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
}

}  // namespace

TEST_CASE("AdamW is Adam with decoupled weight decay, on by default") {
  auto a = some_parameters(2), b = some_parameters(2), c = some_parameters(2);
  AdamW one(a);
  Adam two(b, {.weight_decay = 0.01, .decoupled = true}), plain(c);
  for (int step = 0; step < 5; ++step)
    for (auto* list : {&a, &b, &c}) set_gradients(*list, step);
  one.step();
  two.step();
  plain.step();
  CHECK(same_bits(a, b));
  CHECK_FALSE(same_bits(a, c));
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.push_back(lockstep::parameter_group({a[0]}, AdamWOptions{.lr = 0.5}));
  AdamW grouped(groups);
  CHECK(grouped.options().decoupled);
  CHECK(grouped.options().lr == 0.5);
}

TEST_CASE("a scaled step divides the gradients, and an infinite one is taken back") {
  auto a = some_parameters(3), b = some_parameters(3);
  Adam one(a, {.implementation = Implementation::fused}), two(b, {.implementation = Implementation::fused});
  const auto zero = torch::zeros({1}), found = torch::ones({1});
  for (int step = 0; step < 4; ++step) {
    set_gradients(a, step);
    set_gradients(b, step);
    for (auto& parameter : b) parameter.mutable_grad() = parameter.grad() * 1024;
    one.step();
    const auto before = b[0].detach().clone();
    two.step_scaled({torch::full({1}, 1024.0), found});
    CHECK(torch::equal(b[0], before));
    two.step_scaled({torch::full({1}, 1024.0), zero});
  }
  CHECK(same_bits(a, b));
  CHECK(state_of(two, b[0]).step.item<double>() == 4);
  Adam plain(a);
  CHECK_THROWS_AS(plain.step_scaled({torch::ones({1}), {}}), lockstep::UsageError);
}

TEST_CASE("what Adam saves is the same for the same training, and read by another") {
  for (const bool amsgrad : {false, true}) {
    auto a = some_parameters(4), b = some_parameters(4);
    Adam one(a, {.lr = 0.1, .betas = {0.8, 0.9}, .eps = 1e-4, .amsgrad = amsgrad});
    for (int step = 0; step < 3; ++step) {
      set_gradients(a, step);
      a[2].mutable_grad() = torch::Tensor();  // has no state
      one.step();
    }
    Adam two(b, {.implementation = Implementation::fused});
    set_gradients(b, 9);
    two.step();  // what it has is replaced
    load(two, saved(one));
    CHECK(saved(one) == saved(two));
    CHECK(two.options().betas == std::array<double, 2>{0.8, 0.9});
    CHECK(two.options().eps == 1e-4);
    CHECK(two.options().amsgrad == amsgrad);
    CHECK(two.options().implementation == Implementation::fused);
    CHECK(two.state().size() == 4);
    CHECK(torch::equal(state_of(one, a[0]).exp_avg_sq, state_of(two, b[0]).exp_avg_sq));
  }
  auto a = some_parameters(4);
  AdamW decoupled(a);
  Adam other(a);
  load(other, saved(decoupled));
  CHECK(other.options().decoupled);
  // Through LibTorch's own functions.
  std::stringstream stream;
  torch::save(decoupled, stream);
  AdamW read(a, {.lr = 5});
  torch::load(read, stream);
  CHECK(read.options().lr == 1e-3);
}

TEST_CASE("an archive whose states do not fit the parameters is refused, and changes nothing") {
  const auto load_of = [](auto&& damage) {
    std::vector<torch::Tensor> a{torch::ones({4}, torch::requires_grad())}, b = {a[0].detach().clone()};
    b[0].requires_grad_();
    Adam one(a), two(b, {.lr = 5});
    set_gradients(a, 0);
    set_gradients(b, 1);
    one.step();
    two.step();
    damage(static_cast<AdamState&>(*one.state().at(a[0].unsafeGetTensorImpl())), one.options());
    const std::string before = saved(two);
    std::string text = text_of<lockstep::CheckpointError>([&] { load(two, saved(one)); });
    CHECK((saved(two) == before) == !text.empty());
    return text;
  };
  const auto refused = [&](const char* words, auto&& damage) {
    CHECK_THAT(load_of(damage), ContainsSubstring(words));
  };
  refused("step of parameter 0 of group 0 is no count",
          [](AdamState& state, auto&) { state.step = torch::empty({0}); });
  refused("is no count", [](AdamState& state, auto&) { state.step = torch::zeros({}, torch::kLong); });
  refused("exp_avg of parameter 0 of group 0 is missing",
          [](AdamState& state, auto&) { state.exp_avg = torch::Tensor(); });
  refused("exp_avg of parameter 0 of group 0 is [4] int64",
          [](AdamState& state, auto&) { state.exp_avg = state.exp_avg.to(torch::kLong); });
  refused("lr = -1", [](AdamState&, AdamOptions& options) { options.lr = -1; });
  CHECK(load_of([](AdamState&, AdamOptions&) {}).empty());
}

TEST_CASE("parameters of several dtypes, and complex ones, are stepped in one group") {
  for (const auto implementation : {Implementation::automatic, Implementation::foreach}) {
    std::vector<torch::Tensor> all, alone;
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kComplexFloat, at::kDouble}) {
      torch::manual_seed(static_cast<int>(all.size()));
      all.push_back(torch::randn({5, 3}, type).requires_grad_());
      alone.push_back(all.back().detach().clone().requires_grad_());
    }
    Adam optimizer(all, {.lr = 0.1, .weight_decay = 0.1, .implementation = implementation});
    for (auto& parameter : all) parameter.mutable_grad() = torch::ones_like(parameter);
    optimizer.step();
    for (std::size_t i = 0; i < all.size(); ++i) {
      alone[i].mutable_grad() = torch::ones_like(alone[i]);
      Adam(std::vector<torch::Tensor>{alone[i]}, {.lr = 0.1, .weight_decay = 0.1}).step();
      CHECK(torch::equal(all[i], alone[i]));
    }
  }
}

TEST_CASE("Adam refuses what Python refuses, in words") {
  auto p = some_parameters(6);
  const auto refused = [&](const AdamOptions& options, const char* words) {
    refuses<lockstep::UsageError>([&] { Adam(p, options); }, words);
  };
  refused({.lr = -1}, "Adam: lr = -1");
  refused({.betas = {1.0, 0.9}}, "Adam: a beta = 1 of group 0 is not from 0 to below 1: choose another");
  refused({.betas = {0.9, -0.1}}, "beta");
  refused({.eps = -1}, "eps");
  refused({.weight_decay = -1}, "weight_decay");
  refused({.implementation = Implementation::foreach, .lr_tensor = torch::ones({})}, "lr_tensor");
  refuses<lockstep::UsageError>([&] { AdamW(p, {.lr = -1}); }, "AdamW: lr");

  auto complex = torch::randn({2}, at::kComplexFloat).requires_grad_();
  refuses<lockstep::UsageError>(
      [&] { Adam(std::vector<torch::Tensor>{complex}, {.implementation = Implementation::fused}); },
      "parameter 0 of group 0 (complex64 [2])");
  Adam optimizer(p);
  p[1].mutable_grad() = torch::ones({12}).to_sparse();
  CHECK(
      text_of<lockstep::GradientError>([&] { optimizer.step(); }) ==
      "Adam: the gradient of parameter 1 of group 0 (float32 [12]) is sparse, which Adam does not take: step "
      "this parameter with SGD");
}

}  // namespace adam_test
