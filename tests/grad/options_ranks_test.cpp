// What DistributedDataParallel's options change, and the models it takes beside modules.
#include <algorithm>
#include <chrono>
#include <thread>

#include "grad/models.hpp"
#include "lockstep/grad/hooks/compression_hooks.hpp"
#include "lockstep/grad/hooks/power_sgd_hook.hpp"
#include "support/mib.hpp"

namespace options_ranks_test {

using lockstep::DdpOptions;
using lockstep::DistributedDataParallel;
using lockstep::GradientError;
using lockstep::GradientStorage;

namespace {

DdpOptions searching(bool is_static = false) {
  DdpOptions options = small_buckets();
  options.bucket_cap_mb = lockstep_test::mib({64, 100});
  options.find_unused_parameters = !is_static;
  options.static_graph = is_static;
  return options;
}

/// One of three branches, and one that nobody takes.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    for (int i = 0; i < 4; ++i)
      branch.push_back(register_module("branch" + std::to_string(i), torch::nn::Linear(4, 4)));
    head = register_module("head", torch::nn::Linear(4, 2));
  }
  torch::Tensor forward(const torch::Tensor& x, int which) {
    return head(torch::relu(branch.at(static_cast<std::size_t>(which))(x)));
  }
  std::vector<torch::nn::Linear> branch;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Branches);

/// The average over ranks of rank r's gradient of branch `which(r)`.
template <class Which>
void check_branches(Branches& net, DistributedDataParallel<Branches, lockstep_test::TestedComm>& ddp,
                    int step, Which which) {
  const int ranks = test_world().size(), rank = test_world().rank();
  std::vector<torch::Tensor> sums(net->parameters().size());
  for (int r = 0; r < ranks; ++r) {
    net->zero_grad();
    const auto guard = ddp.no_sync();
    // Gradients of the other ranks, computed here without the hooks.
    const auto all = torch::autograd::grad({net(batch_of(r, step), which(r)).pow(2).sum()},
                                           {net->branch[static_cast<std::size_t>(which(r))]->weight});
    auto& sum = sums[static_cast<std::size_t>(2 * which(r))];
    sum = sum.defined() ? sum + all[0] / ranks : all[0] / ranks;
  }
  net->zero_grad();
  ddp.backward(net(batch_of(rank, step), which(rank)).pow(2).sum());
  for (std::size_t i = 0; i < 8; i += 2) {
    CAPTURE(step, i);
    const auto grad = net->parameters()[i].grad();
    REQUIRE(grad.defined() == sums[i].defined());
    if (grad.defined()) CHECK(torch::allclose(grad, sums[i], 1e-4, 1e-6));
  }
}

}  // namespace

TEST_CASE("unused parameters: averaged where any rank used them, untouched where none did") {
  torch::manual_seed(5);
  Branches net;
  DistributedDataParallel ddp{net, shared_comm(), searching()};
  for (int step = 0; step < 5; ++step)
    check_branches(net, ddp, step, [&](int rank) { return (step + rank) % 3; });
  CHECK(ddp.buckets().size() >= 3);  // by size from the first, and never rebuilt
}

TEST_CASE("a static graph: what took no part at first never does, and buckets are rebuilt") {
  torch::manual_seed(6);
  Branches net;
  DistributedDataParallel ddp{net, shared_comm(), searching(true)};
  for (int step = 0; step < 5; ++step) check_branches(net, ddp, step, [](int rank) { return rank % 3; });
  CHECK(ddp.buckets().size() >= 3);
  refuses<GradientError>([&] { ddp.backward(net(batch_of(0, 0), 3).sum()); },
                         "took no part in the first backward");
}

TEST_CASE("a kept gradient that no rank uses: averaged again in a bucket view, else left as it is") {
  const int rank = test_world().rank();
  Branches net;
  DdpOptions options = searching();
  options.gradients = GENERATE(GradientStorage::in_bucket, GradientStorage::gradient_as_bucket_view);
  DistributedDataParallel ddp{net, shared_comm(), options};
  ddp.backward(net(batch_of(rank, 0), 0).pow(2).sum());
  const auto kept = [&] { return net->branch[0]->weight.grad(); };
  const auto left = kept().clone();
  // A sum that is divided by a count must not divide what is a mean already.
  net->head->zero_grad();
  ddp.backward_sum(net(batch_of(rank, 1), 1).pow(2).sum(), 3);
  CHECK(kept().equal(left));
  {
    const torch::NoGradGuard no_grad;
    kept().fill_(rank);
  }
  ddp.backward(net(batch_of(rank, 2), 1).pow(2).sum());
  const bool averaged = options.gradients == GradientStorage::gradient_as_bucket_view;
  const double expected = averaged ? (test_world().size() - 1) / 2.0 : rank;
  CHECK(torch::allclose(kept(), torch::full({4, 4}, expected), 1e-6, 1e-7));
}

