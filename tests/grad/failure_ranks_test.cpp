// What may happen inside a backward: the reduction ends on every rank, and the next one works.
#include <sstream>

#include "grad/models.hpp"
#include "support/mib.hpp"

namespace failure_ranks_test {

using lockstep::DistributedDataParallel;
using lockstep::GradientError;
using lockstep::PeerError;

namespace {

void check_good_backward(Net& net, DistributedDataParallel<Net, lockstep_test::TestedComm>& ddp) {
  auto loss = [&](Net& model, int rank) { return model(batch_of(rank, 77)).pow(2).mean(); };
  const auto expected = expected_gradients(net, test_world().size(), loss);
  net->zero_grad();
  ddp.backward(loss(net, test_world().rank()));
  check_close(gradients(net->parameters()), expected);
}

}  // namespace

TEST_CASE(
    "a backward that throws on one rank, early or late, is an error on all and is followed by a good one") {
  const int rank = test_world().rank(), culprit = test_world().size() - 1;
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  const int steps_before = GENERATE(0, 1, 2);
  const bool late = GENERATE(false, true);
  CAPTURE(steps_before, late);
  for (int step = 0; step < steps_before; ++step) check_good_backward(net, ddp);
  auto loss = [&] {
    auto x = batch_of(rank, 1).requires_grad_(true);
    if (rank == culprit && late) x = throwing(x);  // after the gradients of all layers
    auto out = net(x).sum();
    if (rank == culprit && !late) out = throwing(out);
    return out;
  };
  net->zero_grad();
  if (rank == culprit) {
    CHECK_THROWS_AS(ddp.backward(loss()), Thrown);
  } else {
    refuses<PeerError>([&] { ddp.backward(loss()); },
                       fmt::format("backward threw on rank {}: thrown inside backward", culprit));
  }
  for (const auto& parameter : ddp.parameters()) CHECK_FALSE(parameter.grad().defined());
  check_good_backward(net, ddp);
  check_good_backward(net, ddp);
}

TEST_CASE("a backward that throws on all ranks is followed by a good one") {
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  for (int step = 0; step < 3; ++step) {
    CHECK_THROWS_AS(ddp.backward(throwing(net(batch_of(0, 0)).sum())), Thrown);
    check_good_backward(net, ddp);
  }
}

TEST_CASE("a loss without a graph on one rank is an error on all") {
  const int rank = test_world().rank();
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  if (rank == 0)
    CHECK_THROWS_AS(ddp.backward(torch::ones({})), GradientError);
  else
    CHECK_THROWS_AS(ddp.backward(net(batch_of(rank, 0)).sum()), PeerError);
  check_good_backward(net, ddp);
}

TEST_CASE("a loss that is no number or has no graph is named with its shape and a remedy") {
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  const auto refused = [&](const torch::Tensor& loss, const char* words) {
    refuses<GradientError>([&] { ddp.backward(loss); }, words);
  };
  refused(net(batch_of(0, 0)), "[5, 2] float32 is no single number: take its mean()");
  refused(net(batch_of(0, 0)).sum().detach(), "[] float32 does not require grad");
  refused({}, "the loss is undefined");
  check_good_backward(net, ddp);
}

TEST_CASE("parameters whose data were replaced after construction are named") {
  Net net;
  std::stringstream file;
  torch::save(net, file);
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  check_good_backward(net, ddp);
  SECTION("by to()") {
    net->to(torch::kDouble);
    net->to(torch::kFloat);
  }
  SECTION("by torch::load") {
    torch::load(net, file);
  }
  const std::string words = "the data of parameter 'one.weight' was replaced";
  refuses<lockstep::UsageError>([&] { ddp.backward(net(batch_of(0, 0)).sum()); }, words);
  // Before a bare loss.backward(), too.
  refuses<lockstep::UsageError>([&] { ddp(batch_of(0, 0)).sum().backward(); }, words);
}

TEST_CASE("a parameter that was unfrozen after construction is named") {
  Net net;
  net->two->bias.requires_grad_(false);
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  net->two->bias.requires_grad_(true);
  refuses<lockstep::UsageError>([&] { ddp.backward(net(batch_of(0, 0)).sum()); }, "'two.bias' was unfrozen");
}

TEST_CASE("a backward in which no parameter takes part is an error on all ranks that says so") {
  const int rank = test_world().rank();
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  for (int step = 0; step < 3; ++step) {
    CAPTURE(step);
    const auto alone = torch::ones({}, torch::requires_grad());
    refuses<GradientError>([&] { ddp.backward(rank == 0 ? alone * 2 : net(batch_of(rank, 0)).sum()); },
                           "rank 0 (none of the parameters took part)");
    check_good_backward(net, ddp);
  }
}

TEST_CASE("a parameter without a gradient on one rank is named on every rank, in that very backward") {
  const int rank = test_world().rank(), culprit = test_world().size() - 1;
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  for (int step = 0; step < 3; ++step) {
    CAPTURE(step);
    net->zero_grad(step % 2 == 0);
    net->use_two = rank != culprit;
    const auto loss = net(batch_of(rank, 0)).sum();
    net->use_two = true;
    refuses<GradientError>(
        [&] { ddp.backward(loss); },
        fmt::format("rank {} (parameter 2 'two.weight', parameter 3 'two.bias')", culprit));
    check_good_backward(net, ddp);
  }
}

TEST_CASE("a parameter without a gradient is found in dtypes that are looked at together, too") {
  const int rank = test_world().rank(), culprit = test_world().size() - 1;
  struct Mixed : torch::nn::Module {
    Mixed() {
      half = register_parameter("half", torch::ones({3, 2}, torch::kHalf));
      wide = register_parameter("wide", torch::ones({4}));
      lost = register_parameter("lost", torch::ones({5}, torch::kHalf));
    }
    torch::Tensor half, wide, lost;
  } model;
  DistributedDataParallel ddp{model, shared_comm()};
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    auto loss = model.half.sum().to(torch::kFloat) + model.wide.sum();
    const bool all = step == 1;
    if (rank != culprit || all) loss = loss + model.lost.sum().to(torch::kFloat);
    if (all)
      ddp.backward(loss);
    else
      CHECK_THROWS_AS(ddp.backward(loss), GradientError);
  }
  CHECK_FALSE(model.lost.grad().defined());
}

