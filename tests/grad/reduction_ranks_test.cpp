// Gradients of every rank, averaged on every rank.
#include <barrier>
#include <thread>

#include "grad/models.hpp"
#include "support/mib.hpp"
#include "support/written.hpp"

namespace reduction_ranks_test {

using lockstep::DdpOptions;
using lockstep::DistributedDataParallel;
using lockstep::GradientError;
using lockstep::GradientStorage;

namespace {
bool same_on_all_ranks(const at::Tensor& tensor) {
  at::Tensor least = tensor.detach().clone(), most = least.clone();
  shared_comm().all_reduce(least, lockstep::ReduceOp::min).synchronize();
  shared_comm().all_reduce(most, lockstep::ReduceOp::max).synchronize();
  return torch::equal(least, most);
}
}  // namespace

TEST_CASE(
    "gradients are the average over the ranks, under both kinds of zero_grad, before and after the rebuild, "
    "by a bare loss.backward() too") {
  const auto& world = test_world();
  const bool set_to_none = GENERATE(false, true), bare = GENERATE(false, true);
  CAPTURE(set_to_none, bare);
  torch::manual_seed(1);
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  for (int step = 0; step < 4; ++step) {
    CAPTURE(step);
    auto loss = [&](Net& model, int rank) { return model(batch_of(rank, step)).pow(2).mean(); };
    const auto expected = expected_gradients(net, world.size(), loss);
    optimizer.zero_grad(set_to_none);
    if (bare)
      loss(net, world.rank()).backward();
    else
      ddp.backward(loss(net, world.rank()));
    check_close(gradients(net->parameters()), expected);
    optimizer.step();
  }
}

TEST_CASE("construction gives every rank the parameters and buffers of rank 0") {
  torch::manual_seed(test_world().rank());
  torch::nn::Sequential model(torch::nn::Linear(3, 3), torch::nn::BatchNorm1d(3));
  model->named_buffers()["1.running_mean"].fill_(test_world().rank() + 7);
  model->named_buffers()["1.num_batches_tracked"].fill_(test_world().rank() + 5);
  DistributedDataParallel ddp{model, shared_comm()};
  torch::manual_seed(0);
  torch::nn::Linear zero(3, 3);
  CHECK(torch::equal(model->parameters()[0], zero->weight));
  CHECK(torch::equal(model->parameters()[1], zero->bias));
  CHECK(model->named_buffers()["1.running_mean"][0].item<float>() == 7);
  CHECK(model->named_buffers()["1.num_batches_tracked"].item<int>() == 5);
}

TEST_CASE("buckets are rebuilt once, in the order in which rank 0's gradients became ready") {
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), {.bucket_cap_mb = lockstep_test::mib({100})}};
  const std::vector<std::vector<std::size_t>> first{{0, 1, 2, 3, 4, 5}};
  auto step = [&] {
    net->zero_grad();
    ddp.backward(net(batch_of(0, 0)).sum());
  };
  CHECK(ddp.buckets() == first);
  step();
  CHECK(ddp.buckets() == first);
  step();
  const auto rebuilt = ddp.buckets();
  CHECK(rebuilt.size() >= 3);
  CHECK(rebuilt.front().front() >= 4);  // of the last layer
  step();
  CHECK(ddp.buckets() == rebuilt);
}

TEST_CASE("gradients lie in the buckets and stay there") {
  Net net;
  DistributedDataParallel ddp{net, shared_comm()};
  for (int step = 0; step < 3; ++step) {
    net->zero_grad(step % 2 == 0);
    ddp.backward(net(batch_of(0, 0)).sum());
  }
  const auto weight = net->one->weight;
  const void* place = weight.grad().data_ptr();
  CHECK(weight.grad().storage().data() == net->one->bias.grad().storage().data());
  CHECK_FALSE(weight.grad().is_view());
  net->zero_grad(false);
  ddp.backward(net(batch_of(0, 0)).sum());
  CHECK(weight.grad().data_ptr() == place);
  net->zero_grad(true);
  ddp.backward(net(batch_of(0, 0)).sum());
  CHECK(weight.grad().data_ptr() == place);
}