TEST_CASE("skipped buckets: what no rank used at first is not reduced, and may not be used later") {
  const int rank = test_world().rank();
  DdpOptions options = searching(GENERATE(false, true));
  options.bucket_cap_mb = lockstep_test::mib({1});  // one bucket for each parameter
  Branches net, other;
  DistributedDataParallel whole{other, shared_comm(), options};
  options.skip_all_reduce_unused_params = true;
  DistributedDataParallel ddp{net, shared_comm(), options};
  for (int step = 0; step < 4; ++step) {
    net->zero_grad();
    other->zero_grad();
    ddp.backward(net(batch_of(rank, step), rank % 2).pow(2).sum());
    whole.backward(other(batch_of(rank, step), rank % 2).pow(2).sum());
    CHECK_FALSE(net->branch[2]->weight.grad().defined());
  }
  CHECK(ddp.buckets() == whole.buckets());
  if (test_world().size() > 1) CHECK(ddp.report().bytes < whole.report().bytes);
  // Every rank, or the ranks of the other branches would have another error.
  refuses<GradientError>([&] { ddp.backward(net(batch_of(rank, 4), 2).pow(2).sum()); },
                         options.static_graph ? "took no part in the first backward"
                                              : "was used by no rank in the first backward");
  net->zero_grad();
  {
    const auto accumulating = ddp.no_sync();
    refuses<GradientError>([&] { ddp.backward(net(batch_of(rank, 4), 2).pow(2).sum()); },
                           options.static_graph ? "took no part in the first backward"
                                                : "was used by no rank in the first backward");
  }
  net->zero_grad();
  ddp.backward(net(batch_of(rank, 5), rank % 2).pow(2).sum());
}

TEST_CASE("under no_sync, too, a static graph refuses what took no part in the first backward", "[2+]") {
  const int rank = test_world().rank();
  Branches net;
  DistributedDataParallel ddp{net, shared_comm(), searching(true)};
  ddp.backward(net(batch_of(rank, 0), 0).pow(2).sum());
  net->zero_grad();
  const auto accumulating = ddp.no_sync();
  refuses<GradientError>([&] { ddp.backward(net(batch_of(rank, 1), 1).pow(2).sum()); },
                         "took no part in the first backward");
}

TEST_CASE("lazily allocated buckets live as long as gradients that lie in them") {
  const bool lazy = GENERATE(false, true);
  Net net;
  DdpOptions options = small_buckets();
  options.lazy_bucket_allocation = lazy;
  DistributedDataParallel ddp{net, shared_comm(), options};
  const auto step = [&](int number) {
    net->zero_grad();
    ddp.backward(net(batch_of(test_world().rank(), number)).pow(2).sum());
  };
  const auto released = [&] {
    using Storage = c10::weak_intrusive_ptr<c10::StorageImpl>;
    const Storage storage(net->one->weight.grad().storage().getWeakStorageImpl());
    net->zero_grad();
    // A thread of the backend may let go of the last reduction a moment after it has completed.
    for (int i = 0; lazy && i < 2000 && !storage.expired(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return storage.expired();
  };
  for (int number = 0; number < 3; ++number) {
    step(number);
    CHECK(released() == lazy);
  }
  if (test_world().size() > 1) {
    net->use_two = false;
    refuses<GradientError>([&] { step(3); }, "two.weight");
    net->use_two = true;
  }
  step(4);
  CHECK(released() == lazy);
}

TEST_CASE("options of the buckets leave the averages of means and of sums with counts") {
  const int rank = test_world().rank();
  const auto change = GENERATE(0, 1, 2, 3);
  torch::manual_seed(8);
  Net net, other;
  DdpOptions options = small_buckets();
  DistributedDataParallel plain{other, shared_comm(), options};
  options.batched_grad_copy = change == 0;
  options.lazy_bucket_allocation = change >= 1;
  if (change >= 2)
    options.gradients = change == 2 ? GradientStorage::separate : GradientStorage::gradient_as_bucket_view;
  DistributedDataParallel ddp{net, shared_comm(), options};
  {
    torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < 6; ++i) other->parameters()[i].copy_(net->parameters()[i]);
  }
  for (int step = 0; step < 6; ++step) {
    net->zero_grad(step % 2 == 0);
    other->zero_grad(step % 2 == 0);
    const auto mine = batch_of(rank, step);
    if (step % 3 == 2) {
      ddp.backward_sum(net(mine).pow(2).sum(), rank + 1);
      plain.backward_sum(other(mine).pow(2).sum(), rank + 1);
    } else {
      ddp.backward(net(mine).pow(2).mean());
      plain.backward(other(mine).pow(2).mean());
    }
    for (std::size_t i = 0; i < 6; ++i)
      CHECK(torch::allclose(net->parameters()[i].grad(), other->parameters()[i].grad(), 1e-5, 1e-7));
  }
}

TEST_CASE("a parameter that only a re-entrant backward reaches is named, not lost") {
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), searching()};
  refuses<GradientError>(
      [&] {
        ddp.backward(net->three(lockstep::checkpoint(net->two, torch::relu(net->one(batch_of(0, 0))))).sum());
      },
      "was taken for unused, since the loss reaches it through a re-entrant backward");
}

