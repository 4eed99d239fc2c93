#include "lockstep/optim/zero_redundancy.hpp"

#include <torch/torch.h>

#include <functional>
#include <vector>

#include "grad/models.hpp"
#include "lockstep/comm/local_comm.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "optim/common.hpp"

namespace zero_redundancy_ranks_test {

using lockstep::AdamState;
using lockstep::Implementation;
using lockstep::ZeroRedundancyOptimizer;
using Made = std::unique_ptr<torch::optim::Optimizer>;
using Make = std::function<Made(std::vector<torch::Tensor>)>;
using Zero = ZeroRedundancyOptimizer<lockstep::CpuComm>;

namespace {

std::vector<std::pair<const char*, Make>> inner_optimizers() {
  return {
      {"SGD",
       [](auto p) {
         return std::make_unique<lockstep::SGD>(p, lockstep::SGDOptions{.lr = 0.1, .momentum = 0.9});
       }},
      {"Adam",
       [](auto p) { return std::make_unique<lockstep::Adam>(p, lockstep::AdamOptions{.amsgrad = true}); }},
      {"AdamW, fused",
       [](auto p) {
         return std::make_unique<lockstep::AdamW>(
             p, lockstep::AdamWOptions{.implementation = Implementation::fused});
       }},
      {"SGD in groups",
       [](std::vector<torch::Tensor> p) {
         std::vector<torch::optim::OptimizerParamGroup> groups;
         groups.push_back(lockstep::parameter_group({p[0], p[2]}, lockstep::SGDOptions{.weight_decay = 0.1}));
         groups.emplace_back(std::vector<torch::Tensor>{p[1], p[3], p[4]});
         return std::make_unique<lockstep::SGD>(groups, lockstep::SGDOptions{.lr = 0.1});
       }},
      {"torch::optim::Adam", [](auto p) { return std::make_unique<torch::optim::Adam>(p); }},
      {"torch::optim::RMSprop", [](auto p) { return std::make_unique<torch::optim::RMSprop>(p); }},
  };
}

void train(torch::optim::Optimizer& optimizer, std::vector<torch::Tensor>& parameters, int from, int to) {
  for (int step = from; step < to; ++step) {
    optimizer.zero_grad();
    set_gradients(parameters, step);
    // A schedule, through the groups of the outer optimizer.
    for (auto& group : optimizer.param_groups()) group.options().set_lr(0.01 / (1 + step));
    optimizer.step();
  }
}

}  // namespace

TEST_CASE("a sharded optimizer gives the parameters of the unsharded one to the bit") {
  for (const auto& [name, make] : inner_optimizers()) {
    CAPTURE(name);
    auto a = some_parameters(1), b = some_parameters(1);
    a[2] = a[2].detach().contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
    const auto whole = make(a);
    Zero sharded(b, shared_comm(), make);
    CHECK(sharded.param_groups().size() == whole->param_groups().size());
    train(*whole, a, 0, 50);
    train(sharded, b, 0, 50);
    CHECK(same_bits(a, b));
    // Each state is on one rank.
    std::int64_t states = static_cast<std::int64_t>(sharded.inner().state().size());
    auto sum = torch::tensor(states);
    shared_comm().all_reduce(sum).synchronize();
    CHECK(sum.item<std::int64_t>() == static_cast<std::int64_t>(whole->state().size()));
  }
}

TEST_CASE("a rank keeps its share of the state's bytes, dealt out as Python deals") {
  torch::manual_seed(1);
  std::vector<torch::Tensor> parameters;
  for (const int size : {300, 10, 200, 200, 100, 90})
    parameters.push_back(torch::randn({size}).requires_grad_());
  auto& comm = shared_comm();
  Zero sharded(parameters, comm, [](auto p) { return lockstep::Adam(std::move(p)); });
  set_gradients(parameters, 0);
  sharded.step();
  std::int64_t bytes = 0;
  for (const auto& item : sharded.inner().state())
    AdamState::each_tensor(static_cast<const AdamState&>(*item.second),
                           [&](const char*, const at::Tensor& tensor, bool like_parameter) {
                             if (tensor.defined() && like_parameter)
                               bytes += static_cast<std::int64_t>(tensor.nbytes());
                           });
  // Python's greedy partition of 300, 200, 200, 100, 90, 10 by hand.
  auto expected = comm.size() == 2   ? std::vector<std::int64_t>{300 + 100 + 90, 200 + 200 + 10}
                  : comm.size() == 3 ? std::vector<std::int64_t>{300, 200 + 100, 200 + 90 + 10}
                                     : std::vector<std::int64_t>{300, 200, 200, 100 + 90 + 10};
  CHECK(bytes == 2 * 4 * expected.at(static_cast<std::size_t>(comm.rank())));
  auto total = torch::tensor(bytes);
  comm.all_reduce(total).synchronize();
  CHECK(total.item<std::int64_t>() == 2 * 4 * 900);
  test_world().log.all().info("{} of {} bytes of state", bytes, total.item<std::int64_t>());
}

TEST_CASE("the state comes together on one rank, and is read at another number of ranks") {
  auto& comm = shared_comm();
  for (const auto& [name, make] : inner_optimizers()) {
    CAPTURE(name);
    auto a = some_parameters(2), b = some_parameters(2);
    const auto whole = make(a);
    Zero sharded(b, comm, make);
    train(*whole, a, 0, 5);
    train(sharded, b, 0, 5);
    CHECK(text_of<lockstep::CheckpointError>([&] { saved(sharded); }).find("call consolidate(rank)") !=
          std::string::npos);
    const int to = comm.size() - 1;
    sharded.consolidate(to);
    std::string bytes;
    if (comm.rank() == to) {
      bytes = saved(sharded);
      CHECK(saved(sharded).size() == bytes.size());  // saving takes nothing away
    } else {
      CHECK(text_of<lockstep::CheckpointError>([&] { saved(sharded); }) != "");
    }
    bytes = comm.broadcast_bytes(bytes, to);

    // Unsharded, at this number of ranks, and at two.
    auto c = some_parameters(2), d = some_parameters(2), e = some_parameters(2);
    {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < a.size(); ++i)
        for (auto* list : {&c, &d, &e}) (*list)[i].copy_(a[i]);
    }
    const auto alone = make(c);
    load(*alone, bytes);
    Zero again(d, comm, make);
    load(again, bytes);
    train(*whole, a, 5, 10);
    train(sharded, b, 5, 10);
    train(*alone, c, 5, 10);
    train(again, d, 5, 10);
    CHECK(same_bits(a, b));
    CHECK(same_bits(a, c));
    CHECK(same_bits(a, d));
    auto pair = comm.new_group({0, 1});
    if (pair) {
      Zero halved(e, *pair, make);
      load(halved, bytes);
      train(halved, e, 5, 10);
      CHECK(same_bits(a, e));
      pair->shutdown();
    }
  }
}

