// DdpOptions::param_dtype: parameters in a short type while a step computes, in their own for all else.
#include <stdexcept>

#include "grad/models.hpp"
#include "lockstep/comm/local_comm.hpp"
#include "lockstep/grad/hooks/compression_hooks.hpp"
#include "lockstep/optim/optimizers.hpp"

namespace low_precision_parameters_ranks_test {

using lockstep::DdpOptions;
using lockstep::DistributedDataParallel;
using lockstep::ReduceDtypeHook;

namespace {

DdpOptions shortening(at::ScalarType type = at::kBFloat16) {
  DdpOptions options = small_buckets();
  options.param_dtype = type;
  return options;
}

/// A rank's gradients where the whole model is in the short type, as they come out of backward.
std::vector<torch::Tensor> short_gradients(Net& net, int rank, int step, at::ScalarType type) {
  Net copy;
  {
    torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < 6; ++i) copy->parameters()[i].copy_(net->parameters()[i]);
  }
  copy->to(type);
  copy(batch_of(rank, step).to(type)).pow(2).sum().backward();
  return gradients(copy->parameters());
}

std::vector<torch::Tensor> values(Net& net) {
  std::vector<torch::Tensor> copies;
  for (const auto& parameter : net->parameters()) copies.push_back(parameter.detach().clone());
  return copies;
}

/// Their mean over the ranks: each in `in`, added there, and divided before or after that.
std::vector<torch::Tensor> mean_gradients(Net& net, int step, at::ScalarType type, at::ScalarType in,
                                          bool before) {
  const int ranks = test_world().size();
  std::vector<torch::Tensor> sums;
  for (int rank = 0; rank < ranks; ++rank) {
    auto grads = short_gradients(net, rank, step, type);
    for (std::size_t i = 0; i < grads.size(); ++i) {
      grads[i] = grads[i].to(in);
      if (before) grads[i] = grads[i] / ranks;
      if (rank > 0) grads[i] = sums[i] + grads[i];
    }
    sums = std::move(grads);
  }
  for (auto& sum : sums) {
    if (!before) sum = sum / ranks;
    sum = sum.to(torch::kFloat);
  }
  return sums;
}

/// The sums of two are the same in any order, those of more to rounding.
void check_same(const std::vector<torch::Tensor>& got, const std::vector<torch::Tensor>& wanted,
                double tolerance) {
  REQUIRE(got.size() == wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    REQUIRE(got[i].scalar_type() == torch::kFloat);
    if (test_world().size() <= 2)
      CHECK(torch::equal(got[i], wanted[i]));
    else
      CHECK(torch::allclose(got[i], wanted[i], tolerance, tolerance));
  }
}

template <class Ddp>
void check_steps(Net& net, Ddp& ddp, at::ScalarType type, at::ScalarType in, bool before, double tolerance,
                 bool set_to_none = true) {
  torch::optim::SGD optimizer(ddp.parameters(), 0.05);
  for (int step = 0; step < 4; ++step) {
    CAPTURE(step);
    const auto wanted = mean_gradients(net, step, type, in, before);
    const auto held = values(net);
    optimizer.zero_grad(set_to_none);
    const auto loss = ddp(batch_of(test_world().rank(), step)).pow(2).sum();
    CHECK(loss.scalar_type() == type);
    CHECK(net->one->weight.scalar_type() == type);
    ddp.backward(loss);
    for (std::size_t i = 0; i < 6; ++i) CHECK(torch::equal(net->parameters()[i], held[i]));
    check_same(gradients(net->parameters()), wanted, tolerance);
    optimizer.step();
    CHECK_FALSE(torch::equal(net->one->weight, held[0]));
  }
}

}  // namespace

TEST_CASE("parameters are short from forward to reduction, and gradients are reduced in their own type") {
  const auto type = GENERATE(at::kBFloat16, at::kHalf);
  const auto storage = GENERATE(lockstep::GradientStorage::in_bucket, lockstep::GradientStorage::separate,
                                lockstep::GradientStorage::gradient_as_bucket_view);
  const bool set_to_none = GENERATE(true, false);
  CAPTURE(type, storage, set_to_none);
  torch::manual_seed(11);
  Net net;
  DdpOptions options = shortening(type);
  options.gradients = storage;
  DistributedDataParallel ddp{net, shared_comm(), options};
  check_steps(net, ddp, type, torch::kFloat, true, 1e-6, set_to_none);
  CHECK(ddp.buckets().size() > 1);  // they were rebuilt, of float32
}