TEST_CASE("gradients in memory of their own keep it; the averages are the same bits") {
  const auto storage = GENERATE(GradientStorage::separate, GradientStorage::gradient_as_bucket_view);
  torch::manual_seed(7);
  Net net, other;
  DdpOptions options = small_buckets();
  options.gradients = storage;
  DistributedDataParallel ddp{net, shared_comm(), options};
  DistributedDataParallel plain{other, shared_comm(), small_buckets()};
  {
    torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < 6; ++i) other->parameters()[i].copy_(net->parameters()[i]);
  }
  const void* place = nullptr;
  for (int step = 0; step < 4; ++step) {
    net->zero_grad(false);
    other->zero_grad(false);
    ddp.backward(net(batch_of(test_world().rank(), step)).pow(2).sum());
    plain.backward(other(batch_of(test_world().rank(), step)).pow(2).sum());
    const auto grad = net->one->weight.grad();
    CHECK(torch::allclose(grad, other->one->weight.grad(), 1e-5, 1e-7));
    const bool shared = grad.storage().nbytes() > grad.nbytes();
    if (storage == GradientStorage::separate) {
      CHECK(torch::equal(grad, other->one->weight.grad()));
      CHECK_FALSE(shared);
      if (place) CHECK(grad.data_ptr() == place);
      place = grad.data_ptr();
    } else {
      CHECK(shared);
    }
  }
}

TEST_CASE("ignored parameters and buffers stay as they are on each rank") {
  const auto& world = test_world();
  Net net;
  {
    torch::NoGradGuard no_grad;
    net->two->bias.fill_(static_cast<float>(world.rank()));
  }
  DdpOptions options = small_buckets();
  options.ignored = {"two.bias"};
  DistributedDataParallel ddp{net, shared_comm(), options};
  CHECK(net->two->bias[0].item<float>() == static_cast<float>(world.rank()));
  CHECK(ddp.parameters().size() == 5);
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    ddp.backward(net(torch::full({1, 4}, 1.0F)).sum());
    CHECK(net->two->bias.grad().defined());
  }
  options.ignored = {"nobody"};
  CHECK_THROWS_AS((DistributedDataParallel{net, shared_comm(), options}), lockstep::UsageError);
}