TEST_CASE("a tied parameter is reduced and stepped once") {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() {
      weight = register_parameter("weight", torch::ones({3}));
      register_parameter("again", weight);
    }
    torch::Tensor forward(const torch::Tensor& x) { return (x * weight * weight).sum(); }
    torch::Tensor weight;
  } model;
  DistributedDataParallel ddp{model, shared_comm()};
  REQUIRE(ddp.parameters().size() == 1);
  torch::optim::SGD optimizer(ddp.parameters(), 0.25);
  for (int step = 0; step < 2; ++step) {
    model.zero_grad();
    ddp.backward(ddp(torch::full({3}, static_cast<float>(test_world().rank() + 1))));
    const float mean = (test_world().size() + 1) / 2.0F;
    CHECK(torch::allclose(model.weight.grad(), 2 * mean * model.weight.detach()));
    optimizer.step();
  }
}

TEST_CASE("frozen parameters stay out") {
  Net net;
  net->one->weight.requires_grad_(false);
  DistributedDataParallel ddp{net, shared_comm()};
  for (int step = 0; step < 2; ++step) ddp.backward(net(batch_of(0, 0)).sum());
  CHECK_FALSE(net->one->weight.grad().defined());
  CHECK(ddp.parameters().size() == 6);
  CHECK(ddp.buckets()[0].size() == 5);
}

TEST_CASE("hooks stack with the user's own and go with the object") {
  const auto& world = test_world();
  Net net;
  int called = 0;
  net->one->weight.register_hook([&](const torch::Tensor& grad) {
    ++called;
    return grad * 2;
  });
  auto loss = [](Net& model, int rank) { return (model(torch::ones({1, 4})) * (rank + 1)).sum(); };
  {
    DistributedDataParallel ddp{net, shared_comm()};
    ddp.backward(loss(net, world.rank()));
    CHECK(called == 1);
    const auto doubled = net->one->weight.grad().clone();
    CHECK(torch::allclose(doubled, 2 * expected_gradients(net, world.size(), loss)[0]));
  }
  net->zero_grad();
  if (world.rank() == 0) loss(net, 0).backward();  // a hook left behind would wait for the other ranks
  DistributedDataParallel again{net, shared_comm()};
  net->zero_grad();
  again.backward(loss(net, world.rank()));
  CHECK(torch::allclose(net->one->bias.grad(), expected_gradients(net, world.size(), loss)[1]));
}

TEST_CASE("no_sync accumulates, and the backward after it reduces the sum") {
  const auto& world = test_world();
  torch::manual_seed(3);
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  for (int step = 0; step < 3; ++step) {
    auto loss = [&](Net& model, int rank, int micro) {
      return model(batch_of(rank, 10 * step + micro)).pow(2).sum();
    };
    auto total = [&](Net& model, int rank) {
      return loss(model, rank, 0) + loss(model, rank, 1) + loss(model, rank, 2);
    };
    const auto expected = expected_gradients(net, world.size(), total);
    net->zero_grad(step % 2 == 0);
    {
      const auto guard = ddp.no_sync();
      ddp.backward(loss(net, world.rank(), 0));
      loss(net, world.rank(), 1).backward();
    }
    ddp.backward(loss(net, world.rank(), 2));
    check_close(gradients(net->parameters()), expected);
  }
}

TEST_CASE("a parameter used under no_sync alone is reduced with the next backward") {
  const auto& world = test_world();
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    {
      const auto guard = ddp.no_sync();
      ddp.backward(net(torch::full({1, 4}, world.rank() + 1.0F)).sum());
    }
    net->use_two = false;
    ddp.backward(net(torch::full({1, 4}, world.rank() + 1.0F)).sum());
    net->use_two = true;
    CHECK(net->two->weight.grad().abs().sum().item<double>() > 0);
    CHECK(same_on_all_ranks(net->two->weight.grad()));  // each rank's own had another input
  }
}

