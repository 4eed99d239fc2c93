// ProcessGroupComm over LibTorch's ProcessGroupNCCL, beside NcclComm.
#include <torch/torch.h>

#include <chrono>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/comm/nccl_comm.hpp"
#include "lockstep/comm/process_group_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/lockstep.hpp"
#include "support/mib.hpp"
#include "support/ranks.hpp"
#ifndef USE_C10D_NCCL
#define USE_C10D_NCCL
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace process_group_gpu_test {

namespace {

lockstep::ProcessGroupComm over_nccl(const lockstep::World& world, at::Device device) {
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  if (world.size() > 1)
    store = c10::make_intrusive<c10d::PrefixStore>("gpu_test", world.connect_again(std::chrono::seconds(60)));
  return {world,
          c10::make_intrusive<c10d::ProcessGroupNCCL>(store, world.rank(), world.size()),
          {.device = device}};
}

// The parameters after three steps over `comm`.
template <class Comm>
std::vector<at::Tensor> trained(Comm& comm) {
  torch::manual_seed(5);
  torch::nn::Sequential net(torch::nn::Linear(4, 6), torch::nn::Tanh(), torch::nn::Linear(6, 3));
  net->to(comm.tensor_device());
  lockstep::DistributedDataParallel ddp{net, comm, {.bucket_cap_mb = lockstep_test::mib({64})}};
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    torch::manual_seed(10 * step + comm.rank());
    optimizer.zero_grad();
    ddp.backward(ddp(torch::randn({6, 4}).to(comm.tensor_device())).pow(2).mean());
    optimizer.step();
  }
  ddp.synchronize();
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : net->parameters()) parameters.push_back(parameter.detach().cpu());
  return parameters;
}

}  // namespace

TEST_CASE("ProcessGroupComm over ProcessGroupNCCL computes what NcclComm computes") {
  const auto& world = test_world();
  lockstep::NcclComm nccl(world);
  const at::Device device = nccl.tensor_device();
  lockstep::ProcessGroupComm group = over_nccl(world, device);
  CHECK(group.tensor_device() == device);

  auto sum = at::arange(1000, at::TensorOptions(device).dtype(at::kFloat)) * (world.rank() + 1);
  auto other = sum.clone();
  nccl.all_reduce(sum).synchronize();
  group.all_reduce(other).synchronize();
  CHECK(at::equal(sum, other));

  const auto one = trained(nccl), two = trained(group);
  for (std::size_t i = 0; i < one.size(); ++i) {
    // Over more than two ranks NCCL may choose another order of the sum.
    CHECK(at::allclose(one[i], two[i], 1e-5, 1e-6));
    if (world.size() <= 2) CHECK(at::equal(one[i], two[i]));
  }
  group.shutdown();
}

}  // namespace process_group_gpu_test