TEST_CASE("gradients are added in a type of one's own, as reduce_dtype says in Python") {
  const auto in = GENERATE(at::kBFloat16, at::kFloat, at::kDouble);
  CAPTURE(in);
  torch::manual_seed(12);
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), shortening(), ReduceDtypeHook(in)};
  check_steps(net, ddp, at::kBFloat16, in, false, in == at::kBFloat16 ? 0.03 : 1e-6);
  const auto bytes = ddp.report().bytes;
  CHECK(bytes == (test_world().size() == 1 ? 0 : 130 * c10::elementSize(in)));
}

TEST_CASE("a single process has the same: short in a step, full for the optimizer") {
  torch::manual_seed(13);
  Net net;
  lockstep::LocalComm comm{lockstep::World()};
  DistributedDataParallel ddp{net, comm, shortening()};
  for (int step = 0; step < 3; ++step) {
    const auto wanted = short_gradients(net, 0, step, at::kBFloat16);
    net->zero_grad();
    if (step == 1)
      ddp(batch_of(0, step)).pow(2).sum().backward();
    else
      ddp.backward(ddp(batch_of(0, step)).pow(2).sum());
    for (std::size_t i = 0; i < 6; ++i) {
      CHECK(net->parameters()[i].scalar_type() == torch::kFloat);
      CHECK(torch::equal(net->parameters()[i].grad(), wanted[i].to(torch::kFloat)));
    }
  }
}

TEST_CASE("micro-batches add up in the short type, and the last reduces them") {
  torch::manual_seed(14);
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), shortening()};
  std::vector<torch::Tensor> wanted;
  for (int rank = 0; rank < test_world().size(); ++rank) {
    const auto one = short_gradients(net, rank, 0, at::kBFloat16);
    const auto two = short_gradients(net, rank, 1, at::kBFloat16);
    for (std::size_t i = 0; i < 6; ++i) {
      const auto sum = (one[i] + two[i]).to(torch::kFloat) / test_world().size();
      if (rank == 0)
        wanted.push_back(sum);
      else
        wanted[i] = wanted[i] + sum;
    }
  }
  net->zero_grad();
  {
    const auto guard = ddp.no_sync();
    ddp.backward(ddp(batch_of(test_world().rank(), 0)).pow(2).sum());
    CHECK(net->one->weight.scalar_type() == at::kBFloat16);
  }
  ddp.backward(ddp(batch_of(test_world().rank(), 1)).pow(2).sum());
  check_same(gradients(net->parameters()), wanted, 1e-6);
}

TEST_CASE("an evaluation is short for its forward alone; a bare backward ends the step as well") {
  torch::manual_seed(15);
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), shortening()};
  {
    torch::NoGradGuard no_grad;
    CHECK(ddp(batch_of(0, 0)).scalar_type() == at::kBFloat16);
    CHECK(net->one->weight.scalar_type() == torch::kFloat);
    ddp.before_forward();
    CHECK(net(batch_of(0, 0)).scalar_type() == torch::kFloat);
  }
  {
    c10::InferenceMode inference;
    CHECK(ddp(batch_of(0, 0)).scalar_type() == at::kBFloat16);
  }
  const auto wanted = mean_gradients(net, 3, at::kBFloat16, torch::kFloat, true);
  ddp(batch_of(test_world().rank(), 3)).pow(2).sum().backward();
  CHECK(net->one->weight.scalar_type() == torch::kFloat);
  check_same(gradients(net->parameters()), wanted, 1e-6);
}