TEST_CASE("several losses: one backward each, or one for all") {
  const auto& world = test_world();
  Net net;
  DistributedDataParallel ddp{net, shared_comm()};
  auto both = [](Net& model, int rank) {
    const auto out = model(batch_of(rank, 0));
    return out.sum() + out.pow(2).sum();
  };
  const auto expected = expected_gradients(net, world.size(), both);
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    auto out = net(batch_of(world.rank(), 0));
    ddp.backward(out.sum(), true);
    ddp.backward(out.pow(2).sum());
    check_close(gradients(net->parameters()), expected);
    net->zero_grad();
    out = net(batch_of(world.rank(), 0));
    ddp.backward({out.sum(), out.pow(2).sum()});
    check_close(gradients(net->parameters()), expected);
  }
}

TEST_CASE("holder, module and shared_ptr are accepted, and the object may be moved") {
  auto module = std::make_shared<NetImpl>();
  Net holder(module);
  DistributedDataParallel a{*module, shared_comm()};
  DistributedDataParallel b{module, shared_comm()};
  CHECK(&a.module() == module.get());
  CHECK(b.module() == module);
  auto make = [&] { return DistributedDataParallel{holder, shared_comm()}; };
  auto first = make();
  auto moved = std::move(first);
  moved.backward(moved(batch_of(0, 0)).sum());
  CHECK(moved.module().get() == module.get());
}

TEST_CASE("a gradient keeps the layout of its parameter") {
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 4, 3));
  conv->to(torch::kFloat);
  {
    torch::NoGradGuard no_grad;
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }
  DistributedDataParallel ddp{conv, shared_comm()};
  for (int step = 0; step < 2; ++step) {
    conv->zero_grad();
    torch::manual_seed(test_world().rank());
    ddp.backward(ddp(torch::randn({2, 3, 5, 5})).pow(2).sum());
    CHECK(conv->weight.grad().strides() == conv->weight.strides());
  }
}

TEST_CASE("parameters of several dtypes have buckets of their own") {
  struct MixedImpl : torch::nn::Module {
    torch::Tensor single = register_parameter("single", torch::ones({4}));
    torch::Tensor twice = register_parameter("twice", torch::ones({4}, torch::kDouble));
    torch::Tensor last = register_parameter("last", torch::ones({2}));
    torch::Tensor forward(float x) { return (single * x).sum() + (twice * x).sum() + (last * x).sum(); }
  } model;
  DistributedDataParallel ddp{model, shared_comm()};
  CHECK(ddp.buckets() == std::vector<std::vector<std::size_t>>{{1}, {0, 2}});
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    ddp.backward(ddp(static_cast<float>(test_world().rank())));
    const double mean = (test_world().size() - 1) / 2.0;
    for (const auto& parameter : model.parameters())
      CHECK(torch::allclose(parameter.grad(), torch::full_like(parameter, mean)));
  }
}

TEST_CASE("two models in one program: whatever a backward reaches is reduced") {
  const auto& world = test_world();
  torch::nn::Linear generator(2, 2), critic(2, 1);
  DistributedDataParallel for_generator{generator, shared_comm()};
  DistributedDataParallel for_critic{critic, shared_comm()};
  for (int step = 0; step < 3; ++step) {
    const auto noise = torch::full({1, 2}, world.rank() + 1.0F);
    const float mean = (world.size() + 1) / 2.0F;
    critic->zero_grad();
    generator->zero_grad();
    for_critic.backward(critic(generator(noise).detach()).sum() + critic(generator(noise)).sum());
    CHECK(torch::allclose(generator->weight.grad(),
                          critic->weight.detach()[0].unsqueeze(1).expand({2, 2}) * mean));
    generator->zero_grad();
    critic->zero_grad();
    for_generator.backward(critic(generator(noise)).sum());
    // d bias of the generator is the critic's weight on every rank; d weight scales with the noise.
    CHECK(torch::allclose(generator->bias.grad(), critic->weight.detach()[0]));
    CHECK(same_on_all_ranks(critic->weight.grad()));
    CHECK(torch::allclose(generator->weight.grad(),
                          critic->weight.detach()[0].unsqueeze(1).expand({2, 2}) * mean));
  }
}