TEST_CASE("rows of an embedding's sparse gradients are summed over the ranks") {
  const auto& world = test_world();
  struct TableImpl : torch::nn::Module {
    TableImpl() {
      rows = register_module("rows", torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 3).sparse(true)));
      head = register_module("head", torch::nn::Linear(3, 1));
    }
    torch::Tensor forward(const torch::Tensor& indices) { return head(rows(indices)).sum(); }
    torch::nn::Embedding rows{nullptr};
    torch::nn::Linear head{nullptr};
  } net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  const auto dense_head = [&] { return net.head->weight.detach().clone(); };
  for (int step = 0; step < 3; ++step) {
    net.zero_grad();
    // Rank r uses row r twice, and all use row 8; the last rank uses as many more.
    std::vector<std::int64_t> used{world.rank(), world.rank(), 8};
    ddp.backward(ddp(torch::tensor(used)));
    const auto grad = net.rows->weight.grad();
    REQUIRE(grad.is_sparse());
    auto expected = torch::zeros({9, 3});
    const auto head = dense_head()[0];
    for (int r = 0; r < world.size(); ++r) {
      expected[r] += 2 * head / world.size();
      expected[8] += head / world.size();
    }
    CHECK(torch::allclose(grad.to_dense(), expected, 1e-5, 1e-7));
  }
  // One rank throws: the others hear of it although their sparse buckets carry no not-a-number.
  net.zero_grad();
  if (world.rank() == 0)
    CHECK_THROWS_AS(ddp.backward(torch::ones({})), GradientError);
  else
    CHECK_THROWS_AS(ddp.backward(ddp(torch::tensor({1}))), lockstep::PeerError);
  net.zero_grad();
  ddp.backward(ddp(torch::tensor({1})));
}

TEST_CASE("a sparse gradient that no rank has used stays as it is, one that some have is the average") {
  const auto& world = test_world();
  const bool bag = GENERATE(false, true);
  std::vector<torch::Tensor> rows;
  torch::nn::AnyModule table =
      bag ? torch::nn::AnyModule(
                torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(9, 3).sparse(true).mode(torch::kSum)))
          : torch::nn::AnyModule(torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 3).sparse(true)));
  struct TwoImpl : torch::nn::Module {
    explicit TwoImpl(const std::shared_ptr<torch::nn::Module>& rows) {
      register_module("rows", rows);
      head = register_module("head", torch::nn::Linear(3, 1));
    }
    torch::nn::Linear head{nullptr};
  } net(table.ptr());
  const at::Tensor weight = net.named_parameters()["rows.weight"];
  DistributedDataParallel ddp{net, shared_comm(), searching()};
  const auto looked_up = [&] { return table.forward(torch::tensor({{1, 2}, {1, 3}})).sum(); };
  const auto head_alone = [&] { return net.head(torch::ones({2, 3})).sum(); };
  ddp.backward(looked_up());
  const auto kept = weight.grad().to_dense().clone();
  CHECK(kept.abs().sum().item<double>() > 0);
  for (int step = 0; step < 3; ++step) {
    net.head->zero_grad();
    ddp.backward(head_alone());
    CHECK(torch::equal(weight.grad().to_dense(), kept));
  }
  // Gathered under no_sync on the last rank alone: its rows travel with the next backward.
  net.zero_grad();
  const bool last = world.rank() == world.size() - 1;
  {
    const auto guard = ddp.no_sync();
    if (last) ddp.backward(looked_up());
  }
  ddp.backward(head_alone());
  CHECK(torch::allclose(weight.grad().to_dense(), kept / world.size()));
}

TEST_CASE("sums with counts: the mean over all ranks' samples, a rank with none among them") {
  const auto& world = test_world();
  const bool in_double = GENERATE(false, true);
  torch::manual_seed(8);
  Net net;
  if (in_double) net->to(torch::kDouble);
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  const auto type = in_double ? torch::kDouble : torch::kFloat;
  const int empty = world.size() > 1 ? world.size() - 1 : -1;
  for (int step = 0; step < 4; ++step) {
    CAPTURE(step);
    const auto share = [&](int rank) {
      torch::manual_seed(100 * step + rank);
      return torch::randn({rank == empty ? 0 : 3 + 2 * rank, 4}, type);
    };
    std::vector<torch::Tensor> all;
    for (int r = 0; r < world.size(); ++r) all.push_back(share(r));
    const auto joined = torch::cat(all);
    const auto expected = torch::autograd::grad(
        {net(joined).pow(2).sum() / static_cast<double>(joined.size(0))}, net->parameters());
    net->zero_grad(step % 2 == 0);
    const auto mine = share(world.rank());
    double total = 0;
    if (world.rank() == empty)
      total = ddp.backward_sum({}, 0);
    else if (step == 3) {  // in two parts
      {
        const auto guard = ddp.no_sync();
        ddp.backward_sum(net(mine.narrow(0, 0, 1)).pow(2).sum(), 1);
      }
      const auto rest = mine.narrow(0, 1, mine.size(0) - 1);
      total = ddp.backward_sum(net(rest).pow(2).sum(), static_cast<double>(rest.size(0)));
    } else {
      total = ddp.backward_sum(net(mine).pow(2).sum(), static_cast<double>(mine.size(0)));
    }
    CHECK(total == static_cast<double>(joined.size(0)));
    for (std::size_t i = 0; i < expected.size(); ++i)
      CHECK(torch::allclose(net->parameters()[i].grad(), expected[i], in_double ? 1e-12 : 1e-4,
                            in_double ? 1e-14 : 1e-6));
  }
  net->zero_grad();
  CHECK(ddp.backward_sum({}, 0) == 0);
  for (const auto& parameter : net->parameters()) CHECK(parameter.grad().abs().max().item<double>() == 0);
  CHECK_THROWS_AS(ddp.backward_sum(net(torch::zeros({1, 4}, type)).sum(), -1), lockstep::UsageError);
}