TEST_CASE("a sharded optimizer has the state dict of the unsharded one, and loads it") {
  auto& comm = shared_comm();
  const auto make = [](std::vector<torch::Tensor> p) {
    return std::make_unique<lockstep::Adam>(p, lockstep::AdamOptions{.amsgrad = true});
  };
  auto model = some_parameters(2), whole_model = some_parameters(2);
  Zero sharded(model, comm, make);
  const auto whole = make(whole_model);
  train(sharded, model, 0, 3);
  train(*whole, whole_model, 0, 3);
  CHECK_THROWS_AS(lockstep::state_dict(sharded), lockstep::CheckpointError);
  sharded.consolidate(0);
  const c10::IValue saved = lockstep::state_dict(*whole);
  if (comm.rank() == 0)
    CHECK(lockstep::pickle_state(lockstep::state_dict(sharded)) == lockstep::pickle_state(saved));

  auto again = some_parameters(2);
  Zero loaded(again, comm, make);
  lockstep::load_state_dict(loaded, saved);
  for (std::size_t i = 0; i < again.size(); ++i) again[i].detach().copy_(model[i].detach());
  train(loaded, again, 3, 5);
  train(*whole, whole_model, 3, 5);
  CHECK(same_bits(again, whole_model));
}

TEST_CASE("one process alone has all of the state") {
  const lockstep::World world;
  lockstep::LocalComm comm{world};
  auto p = some_parameters(1);
  ZeroRedundancyOptimizer optimizer(p, comm, [](auto list) { return lockstep::Adam(std::move(list)); });
  set_gradients(p, 0);
  optimizer.step();
  CHECK(optimizer.inner().state().size() == p.size());
  optimizer.consolidate();
  CHECK(saved(optimizer).size() > 0);
}

TEST_CASE("more ranks than parameters, and ranks whose parameters differ") {
  auto& comm = shared_comm();
  std::vector<torch::Tensor> one{torch::ones({5}).resize_({3}).requires_grad_()};
  Zero small(one, comm, [](auto p) { return lockstep::SGD(std::move(p), {.lr = 0.5}); });
  one[0].mutable_grad() = torch::ones({3});
  small.step();
  CHECK(torch::equal(one[0], torch::full({3}, 0.5)));
  // It grows within its storage.
  one[0].requires_grad_(false).resize_({5}).fill_(1).requires_grad_();
  one[0].mutable_grad() = torch::ones({5});
  small.step();
  CHECK(torch::equal(one[0], torch::full({5}, 0.5)));

  std::vector<torch::Tensor> odd{torch::ones({3 + (comm.rank() == 1)}).requires_grad_()};
  CHECK(text_of<lockstep::MismatchError>([&] {
          Zero(odd, comm, [](auto p) { return lockstep::SGD(std::move(p)); });
        }).find("rank 1") != std::string::npos);
}

}  // namespace zero_redundancy_ranks_test