TEST_CASE("models in two threads: neither joins the other's backward") {
  const auto& world = test_world();
  // Communicators of their own, made in the same order on every rank.
  lockstep_test::TestedComm first(world), second(world);
  std::barrier together(2);
  const auto train = [&](lockstep_test::TestedComm& comm, bool bare, double* found) {
    std::vector<at::Tensor> list{torch::ones({4}).requires_grad_(true)};
    DistributedDataParallel ddp{list, comm};
    for (int step = 0; step < 5; ++step) {
      list[0].mutable_grad().reset();
      const auto loss = (list[0] * (world.rank() + 1.0)).sum();
      if (bare) {
        together.arrive_and_wait();  // the other one is inside its backward
        loss.backward();
        *found = std::max(*found, std::abs(list[0].grad()[0].item<double>() - (world.size() + 1) / 2.0));
        together.arrive_and_wait();
      } else {
        const auto hook = list[0].register_hook([&](const at::Tensor&) {
          together.arrive_and_wait();
          together.arrive_and_wait();  // until the bare one has returned
        });
        ddp.backward(loss);
        list[0].remove_hook(hook);
      }
    }
  };
  double error = 0, none = 0;
  std::thread other([&] { train(second, true, &error); });
  train(first, false, &none);
  other.join();
  CHECK(error < 1e-6);
}

TEST_CASE("a backward that throws ends the reductions of all models that it reached") {
  const auto& world = test_world();
  torch::nn::Linear first(2, 2), second(2, 1);
  DistributedDataParallel one{first, shared_comm()};
  DistributedDataParallel other{second, shared_comm()};
  for (int step = 0; step < 4; ++step) {
    first->zero_grad();
    second->zero_grad();
    auto between = first(torch::full({1, 2}, world.rank() + 1.0F));
    if (step == 1) between.register_hook([](const at::Tensor&) -> at::Tensor { throw Thrown("in between"); });
    const auto loss = second(between).sum();
    if (step == 1) {
      CHECK_THROWS_AS(one.backward(loss), Thrown);
    } else {
      one.backward(loss);
      CHECK(same_on_all_ranks(first->weight.grad()));
      CHECK(same_on_all_ranks(second->weight.grad()));
    }
  }
}

TEST_CASE("rank 0's buffers reach all before a forward in training, not after a no_sync pass") {
  const auto& world = test_world();
  torch::nn::BatchNorm1d norm(2);
  DistributedDataParallel ddp{norm, shared_comm()};
  auto count = [&] { return norm->num_batches_tracked.item<int>(); };
  norm->num_batches_tracked.fill_(world.rank() * 100);
  (void)ddp(torch::randn({4, 2}));
  CHECK(count() == 1);
  norm->num_batches_tracked.fill_(world.rank() * 100);
  {
    const auto guard = ddp.no_sync();
    (void)ddp(torch::randn({4, 2}));  // still sends: the pass before was not under no_sync
    CHECK(count() == 1);
    norm->num_batches_tracked.fill_(world.rank() * 100);
    (void)ddp(torch::randn({4, 2}));
    CHECK(count() == world.rank() * 100 + 1);
  }
  ddp.sync_buffers();
  CHECK(count() == 1);
  const auto own = [&] { norm->num_batches_tracked.fill_(world.rank() * 100); };
  own();
  DistributedDataParallel without{norm, shared_comm(), {.broadcast_buffers = false}};
  CHECK(count() == world.rank() * 100);
  (void)without(torch::randn({4, 2}));
  CHECK(count() == world.rank() * 100 + 1);
  DistributedDataParallel at_first{norm, shared_comm(), {.forward_sync_buffers = false}};
  CHECK(count() == 1);
  own();
  (void)at_first(torch::randn({4, 2}));
  CHECK(count() == world.rank() * 100 + 1);
}

TEST_CASE("a buffer that grew within its storage is broadcast whole") {
  const int rank = test_world().rank();
  torch::nn::BatchNorm1d norm(8);
  norm->running_mean.resize_({4});
  DistributedDataParallel ddp{norm, shared_comm()};
  norm->running_mean.resize_({8}).fill_(rank + 1);
  ddp.sync_buffers();
  CHECK(norm->running_mean.equal(torch::ones({8})));
  norm->running_mean.as_strided_({4}, {2}).fill_(rank + 2);
  ddp.sync_buffers();
  CHECK(norm->running_mean.equal(torch::full({4}, 2.0)));
}