TEST_CASE("a failed step leaves full parameters, and the next one is a good one") {
  torch::manual_seed(16);
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), shortening()};
  const auto held = values(net);
  net->use_two = false;  // its gradients are missing
  CHECK_THAT(thrown_by([&] { ddp.backward(ddp(batch_of(0, 0)).sum()); }), ContainsSubstring("'two.weight'"));
  for (std::size_t i = 0; i < 6; ++i) CHECK(torch::equal(net->parameters()[i], held[i]));
  net->use_two = true;
  static_cast<void>(ddp(batch_of(0, 0)));  // whose backward never comes
  CHECK(net->one->weight.scalar_type() == at::kBFloat16);
  ddp.forget();
  CHECK(torch::equal(net->one->weight, held[0]));
  const auto wanted = mean_gradients(net, 1, at::kBFloat16, torch::kFloat, true);
  ddp.backward(ddp(batch_of(test_world().rank(), 1)).pow(2).sum());
  check_same(gradients(net->parameters()), wanted, 1e-6);
}

TEST_CASE("an optimizer that steps along short parameters is found, with what to do") {
  const bool lockstep_own = GENERATE(true, false);
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), shortening()};
  ddp.backward(ddp(batch_of(test_world().rank(), 0)).pow(2).sum());
  static_cast<void>(ddp(batch_of(0, 0)));  // a look at the outputs, with grad mode on
  if (lockstep_own)
    lockstep::SGD(ddp.parameters(), {.lr = 0.1}).step();
  else
    torch::optim::SGD(ddp.parameters(), 0.1).step();
  CHECK_THROWS_WITH(ddp(batch_of(0, 1)),
                    ContainsSubstring("parameter 'one.weight' was changed while it was in the type of") &&
                        ContainsSubstring("let the optimizer step after ddp.backward(loss)"));
}

TEST_CASE("a model that is called directly is reduced in its own type, before and after short steps") {
  torch::manual_seed(17);
  Net net;
  DdpOptions options = shortening();
  options.find_unused_parameters = GENERATE(false, true);
  DistributedDataParallel ddp{net, shared_comm(), options};
  for (int step = 0; step < 4; ++step) {
    CAPTURE(step);
    const bool direct = step % 2 == 0;
    const auto wanted = mean_gradients(net, step, direct ? at::kFloat : at::kBFloat16, torch::kFloat, true);
    net->zero_grad();
    const auto batch = batch_of(test_world().rank(), step);
    if (step == 2)
      net(batch).pow(2).sum().backward();
    else
      ddp.backward((direct ? net(batch) : ddp(batch)).pow(2).sum());
    check_same(gradients(net->parameters()), wanted, 1e-6);
    if (test_world().size() > 1) CHECK(ddp.report().reductions == static_cast<std::size_t>(step) + 1);
  }
}

TEST_CASE(
    "unused and frozen parameters, static graphs, counts and ranks without data, with short parameters") {
  const int ranks = test_world().size(), rank = test_world().rank();
  torch::manual_seed(18);
  Net net;
  net->one->bias.requires_grad_(false);
  DdpOptions options = shortening();
  options.find_unused_parameters = true;
  options.static_graph = GENERATE(false, true);
  DistributedDataParallel ddp{net, shared_comm(), options};
  net->use_two = false;
  for (int step = 0; step < 3; ++step) {
    CAPTURE(step, options.static_graph);
    net->zero_grad();
    const bool nothing = step == 2 && ranks > 1 && rank == ranks - 1;
    const int with_data = step == 2 && ranks > 1 ? ranks - 1 : ranks;
    torch::Tensor wanted;
    for (int r = 0; r < with_data; ++r) {
      Net copy;
      copy->use_two = false;
      {
        torch::NoGradGuard no_grad;
        for (std::size_t i = 0; i < 6; ++i) copy->parameters()[i].copy_(net->parameters()[i]);
      }
      copy->to(at::kBFloat16);
      copy(batch_of(r, step).to(at::kBFloat16)).pow(2).sum().backward();
      const auto grad = copy->one->weight.grad().to(at::kFloat);
      wanted = r == 0 ? grad : wanted + grad;
    }
    wanted = wanted / (step == 1 ? 5.0 * ranks : 1.0 * ranks);
    if (nothing)
      ddp.backward_empty();
    else if (step == 1)
      CHECK(ddp.backward_sum(ddp(batch_of(rank, step)).pow(2).sum(), 5) == 5 * ranks);
    else
      ddp.backward(ddp(batch_of(rank, step)).pow(2).sum());
    CHECK(torch::allclose(net->one->weight.grad(), wanted, 1e-5, 1e-6));
    CHECK_FALSE(net->two->weight.grad().defined());
    CHECK_FALSE(net->one->bias.grad().defined());
    for (const auto& parameter : net->parameters()) CHECK(parameter.scalar_type() == torch::kFloat);
  }
}