TEST_CASE("a gradient that is not a number is no error") {
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    ddp.backward(net(batch_of(0, 0)).sum() * (test_world().rank() == 0 ? NAN : 1));
    CHECK(net->three->bias.grad().isnan().all().item<bool>());
  }
}

TEST_CASE("an output that the loss ignores gives zeros") {
  struct TwoImpl : torch::nn::Module {
    torch::Tensor a = register_parameter("a", torch::ones({2, 2}));
    torch::Tensor forward(int part) { return a.unbind(0)[static_cast<std::size_t>(part)].sum(); }
  } model;
  DistributedDataParallel ddp{model, shared_comm()};
  ddp.backward(ddp(0));
  CHECK(torch::equal(model.a.grad(), torch::tensor({{1.0F, 1.0F}, {0.0F, 0.0F}})));
}

TEST_CASE("re-entrant backwards, also several over one layer") {
  const auto& world = test_world();
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  for (int step = 0; step < 4; ++step) {
    CAPTURE(step);
    auto run = [&](Net& model, int rank, bool checkpointed) {
      auto two = [&](const torch::Tensor& x) {
        return checkpointed ? lockstep::checkpoint(model->two, x) : model->two(x);
      };
      const auto x = torch::relu(model->one(batch_of(rank, step)));
      return model->three(two(torch::relu(two(x)))).pow(2).mean();
    };
    const auto expected =
        expected_gradients(net, world.size(), [&](Net& m, int rank) { return run(m, rank, false); });
    net->zero_grad(step % 2 == 0);
    ddp.backward(run(net, world.rank(), true));
    check_close(gradients(net->parameters()), expected);
  }
}

TEST_CASE("more gradients than in the first backward are an error on all ranks, not a wrong sum") {
  const int rank = test_world().rank();
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  check_good_backward(net, ddp);
  check_good_backward(net, ddp);
  auto loss = [&] {
    const auto x = net->one(batch_of(rank, 0));
    if (rank != 0) return net->three(net->two(x)).sum();
    return net->three(lockstep::checkpoint(net->two, lockstep::checkpoint(net->two, x))).sum();
  };
  if (rank == 0)
    refuses<GradientError>([&] { ddp.backward(loss()); }, "got 2 gradients in this backward");
  else
    CHECK_THROWS_AS(ddp.backward(loss()), PeerError);
  check_good_backward(net, ddp);
}

TEST_CASE("create_graph is refused") {
  Net net;
  DistributedDataParallel ddp{net, shared_comm()};
  CHECK_THROWS_AS(ddp.backward(net(batch_of(0, 0)).sum(), false, true), GradientError);
  CHECK_THROWS_AS(net(batch_of(0, 0)).sum().backward({}, false, true), GradientError);
  net->zero_grad();
  check_good_backward(net, ddp);
}

TEST_CASE("a sparse gradient that no one could foresee is refused by name on every rank") {
  const auto table = torch::ones({5, 3}, torch::requires_grad());
  std::vector<at::Tensor> list{table};
  DistributedDataParallel ddp{list, shared_comm()};
  refuses<lockstep::Error>(
      [&] {
        ddp.backward(torch::embedding(table, torch::tensor({1, 2}), -1, false, /*sparse=*/true).sum());
      },
      "parameter 0 '0' is sparse");
}