TEST_CASE("of several live wrappers of a model one reduces each backward, and the others ignore it") {
  const auto& world = test_world();
  torch::manual_seed(1);
  Net net;
  DdpOptions options = small_buckets();
  options.gradients = GENERATE(GradientStorage::in_bucket, GradientStorage::gradient_as_bucket_view,
                               GradientStorage::separate);
  DistributedDataParallel first{net, shared_comm(), options}, second{net, shared_comm(), options};
  const auto step = [&](int number, auto&& backward) {
    CAPTURE(number);
    const auto loss = [&](Net& model, int rank) { return model(batch_of(rank, number)).pow(2).mean(); };
    const auto expected = expected_gradients(net, world.size(), loss);
    net->zero_grad();
    backward();
    check_close(gradients(net->parameters()), expected);
  };
  const auto reductions = [&] { return std::pair(first.report().reductions, second.report().reductions); };
  const auto loss_by = [&](auto& ddp, int number) {
    return ddp(batch_of(world.rank(), number)).pow(2).mean();
  };
  for (int number = 0; number < 3; ++number) step(number, [&] { loss_by(first, number).backward(); });
  CHECK(reductions() == std::pair<std::int64_t, std::int64_t>(3, 0));
  for (int number = 3; number < 6; ++number) step(number, [&] { loss_by(second, number).backward(); });
  CHECK(reductions() == std::pair<std::int64_t, std::int64_t>(3, 3));
  // ddp.backward needs no forward of its own wrapper.
  step(6, [&] { second.backward(loss_by(first, 6)); });
  CHECK(reductions() == std::pair<std::int64_t, std::int64_t>(3, 4));
  step(7, [&] {
    {
      const auto guard = first.no_sync();
      (loss_by(first, 7) * 0.5).backward();
      CHECK(reductions().first == 3);
    }
    (loss_by(first, 7) * 0.5).backward();
  });
  CHECK(reductions() == std::pair<std::int64_t, std::int64_t>(4, 4));
}

TEST_CASE("a bare backward that none of several live wrappers expects throws and reduces nothing") {
  const auto& world = test_world();
  Net net;
  DistributedDataParallel first{net, shared_comm(), small_buckets()};
  DistributedDataParallel second{net, shared_comm(), small_buckets()};
  const auto loss = [&] { return net(batch_of(world.rank(), 0)).pow(2).mean(); };
  const auto refused = [&] { CHECK_THROWS_AS(loss().backward(), GradientError); };
  refused();
  first(batch_of(world.rank(), 0)).sum().backward();
  refused();
  CHECK(first.report().reductions == 1);
  CHECK(second.report().reductions == 0);
  net->zero_grad();
  second.backward(loss());
  check_close(gradients(net->parameters()), expected_gradients(net, world.size(), [](Net& model, int rank) {
                return model(batch_of(rank, 0)).pow(2).mean();
              }));
}

TEST_CASE("a wrapper made again after parameters were frozen works beside the old one, which says so") {
  const auto& world = test_world();
  Net net;
  DistributedDataParallel old{net, shared_comm(), small_buckets()};
  const auto loss = [&] { return net(batch_of(world.rank(), 0)).pow(2).mean(); };
  old.backward(loss());
  for (torch::Tensor& parameter : net->one->parameters()) parameter.requires_grad_(false);
  const auto says = [&](const char* text) { refuses<lockstep::Error>([&] { old.backward(loss()); }, text); };
  says("construct it again");
  DistributedDataParallel made_again{net, shared_comm(), small_buckets()};
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    step == 1 ? made_again(batch_of(world.rank(), 0)).pow(2).mean().backward() : made_again.backward(loss());
    CHECK(made_again.report().reductions == step + 1);
  }
  says("a newer one of the same parameters is alive");
}