TEST_CASE("a parameter whose own type is the short one is reduced once, beside those that become short") {
  torch::manual_seed(21);
  Net net;
  net->two->to(at::kBFloat16);
  DdpOptions options = shortening();
  options.find_unused_parameters = GENERATE(false, true);
  DistributedDataParallel ddp{net, shared_comm(), options};
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    ddp.backward(ddp(batch_of(test_world().rank(), step)).pow(2).sum());
    CHECK(net->two->weight.grad().scalar_type() == at::kBFloat16);
    CHECK(net->one->weight.grad().scalar_type() == torch::kFloat);
    auto of_rank_zero = net->two->weight.grad().clone();
    shared_comm().broadcast(of_rank_zero).synchronize();
    CHECK(torch::equal(net->two->weight.grad(), of_rank_zero));
  }
}

TEST_CASE("a loss over two models ends the short step of both") {
  torch::manual_seed(19);
  Net first, second;
  DistributedDataParallel one{first, shared_comm(), shortening()}, two{second, shared_comm(), shortening()};
  for (int step = 0; step < 2; ++step) {
    const auto wanted = mean_gradients(second, step, at::kBFloat16, torch::kFloat, true);
    first->zero_grad();
    second->zero_grad();
    const auto batch = batch_of(test_world().rank(), step);
    one.backward(one(batch).sum() + two(batch).pow(2).sum());
    check_same(gradients(second->parameters()), wanted, 1e-6);
    for (auto* net : {&first, &second})
      for (const auto& parameter : (*net)->parameters()) {
        CHECK(parameter.scalar_type() == torch::kFloat);
        CHECK(parameter.grad().scalar_type() == torch::kFloat);
      }
  }
}

TEST_CASE(
    "a backward whose forward saw parameters in another type is refused, and the next step is a good one") {
  torch::manual_seed(20);
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), shortening()};
  const auto batch = batch_of(test_world().rank(), 0);
  const auto first = ddp(batch).pow(2).sum(), second = ddp(batch).pow(2).sum();
  ddp.backward(first);
  CHECK_THAT(thrown_by([&] { ddp.backward(second); }),
             ContainsSubstring("has ended that step: call ddp.backward once for each forward"));
  const auto full = net(batch).pow(2).sum();
  static_cast<void>(ddp(batch));
  CHECK_THAT(thrown_by([&] { ddp.backward(full); }),
             ContainsSubstring("call ddp(x), or before_forward(), before each forward"));
  const auto wanted = mean_gradients(net, 1, at::kBFloat16, torch::kFloat, true);
  ddp.backward(ddp(batch_of(test_world().rank(), 1)).pow(2).sum());
  check_same(gradients(net->parameters()), wanted, 1e-6);
}

TEST_CASE("what would be lost is an error: a change in a short step, a frozen model, another wrapper") {
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), shortening()};
  const auto loss = ddp(batch_of(0, 0)).sum();
  {
    torch::NoGradGuard no_grad;
    net->one->bias.fill_(7);
  }
  CHECK_THAT(thrown_by([&] { ddp.backward(loss); }),
             ContainsSubstring("'one.bias' was changed while it was"));
  net->one->bias.requires_grad_(false);
  CHECK_THROWS_WITH(ddp(batch_of(0, 0)), ContainsSubstring("parameter 'one.bias' is frozen in a forward"));
  CHECK(net->one->weight.scalar_type() == torch::kFloat);
  {
    torch::NoGradGuard no_grad;
    CHECK_NOTHROW(ddp(batch_of(0, 0)));
  }
  net->one->bias.requires_grad_(true);
  static_cast<void>(ddp(batch_of(0, 0)));
  ddp.forget();
  DistributedDataParallel other{net, shared_comm(), shortening(at::kHalf)};
  static_cast<void>(other(batch_of(0, 0)));
  CHECK_THROWS_WITH(ddp(batch_of(0, 0)), ContainsSubstring("let one wrapper alone have that option"));
}

