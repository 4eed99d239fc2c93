// A model whose parts live on two GPUs of each rank: one NcclComm serves both.
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <vector>

#include "lockstep/comm/nccl_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "support/mib.hpp"
#include "support/ranks.hpp"

namespace two_devices_test {

namespace {

struct HalvesImpl : torch::nn::Module {
  HalvesImpl(at::Device one, at::Device other) : one(one), other(other) {
    first = register_module("first", torch::nn::Linear(4, 6));
    second = register_module("second", torch::nn::Linear(6, 3));
    first->to(one);
    second->to(other);
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(first(x.to(one)).tanh().to(other)).cpu(); }
  at::Device one, other;
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Halves);

// The second GPU of this rank: of as many as there are, one that no other rank uses where there are enough.
at::Device second_device(const at::Device& first) {
  const int gpus = static_cast<int>(torch::cuda::device_count());
  return {at::kCUDA, static_cast<c10::DeviceIndex>((first.index() + test_world().local_size()) % gpus)};
}

}  // namespace

TEST_CASE("a model on two GPUs is trained as one on the CPU") {
  const auto& world = test_world();
  if (static_cast<int>(torch::cuda::device_count()) < 2 * world.local_size()) {
    WARN("SKIPPED: fewer than two GPUs for each rank");
    return;
  }
  lockstep::NcclComm comm(world);
  torch::manual_seed(5);
  Halves split(comm.tensor_device(), second_device(comm.tensor_device()));
  torch::manual_seed(5);
  Halves whole(at::kCPU, at::kCPU);
  lockstep::DistributedDataParallel ddp{split, comm, {.bucket_cap_mb = lockstep_test::mib({64})}};
  torch::optim::SGD one(split->parameters(), 0.1), other(whole->parameters(), 0.1);
  for (int step = 0; step < 5; ++step) {
    std::vector<torch::Tensor> all;
    for (int rank = 0; rank < world.size(); ++rank) {
      torch::manual_seed(10 * step + rank);
      all.push_back(torch::randn({6, 4}));
    }
    one.zero_grad();
    ddp.backward(ddp(all[static_cast<std::size_t>(world.rank())]).pow(2).mean());
    one.step();
    other.zero_grad();
    whole(torch::cat(all)).pow(2).mean().backward();
    other.step();
    for (std::size_t i = 0; i < split->parameters().size(); ++i)
      CHECK(torch::allclose(split->parameters()[i].cpu(), whole->parameters()[i], 1e-4, 1e-5));
  }
  // A device that is named for such a model is refused.
  CHECK_THROWS_AS(lockstep::DistributedDataParallel(split, comm, {.device = comm.tensor_device()}),
                  lockstep::UsageError);
}

#ifdef LOCKSTEP_DETAIL_HAS_NCCL2
TEST_CASE("nccl2 serves one GPU and refuses the others") {
  if (torch::cuda::device_count() < 2) {
    WARN("SKIPPED: fewer than two GPUs");
    return;
  }
  lockstep::NcclComm comm(test_world(), {.engine = lockstep::NcclEngine::nccl2});
  const auto tensor = torch::ones({2}, second_device(comm.tensor_device()));
  if (tensor.device() == comm.tensor_device()) {
    WARN("SKIPPED: no GPU is left beside this rank's");
    return;
  }
  CHECK_THROWS_AS(comm.all_reduce(std::vector<torch::Tensor>{tensor}).synchronize(),
                  lockstep::CommunicationError);
}
#endif

}  // namespace two_devices_test