TEST_CASE("mistakes of a loop by hand are warned of, once, on one rank") {
  const auto& world = test_world();
  const auto warns = [&](int rank, const char* text, auto&& loop) {
    Net net;
    DistributedDataParallel ddp{net, shared_comm()};
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    const std::string said = written(2, [&] {
      for (int i = 0; i < 2; ++i) loop(net, ddp, optimizer);
    });
    CHECK(std::count(said.begin(), said.end(), '\n') == (text && world.rank() == rank ? 1 : 0));
    if (text && world.rank() == rank) CHECK_THAT(said, ContainsSubstring(text));
  };

  SECTION("ranks that read the same samples") {
    for (const bool equal : {true, false})
      warns(1, equal ? "first gradients of ranks 0 and 1 are equal" : nullptr,
            [&](Net& net, auto& ddp, auto&) {
              ddp.backward(net(batch_of(equal ? 0 : world.rank(), 0)).pow(2).mean());
            });
  }
  SECTION("batches that are equal, although dropout differs") {
    for (const bool equal : {true, false})
      warns(1, equal ? "first batches of ranks 0 and 1 are equal" : nullptr, [&](Net& net, auto& ddp, auto&) {
        torch::manual_seed(world.rank());
        const torch::Tensor samples = torch::arange(32.).reshape({8, 4}) + (equal ? 0 : world.rank());
        lockstep::DataLoader loader(lockstep::TensorDataset{samples, torch::zeros({8})},
                                    lockstep::DistributedSampler(8, 0, 1), {.batch_size = 4});
        for (auto& batch : loader) ddp.backward(net(torch::dropout(batch.data, 0.5, true)).sum());
      });
  }
  SECTION("a step inside no_sync") {
    for (const bool inside : {true, false})
      warns(0, inside && world.size() > 1 ? "parameters changed inside no_sync" : nullptr,
            [&](Net& net, auto& ddp, auto& optimizer) {
              for (int step = 0; step < 4; ++step) {
                const auto accumulating = ddp.no_sync(step % 2 == 0);
                ddp.backward(net(batch_of(world.rank(), step)).sum());
                if (inside || step % 2 == 1) optimizer.step();
              }
            });
  }
  SECTION("a batch that the last rank does not have") {
    const auto samples = static_cast<std::size_t>(world.size()) + 1;
    const lockstep::TensorDataset data{
        torch::arange(4. * static_cast<double>(samples)).reshape({-1, 4}).to(torch::kFloat),
        torch::zeros({static_cast<std::int64_t>(samples)})};
    const std::string text =
        "batch 2 of a pass is drawn, of which rank " + std::to_string(world.size() - 1) + " has 1";
    const auto run = [&](bool expected, const auto& sampler) {
      warns(0, expected && world.size() > 1 ? text.c_str() : nullptr, [&](Net& net, auto& ddp, auto&) {
        lockstep::DataLoader loader(data, sampler, {.batch_size = 1});
        for (auto& batch : loader) net(batch.data);  // an evaluation
        int steps = 0;
        for (auto& batch : loader) {
          ddp.backward(net(batch.data).sum());
          ++steps;
        }
        while (steps++ < 2) ddp.backward_empty();
      });
    };
    run(true, lockstep::DistributedSampler(samples, world, {.pad = false}));
    run(false, lockstep::DistributedSampler(samples, world));
    run(true, lockstep::EvaluationSampler(samples, world));
    // LibTorch's own loader.
    warns(0, world.size() > 1 ? text.c_str() : nullptr, [&](Net& net, auto& ddp, auto&) {
      auto loader = torch::data::make_data_loader(
          torch::data::datasets::TensorDataset({torch::ones({static_cast<std::int64_t>(samples), 4})})
              .map(torch::data::transforms::Stack<torch::data::TensorExample>()),
          lockstep::DistributedSampler(samples, world, {.pad = false}), 1);
      int steps = 0;
      for (auto& batch : *loader) {
        ddp.backward(net(batch.data + ++steps + world.rank()).sum());
      }
      while (steps++ < 2) ddp.backward_empty();
    });
    // Ranks that accumulate reduce equally often, here once.
    warns(0, nullptr, [&](Net& net, auto& ddp, auto&) {
      lockstep::DataLoader loader(data, lockstep::DistributedSampler(samples, world, {.pad = false}),
                                  {.batch_size = 1});
      std::size_t i = 0;
      for (auto& batch : loader) {
        const auto accumulating = ddp.no_sync(++i < loader.size());
        ddp.backward(net(batch.data).sum());
      }
    });
  }
}

}  // namespace reduction_ranks_test