TEST_CASE("the full parameters outlive a wrapper destroyed during a step, and an abandoned step") {
  Net net;
  const auto held = values(net);
  {
    DistributedDataParallel ddp{net, shared_comm(), shortening()};
    static_cast<void>(ddp(batch_of(0, 0)));
    CHECK(net->one->weight.scalar_type() == at::kBFloat16);
  }
  for (std::size_t i = 0; i < 6; ++i) CHECK(torch::equal(net->parameters()[i], held[i]));
  lockstep::LocalComm alone{lockstep::World()};
  DistributedDataParallel ddp{net, alone, shortening()};
  static_cast<void>(ddp(batch_of(0, 0)));
  ddp.fail_backward(std::make_exception_ptr(std::runtime_error("no such picture")));
  for (std::size_t i = 0; i < 6; ++i) CHECK(torch::equal(net->parameters()[i], held[i]));
}

TEST_CASE("ranks with other types are told so on every rank", "[2+]") {
  Net net;
  DdpOptions options;
  const bool of_buffers = GENERATE(false, true);
  (of_buffers ? options.buffer_dtype : options.param_dtype) =
      test_world().rank() == 1 ? at::kHalf : at::kBFloat16;
  CHECK_THAT(thrown_by([&] {
               DistributedDataParallel ddp{net, shared_comm(), options};
             }),
             ContainsSubstring(of_buffers ? "buffer_dtype is BFloat16 on rank"
                                          : "param_dtype is BFloat16 on rank") &&
                 ContainsSubstring(" and Half on rank 1;"));
}

TEST_CASE("buffers get a type of their own for good") {
  torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8));
  DdpOptions options;
  options.param_dtype = at::kBFloat16;
  options.buffer_dtype = at::kBFloat16;
  DistributedDataParallel ddp{net, shared_comm(), options};
  const auto count = net->buffers().size();
  for (int step = 0; step < 2; ++step) ddp.backward(ddp(batch_of(test_world().rank(), step)).sum());
  std::size_t shortened = 0;
  for (const auto& buffer : net->buffers()) shortened += buffer.scalar_type() == at::kBFloat16;
  ddp.sync_buffers();
  const auto mean = net->buffers()[0].to(torch::kFloat);
  CHECK(mean.abs().sum().item<float>() > 0);
  auto of_rank_zero = mean.clone();
  shared_comm().broadcast(of_rank_zero).synchronize();
  CHECK(torch::equal(mean, of_rank_zero));
  CHECK(count == 3);
  CHECK(shortened == 2);  // the number of batches is none of them
  CHECK(net->parameters()[0].scalar_type() == torch::kFloat);
}

TEST_CASE("types that parameters and buffers cannot have are refused") {
  Net net;
  CHECK_THROWS_WITH((DistributedDataParallel{net, shared_comm(), shortening(at::kInt)}),
                    ContainsSubstring("DdpOptions::param_dtype is Int: give float16, bfloat16"));
  CHECK_THROWS_WITH((DistributedDataParallel{net, shared_comm(), shortening(at::kFloat8_e5m2)}),
                    ContainsSubstring("give float16, bfloat16, float32 or float64"));
  torch::nn::Sequential table(torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 4).sparse(true)));
  CHECK_THROWS_WITH((DistributedDataParallel{table, shared_comm(), shortening()}),
                    ContainsSubstring("'0.weight' is sparse, which DdpOptions::param_dtype does not"));
  CHECK_THROWS_WITH(ReduceDtypeHook(at::kLong), ContainsSubstring("the type of a ReduceDtypeHook is Long"));
}

}  // namespace low_precision_parameters_ranks_test