TEST_CASE("a rank without data takes part with zeros") {
  const auto& world = test_world();
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  for (int step = 0; step < 4; ++step) {
    const bool idle = world.size() > 1 && (step + world.rank()) % world.size() == 0;
    auto loss = [&](Net& model, int rank) {
      const bool other_idle = world.size() > 1 && (step + rank) % world.size() == 0;
      return model(batch_of(rank, step)).pow(2).sum() * (other_idle ? 0 : 1);
    };
    const auto expected = expected_gradients(net, world.size(), loss);
    net->zero_grad(step % 2 == 0);
    if (idle)
      ddp.backward_empty();
    else
      ddp.backward(loss(net, world.rank()));
    check_close(gradients(net->parameters()), expected);
  }
}

TEST_CASE("over some of the ranks only", "[3+]") {
  const auto& world = test_world();
  auto group = shared_comm().new_group({0, 2});
  CHECK(group.has_value() == (world.rank() == 0 || world.rank() == 2));
  if (group) {
    torch::manual_seed(world.rank());
    Net net;
    DistributedDataParallel ddp{net, *group, small_buckets()};
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      ddp.backward(net->one(torch::full({1, 4}, 1.0F + static_cast<float>(world.rank()))).sum() +
                   net(batch_of(0, 0)).sum() * 0);
      CHECK(torch::allclose(net->one->weight.grad(), torch::full({8, 4}, 2.0F)));
    }
    // Errors name ranks as the world does.
    net->zero_grad();
    const auto loss = world.rank() == 2 ? net->one(batch_of(0, 0)).sum() : net(batch_of(0, 0)).sum();
    refuses<GradientError>([&] { ddp.backward(loss); }, "undefined on rank 2 (");
    DdpOptions options;
    options.static_graph = world.rank() == 2;
    Net other;
    refuses<lockstep::MismatchError>(
        [&] {
          DistributedDataParallel{other, *group, options};
        },
        "static_graph is false on rank 0 and true on rank 2");
    group->shutdown();
  }
  shared_comm().barrier();
}

TEST_CASE("a bare list of parameters, and complex ones") {
  const auto& world = test_world();
  std::vector<at::Tensor> list{
      torch::full({2}, static_cast<double>(world.rank()), torch::kDouble).requires_grad_(true),
      torch::full({3}, c10::complex<float>(1, 2), torch::kComplexFloat).requires_grad_(true)};
  DistributedDataParallel ddp{list, shared_comm()};
  CHECK(list[0][0].item<double>() == 0);
  for (int step = 0; step < 3; ++step) {
    for (auto& parameter : list) parameter.mutable_grad().reset();
    const double own = world.rank() + 1.0;
    ddp.backward((list[0] * own).sum() + torch::view_as_real(list[1] * own).sum());
    const double mean = (world.size() + 1) / 2.0;
    CHECK(torch::allclose(list[0].grad(), torch::full({2}, mean, torch::kDouble)));
    CHECK(torch::allclose(torch::view_as_real(list[1].grad()).select(1, 0),
                          torch::full({3}, static_cast<float>(mean))));
  }
}

TEST_CASE("parameters that are frozen or added afterwards are named") {
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  net->one->bias.requires_grad_(false);
  refuses<lockstep::UsageError>([&] { ddp.backward(net(batch_of(0, 0)).sum()); }, "'one.bias' was frozen");
  net->one->bias.requires_grad_(true);
  net->register_parameter("late", torch::ones({2}));
  refuses<lockstep::UsageError>(
      [&] {
        for (int step = 0; step < 2; ++step) ddp.backward(net(batch_of(0, 0)).sum());
      },
      "'late' was added");
}