TEST_CASE("a hook that is dropped on one rank is an error on all that names the parameter") {
  const int rank = test_world().rank(), culprit = test_world().size() - 1;
  const int steps_before = GENERATE(0, 2);
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  for (int step = 0; step < steps_before; ++step) check_good_backward(net, ddp);
  if (rank == culprit) {
    const auto accumulator = torch::autograd::impl::grad_accumulator(net->one->bias);
    REQUIRE(accumulator->post_hooks().size() == 1);
    accumulator->del_post_hook(reinterpret_cast<std::uintptr_t>(accumulator->post_hooks()[0].get()));
  }
  net->zero_grad();
  refuses<GradientError>([&] { ddp.backward(net(batch_of(rank, 0)).sum()); },
                         fmt::format("rank {} (parameter 1 'one.bias'", culprit));
  for (const auto& parameter : ddp.parameters()) CHECK_FALSE(parameter.grad().defined());
}

TEST_CASE("a gradient in compressed rows is refused by name on every rank") {
  const auto square = torch::ones({3, 3}, torch::requires_grad());
  std::vector<at::Tensor> list{torch::ones({2}, torch::requires_grad()), square};
  DistributedDataParallel ddp{list, shared_comm(), {.find_unused_parameters = true}};
  // Autograd itself gives none to a dense parameter; what is put there by hand counts all the same.
  square.mutable_grad() = torch::eye(3).to_sparse_csr();
  refuses<lockstep::Error>([&] { ddp.backward(list[0].sum()); },
                           "parameter 1 '1' is of a layout without strides");
}

TEST_CASE("a rank that cannot come to its backward tells the others, and the next one is good") {
  const int rank = test_world().rank(), culprit = test_world().size() - 1;
  const bool counted = GENERATE(false, true), accumulating = GENERATE(false, true);
  CAPTURE(counted, accumulating);
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    const auto failure = std::make_exception_ptr(lockstep::DataError("no picture 17"));
    if (rank == culprit) {
      std::optional<decltype(ddp.no_sync())> guard;
      if (accumulating) guard.emplace(ddp.no_sync());
      ddp.fail_backward(failure, counted);
    } else {
      const auto loss = net(batch_of(rank, 0)).sum();
      CHECK_THROWS_AS(counted ? (void)ddp.backward_sum(loss, 3) : ddp.backward(loss), PeerError);
    }
    CHECK_FALSE(net->one->weight.grad().defined());
    check_good_backward(net, ddp);
  }
}

TEST_CASE("a bare backward that throws is found at the next one") {
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  auto x = batch_of(0, 0).requires_grad_(true);
  for (const bool bare : {false, true}) {
    CHECK_THROWS_AS(net(throwing(x)).sum().backward(), Thrown);
    const auto next = net(batch_of(0, 0)).sum();
    refuses<GradientError>([&] { bare ? next.backward() : ddp.backward(next); }, "ddp.backward(loss)");
    check_good_backward(net, ddp);
  }
}

TEST_CASE("models that differ: one and the same error on every rank", "[2+]") {
  const auto& world = test_world();
  const bool odd = world.rank() == world.size() - 1;
  const int kind = GENERATE(0, 1, 2, 3, 4, 5, 6, 7);
  CAPTURE(kind);
  torch::nn::Module model;
  const auto type = kind == 1 && odd ? torch::kDouble : torch::kFloat;
  const std::int64_t rows = kind == 0 && odd ? 12 : 10;
  if (kind == 3 && odd) model.register_parameter("bias", torch::zeros({10, 5}));
  const auto weight = kind == 6 && odd ? torch::zeros({5, rows}).t() : torch::zeros({rows, 5}, type);
  model.register_parameter(kind == 2 && odd ? "other" : "weight", weight, !(kind == 4 && odd));
  if (!(kind == 3 && odd)) model.register_parameter("bias", torch::zeros({10, 5}));
  if (kind == 5 && odd) model.register_parameter("more", torch::zeros({1}));
  model.register_buffer("mean", torch::zeros({kind == 7 && odd ? 4 : 3}));
  const std::string text = text_of<lockstep::MismatchError>([&] {
    DistributedDataParallel ddp{model, shared_comm()};
  });
  const std::string there = " on rank " + std::to_string(world.size() - 1);
  const std::vector<std::string> found{"'weight' [12, 5] float32", "'weight' [10, 5] float64",
                                       "'other' [10, 5] float32",  "'bias' [10, 5] float32",
                                       "without gradient",         "'more' [1] float32",
                                       "with strides [1, 10]",     "'mean' [4] float32"};
  CHECK_THAT(text, ContainsSubstring(found[static_cast<std::size_t>(kind)] + there));
  for (const auto& other : shared_comm().all_gather_bytes(text)) CHECK(other == text);
}

TEST_CASE("a model without anything to train, and caps without a size, are refused") {
  torch::nn::Linear layer(2, 2);
  CHECK_THROWS_AS((DistributedDataParallel{layer, shared_comm(), {.bucket_cap_mb = {}}}),
                  lockstep::UsageError);
  CHECK_THROWS_AS((DistributedDataParallel{layer, shared_comm(), {.bucket_cap_mb = lockstep_test::mib({0})}}),
                  lockstep::UsageError);
  for (auto& parameter : layer->parameters()) parameter.requires_grad_(false);
  CHECK_THROWS_AS((DistributedDataParallel{layer, shared_comm()}), lockstep::UsageError);
}

}  // namespace failure_ranks_test
