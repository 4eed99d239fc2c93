#include "lockstep/optim/optimizers.hpp"

#include <torch/torch.h>

#include <vector>

#include "optim/common.hpp"

namespace sgd_test {

using lockstep::Implementation;
using lockstep::SGD;
using lockstep::SGDOptions;

TEST_CASE("the fast way of SGD has the bits of the loop over the parameters") {
  // foreach is the loop's operators on a CPU, so this holds the choice of the fused one to account, on any
  // LibTorch and with several threads.
  const int threads = at::get_num_threads();
  for (const int used : {1, 3})
    for (const auto type : {at::kFloat, at::kDouble})
      for (const double momentum : {0.0, 0.9})
        for (const int more : {0, 1, 2, 3}) {
          CAPTURE(used, type, momentum, more);
          at::set_num_threads(used);
          SGDOptions options{.lr = 0.07,
                             .momentum = momentum,
                             .dampening = more == 2 ? 0.2 : 0.0,
                             .weight_decay = more >= 1 ? 0.03 : 0.0,
                             .nesterov = more == 3 && momentum > 0,
                             .maximize = more == 2};
          auto a = some_parameters(1, type), b = some_parameters(1, type);
          for (auto* list : {&a, &b}) {
            torch::manual_seed(9);
            for (const std::int64_t size : {16, 48, 32784, 100007, 131072})
              list->push_back(torch::randn({size}).to(type).requires_grad_());
          }
          SGD fast(a, options);
          options.implementation = Implementation::foreach;
          SGD plain(b, options);
          for (int step = 0; step < 6; ++step) {
            set_gradients(a, step);
            set_gradients(b, step);
            fast.step();
            plain.step();
          }
          CHECK(same_bits(a, b));
        }
  at::set_num_threads(threads);
}

TEST_CASE("a fused step looks at strides, where ATen's operator does not") {
  auto parameter = torch::randn({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  const auto before = parameter.detach().clone();
  const auto gradient = torch::randn({2, 3, 4, 4});
  parameter.mutable_grad() = gradient;
  SGD optimizer(std::vector<torch::Tensor>{parameter}, {.lr = 0.5, .implementation = Implementation::fused});
  optimizer.step();
  CHECK(torch::allclose(parameter, before - 0.5 * gradient));
}

TEST_CASE("a loaded state whose layout is another than the parameter's is read as what it is") {
  const auto trained = [](const torch::Tensor& start, at::MemoryFormat format) {
    auto parameter = start.clone().contiguous(format).requires_grad_();
    return std::pair(parameter, SGD(std::vector<torch::Tensor>{parameter}, {.lr = 0.5, .momentum = 0.9}));
  };
  const auto start = torch::randn({2, 4, 4, 4}), gradient = torch::randn({2, 4, 4, 4});
  auto [plain, first] = trained(start, at::MemoryFormat::Contiguous);
  plain.mutable_grad() = gradient;
  first.step();
  torch::serialize::OutputArchive out;
  first.save(out);
  std::stringstream stream;
  out.save_to(stream);
  auto [last, second] = trained(plain.detach(), at::MemoryFormat::ChannelsLast);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  second.load(in);
  last.mutable_grad() = gradient;
  first.step();
  second.step();
  CHECK(torch::equal(last, plain));
}

TEST_CASE("groups have options of their own, and rates that a schedule sets") {
  auto p = some_parameters(3);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.push_back(lockstep::parameter_group({p[0]}, SGDOptions{.lr = 1, .weight_decay = 0.5}));
  groups.emplace_back(std::vector<torch::Tensor>{p[1]});
  SGD optimizer(groups, {.lr = 0.25});
  const auto first = p[0].detach().clone(), second = p[1].detach().clone();
  p[0].mutable_grad() = torch::ones_like(p[0]);
  p[1].mutable_grad() = torch::ones_like(p[1]);
  optimizer.step();
  CHECK(torch::allclose(p[0], first - (1 + 0.5 * first)));
  CHECK(torch::allclose(p[1], second - 0.25));
  CHECK(optimizer.param_groups()[0].options().get_lr() == 1);
  optimizer.param_groups()[1].options().set_lr(2);
  CHECK(optimizer.options(1).lr == 2);
  optimizer.step();
  CHECK(torch::allclose(p[1], second - 2.25));
  CHECK(optimizer.options(0).weight_decay == 0.5);

  optimizer.add_param_group(lockstep::parameter_group({p[2]}, SGDOptions{.lr = 3}));
  CHECK(optimizer.options(2).lr == 3);
  CHECK_THROWS_AS(optimizer.add_param_group(torch::optim::OptimizerParamGroup({p[1]})), lockstep::UsageError);
}

TEST_CASE("a rate that is a tensor is read at each step, and set in place") {
  for (const auto implementation :
       {Implementation::automatic, Implementation::foreach, Implementation::fused}) {
    const auto rate = torch::full({1}, 0.5);
    auto p = torch::zeros({4}).requires_grad_(), q = torch::zeros({4}).requires_grad_();
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<torch::Tensor>{p});
    groups.emplace_back(std::vector<torch::Tensor>{q});
    SGD optimizer(groups, {.implementation = implementation, .lr_tensor = rate});
    p.mutable_grad() = torch::ones({4});
    q.mutable_grad() = torch::ones({4});
    optimizer.step();
    rate.fill_(0.25);
    optimizer.step();
    CHECK(torch::equal(p, torch::full({4}, -0.75)));
    CHECK(torch::equal(q, torch::full({4}, -1.0)));  // its rate is its own
    optimizer.param_groups()[0].options().set_lr(1);
    CHECK(rate.item<float>() == 1);
    CHECK(optimizer.param_groups()[0].options().get_lr() == 1);
    CHECK(optimizer.param_groups()[1].options().get_lr() == 0.5);
  }
}

TEST_CASE("groups that are given one tensor for their rates have a rate each") {
  const auto rate = torch::full({1}, 0.5);
  std::vector<torch::Tensor> p;
  for (int i = 0; i < 4; ++i) p.push_back(torch::zeros({4}).requires_grad_());
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{p[0]});
  for (int i : {1, 2}) groups.push_back(lockstep::parameter_group({p[i]}, SGDOptions{.lr_tensor = rate}));
  SGD optimizer(groups, {.lr = 1});
  optimizer.add_param_group(lockstep::parameter_group({p[3]}, SGDOptions{.lr_tensor = rate}));
  for (std::size_t g = 1; g < 4; ++g) optimizer.param_groups()[g].options().set_lr(static_cast<double>(g));
  for (std::size_t g = 1; g < 4; ++g)
    CHECK(optimizer.param_groups()[g].options().get_lr() == static_cast<double>(g));
}

TEST_CASE("a closure computes the loss with gradients on") {
  auto x = torch::full({1}, 3.0).requires_grad_();
  SGD optimizer(std::vector<torch::Tensor>{x}, {.lr = 0.1});
  const torch::NoGradGuard no_grad;
  const auto loss = optimizer.step([&] {
    optimizer.zero_grad();
    auto value = (x * x).sum();
    value.backward();
    return value;
  });
  CHECK(loss.item<double>() == Approx(9));
  CHECK(x.item<double>() == Approx(3 - 0.6));
}

TEST_CASE("a step counts as a change, so that autograd refuses an older graph") {
  auto x = torch::ones({3}).requires_grad_();
  const auto loss = (x * x).sum();
  x.mutable_grad() = torch::ones({3});
  for (const auto implementation : {Implementation::automatic, Implementation::fused}) {
    const auto version = x._version();
    SGD(std::vector<torch::Tensor>{x}, {.lr = 0.1, .implementation = implementation}).step();
    CHECK(x._version() > version);
  }
  CHECK_THROWS_AS(loss.backward(), c10::Error);
}

TEST_CASE("sparse gradients are stepped, or refused by name") {
  auto table = torch::ones({4, 2}).requires_grad_();
  const auto sparse = torch::sparse_coo_tensor(torch::tensor({{1, 3}}), torch::ones({2, 2}), {4, 2});
  table.mutable_grad() = sparse;
  const std::vector<torch::Tensor> list{table};
  for (const double momentum : {0.0, 0.9}) {
    const auto before = table.detach().clone();
    SGD(list, {.lr = 0.5, .momentum = momentum}).step();
    CHECK(torch::equal(table, before - 0.5 * sparse.to_dense()));
  }
  SGD fused(list, {.implementation = Implementation::fused});
  CHECK(text_of<lockstep::GradientError>([&] { fused.step(); }) ==
        "SGD: the gradient of parameter 0 of group 0 (float32 [4, 2]) is sparse, which a fused step does not "
        "take: "
        "choose another implementation");
  SGD decayed(list, {.weight_decay = 0.1});
  refuses<lockstep::GradientError>([&] { decayed.step(); }, "weight decay");
}

TEST_CASE("an archive that does not fit is refused in words, and nothing is changed") {
  auto a = some_parameters(5);
  SGD one(a, {.lr = 0.1, .momentum = 0.9});
  set_gradients(a, 0);
  one.step();
  const std::string bytes = saved(one);
  SGD fewer(std::vector<torch::Tensor>{a[0], a[1]}, {.lr = 3});
  CHECK(
      text_of<lockstep::CheckpointError>([&] { load(fewer, bytes); }) ==
      "SGD: group 0 has 5 parameters in the archive and 2 in the optimizer: construct the optimizer with the "
      "groups that it had when it was saved");
  CHECK(fewer.options().lr == 3);
  auto other = some_parameters(5);
  std::swap(other[0], other[1]);
  SGD swapped(other, {.lr = 3});
  refuses<lockstep::CheckpointError>([&] { load(swapped, bytes); },
                                     "momentum_buffer of parameter 0 of group 0");
  CHECK(swapped.state().empty());
  lockstep::Adam adam(a, {.lr = 0.1});
  adam.step();
  refuses<lockstep::CheckpointError>([&] { load(one, saved(adam)); }, "'beta1'");
  CHECK(saved(one) == bytes);
  struct Nothing {
    void save(torch::serialize::OutputArchive&) const {}
  };
  refuses<lockstep::CheckpointError>([&] { load(one, saved(Nothing())); },
                                     "the archive is not one of this optimizer");
}

TEST_CASE("SGD refuses what Python refuses, in words") {
  auto p = some_parameters(6);
  const auto refused = [&](const SGDOptions& options, const std::string& words) {
    refuses<lockstep::UsageError>([&] { SGD(p, options); }, words);
  };
  refuses<lockstep::UsageError>([&] { SGD(std::vector<torch::Tensor>{}); },
                                "SGD got no parameters: pass those of a model, such as model->parameters()");
  refused({.lr = -1}, "SGD: lr = -1 of group 0 is not 0 or more: choose another");
  refused({.lr = std::nan("")}, "lr = nan");
  refused({.momentum = -0.1}, "momentum");
  refused({.weight_decay = -0.1}, "weight_decay");
  refused({.nesterov = true}, "nesterov");
  refused({.momentum = 0.9, .dampening = 0.1, .nesterov = true}, "nesterov");
  refused({.lr_tensor = torch::ones({2})}, "2 elements");
  CHECK_NOTHROW(SGD(p, {}));

  p.push_back(p[3]);
  refused({}, "SGD: parameter 5 of group 0 (float32 [7]) is in that group twice and would be stepped twice");
  const auto refused_groups = [](std::vector<torch::optim::OptimizerParamGroup> groups, const char* words) {
    refuses<lockstep::UsageError>([&] { SGD{groups}; }, words);
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{p[0]});
  groups.emplace_back(std::vector<torch::Tensor>{p[1], p[0]});
  refused_groups(groups, "SGD: parameter 1 of group 1 (float32 [8, 12]) is in group 0, too: leave it in one");
  groups.clear();
  groups.emplace_back(std::vector<torch::Tensor>{p[0]}, std::make_unique<torch::optim::SGDOptions>(0.1));
  refused_groups(groups, "another optimizer's options");
  refuses<lockstep::UsageError>([&] { SGD(std::vector<torch::Tensor>{p[0] * 2}); }, "no leaf");
}

}  // namespace sgd_test