TEST_CASE("a parameter that is added where leaves that are no parameters come and go is named") {
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  const auto input = torch::zeros({1}).requires_grad_(true);
  // Where a tensor that is gone has lain the next one of its kind often lies.
  for (int step = 0; step < 40; ++step) {
    net->zero_grad();
    ddp.backward(net(batch_of(0, step).requires_grad_(step % 2 == 0)).sum() + input.sum());
  }
  const auto late = net->register_parameter("late", torch::ones({2}));
  for (int again = 0; again < 2; ++again)
    CHECK_THROWS_AS(ddp.backward(net(batch_of(0, 6)).sum() * late.sum()), lockstep::UsageError);
}

namespace {

/// "rank 0" or "ranks 0, 1": the ranks from `first` up to `last`, as errors list them.
std::string ranks_text(int first, int last) {
  std::string text = std::to_string(first);
  for (int rank = first + 1; rank <= last; ++rank) text += ", " + std::to_string(rank);
  return (first == last ? "rank " : "ranks ") + text;
}

/// Checks that `work` throws one error with these words on every rank.
template <class Work>
void one_error(Work&& work, const std::string& words) {
  const std::string text = text_of<lockstep::Error>(work);
  CHECK_THAT(text, ContainsSubstring(words));
  for (const auto& theirs : shared_comm().all_gather_bytes(text)) CHECK(theirs == text);
}

}  // namespace

TEST_CASE("options that differ are one and the same error on every rank", "[2+]") {
  const auto& world = test_world();
  const bool other = world.rank() == world.size() - 1;
  const auto refused = [&](const DdpOptions& options, const std::string& words) {
    Net net;
    one_error([&] { DistributedDataParallel{net, shared_comm(), options}; }, words);
  };
  const std::string last = std::to_string(world.size() - 1);
  const std::string here = " on " + ranks_text(0, world.size() - 2);
  DdpOptions options;
  if (other) options.bucket_cap_mb = lockstep_test::mib({100, 200});
  refused(options, "bucket_cap_mb is {1, 25}" + here +
                       " and {9.5367431640625e-05, 0.00019073486328125} on rank " + last);
  options = {};
  options.find_unused_parameters = other;
  refused(options, "find_unused_parameters is false" + here + " and true on rank " + last);
  options = {};
  if (other) options.broadcast_buffers = false;
  refused(options, "broadcast_buffers is true" + here + " and false on rank");

  // What one rank alone could find is told by all.
  options = {};
  if (other) options.bucket_cap_mb = {};
  refused(options,
          "rank " + last + ": bucket_cap_mb must hold at least one size in MiB, each greater than 0");
  options = {};
  if (other) options.ignored = {"nothing"};
  refused(options, "rank " + last + ": DdpOptions::ignored names 'nothing'");
  options = {};
  if (other) options.device = torch::kMeta;
  refused(options, "rank " + last + ": DdpOptions::device is meta");
  options.device = torch::kMeta;
  refused(options, "DdpOptions::device is meta");

  torch::nn::Embedding rows(torch::nn::EmbeddingOptions(5, 3).sparse(other));
  one_error(
      [&] {
        DistributedDataParallel{rows, shared_comm()};
      },
      "the list of sparse gradients is {}" + here + " and {weight} on rank " + last);
}

TEST_CASE("without the first exchange each rank keeps its values") {
  const auto& world = test_world();
  torch::manual_seed(1 + world.rank());
  Net net;
  const auto before = net->one->weight.detach().clone();
  DdpOptions options = small_buckets();
  options.init_sync = false;
  DistributedDataParallel ddp{net, shared_comm(), options};
  CHECK(torch::equal(net->one->weight, before));
  ddp.backward(net(torch::ones({2, 4})).sum());
  CHECK(net->one->weight.grad().defined());
  if (world.size() == 1) return;
  options.init_sync = world.rank() != 0;
  one_error(
      [&] {
        DistributedDataParallel{net, shared_comm(), options};
      },
      "init_sync is false on rank 0 and true on " + ranks_text(1, world.size() - 1));
}

