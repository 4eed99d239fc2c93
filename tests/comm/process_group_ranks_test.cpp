// ProcessGroupComm over a ProcessGroupGloo that the program holds. The whole suite of the communicators runs
// over it in process_group_suite.cpp.
#ifndef LOCKSTEP_TEST_PROCESS_GROUP
#define LOCKSTEP_TEST_PROCESS_GROUP
#endif
#include "lockstep/comm/process_group_comm.hpp"

#include <numeric>
#include <string>
#include <vector>

#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "support/catch.hpp"
#include "support/mib.hpp"
#include "support/ranks.hpp"
#include "support/tested_comm.hpp"

namespace process_group_ranks_test {

using lockstep::ProcessGroupComm;
using lockstep_test::process_group;

TEST_CASE("a backend is shared with other code, and outlives the communicator") {
  const auto backend = process_group(test_world());
  const auto sum_by_hand = [&](double value) {
    std::vector<at::Tensor> tensors{at::full({3}, value)};
    backend->allreduce(tensors)->wait();
    return tensors[0][0].item<double>();
  };
  {
    ProcessGroupComm comm{test_world(), backend};
    auto tensor = at::ones({5});
    auto work = comm.all_reduce(tensor);
    CHECK(sum_by_hand(2) == 2 * comm.size());
    work.synchronize();
    CHECK(tensor[0].item<double>() == comm.size());
    ProcessGroupComm second{test_world(), backend};
    second.barrier();
  }
  CHECK(sum_by_hand(1) == test_world().size());
}

TEST_CASE("sub-groups come from the backend, or from the program") {
  int made = 0;
  const auto backend = process_group(test_world());
  lockstep::ProcessGroupOptions options;
  SECTION("from the backend") {}
  SECTION("from the program") {
    options.make_backend = [&made](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
      ++made;
      auto gloo = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(60));
      gloo->devices = {c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
      return c10::intrusive_ptr<c10d::Backend>(
          c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, std::move(gloo)));
    };
  }
  const bool by_program = options.make_backend != nullptr;
  ProcessGroupComm comm{test_world(), backend, options};
  if (!by_program && !comm.can_split()) {  // LibTorch's Gloo cannot split itself in every version
    CHECK_THROWS_AS(comm.new_group({0}), lockstep::CommunicationError);
    return;
  }
  CHECK(comm.can_split());
  auto first = comm.new_group({0});
  CHECK(first.has_value() == (comm.rank() == 0));
  std::vector<int> ranks(static_cast<std::size_t>(comm.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  auto all = comm.new_group(ranks);
  REQUIRE(all.has_value());
  auto tensor = at::full({4}, comm.rank() + 1.0);
  all->all_reduce(tensor).synchronize();
  CHECK(tensor[0].item<double>() == comm.size() * (comm.size() + 1) / 2.0);
  CHECK(all->all_gather_bytes(std::to_string(comm.rank())).back() == std::to_string(comm.size() - 1));
  if (first) first->barrier();
  CHECK((made > 0) == by_program);
}

TEST_CASE("DistributedDataParallel reduces to the same bits over a process group as over GlooComm") {
  torch::set_num_threads(1);
  const auto trained = [&](auto& comm) {
    torch::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Linear(6, 40), torch::nn::Tanh(), torch::nn::Linear(40, 3));
    lockstep::DdpOptions options;
    options.bucket_cap_mb = lockstep_test::mib({256});
    lockstep::DistributedDataParallel ddp{net, comm, options};
    lockstep::SGD optimizer{net->parameters(), {.lr = 0.1, .momentum = 0.9}};
    torch::manual_seed(10 + static_cast<std::uint64_t>(comm.rank()));
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      ddp.backward(ddp(torch::randn({5, 6})).square().mean());
      optimizer.step();
    }
    std::vector<at::Tensor> parameters;
    for (const auto& parameter : net->parameters()) parameters.push_back(parameter.detach());
    return parameters;
  };
  ProcessGroupComm comm{test_world(), process_group(test_world())};
  lockstep::GlooComm gloo{test_world()};
  const auto here = trained(comm), there = trained(gloo);
  for (std::size_t i = 0; i < here.size(); ++i) CHECK(at::equal(here[i], there[i]));
}

}  // namespace process_group_ranks_test