TEST_CASE("hooks with other options are one and the same error on every rank", "[2+]") {
  const auto& world = test_world();
  const bool other = world.rank() == world.size() - 1;
  const std::string here = " on " + ranks_text(0, world.size() - 2);
  const auto refused = [&](auto hook, const std::string& words) {
    Net net;
    one_error([&] { DistributedDataParallel{net, shared_comm(), {}, hook}; }, words);
  };
  refused(lockstep::PowerSgdHook{{.matrix_approximation_rank = other ? 2 : 1}},
          "the hook's matrix_approximation_rank is 1" + here + " and 2 on rank");
  refused(lockstep::PowerSgdHook{{.orthogonalization_epsilon = other ? 1e-8 : 0}},
          "the hook's orthogonalization_epsilon is 0");
  refused(lockstep::QuantizedHook{{.per_channel = true, .channel = other ? 64 : 512}},
          "the hook's channel is 512" + here + " and 64 on rank");
}

TEST_CASE("the mean of a sum cannot be added to gradients that are means already") {
  const bool search = GENERATE(false, true);
  Net net;
  DdpOptions options = small_buckets();
  options.find_unused_parameters = search;
  DistributedDataParallel ddp{net, shared_comm(), options};
  const auto step = [&](int number) { return ddp.backward_sum(net(batch_of(0, number)).sum(), 2); };
  step(0);
  refuses<GradientError>([&] { step(1); }, "still holds the previous");
  // Clipping makes no sum of it.
  net->zero_grad();
  step(0);
  torch::nn::utils::clip_grad_norm_(net->parameters(), 1e-3);
  CHECK_THROWS_AS(step(1), GradientError);
  for (const bool to_none : {false, true}) {
    CHECK_NOTHROW(step(2));
    net->zero_grad(to_none);
    CHECK_NOTHROW(step(3));
    net->zero_grad(to_none);
  }
}

TEST_CASE("a report tells buckets, order, times and bytes") {
  const auto& world = test_world();
  Branches net;
  DistributedDataParallel ddp{net, shared_comm(), searching()};
  CHECK(ddp.report().reductions == 0);
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    ddp.backward(ddp(batch_of(world.rank(), step), 1).sum());
  }
  const lockstep::DdpReport report = ddp.report();
  CHECK(report.reductions == 3);
  CHECK(report.hook == "all_reduce");
  CHECK(report.buckets.size() == ddp.buckets().size());
  CHECK(report.unused == std::vector<std::size_t>{0, 1, 4, 5, 6, 7});
  CHECK(report.ready_order.size() == 4);
  std::int64_t bytes = 0;
  for (const auto& parameter : net->parameters()) bytes += static_cast<std::int64_t>(parameter.nbytes());
  const auto usage = 4 * (static_cast<std::int64_t>(net->parameters().size()) + 1);
  CHECK(report.bytes == (world.size() > 1 ? bytes + usage : 0));
  CHECK(report.bytes_so_far == 3 * report.bytes);
  CHECK(report.forward > 0);
  CHECK(report.backward > 0);
  CHECK(report.communication > 0);
  CHECK(report.unused_names.at(0) == net->named_parameters()[0].key());
}

TEST_CASE("the profiler sees each bucket on its way, and the end of a reduction") {
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets()};
  for (int step = 0; step < 2; ++step) ddp.backward(net(batch_of(0, 0)).sum());
  static int buckets = 0, ends = 0;
  buckets = ends = 0;
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        buckets += std::string(function.name()) == "lockstep::reduce_bucket" ? 1 : 0;
        ends += std::string(function.name()) == "lockstep::finish_reduction" ? 1 : 0;
        return nullptr;
      }));
  ddp.backward(net(batch_of(0, 0)).sum());
  at::removeCallback(handle);
  CHECK(buckets == static_cast<int>(ddp.buckets().size()));
  CHECK(ends == 1);
}

TEST_CASE("a sum with a count over two wrapped models is refused, on every rank") {
  torch::nn::Linear first(2, 2), second(2, 1);
  DistributedDataParallel one{first, shared_comm()};
  DistributedDataParallel other{second, shared_comm()};
  const auto x = torch::ones({1, 2});
  refuses<GradientError>([&] { one.backward_sum(second(first(x)).sum(), 1); },
                         "backward_sum reached another wrapped model");
  {
    const auto guard = other.no_sync();
    CHECK(one.backward_sum(second(first(x)).sum(), 1) == test_world().size());
  }
  one.backward(first(x).sum());
}

}  // namespace options_ranks_test
