// A model whose parts live on the CPU and on a GPU: each part's gradients travel over the communicator of its
// device.
#include <torch/torch.h>

#include <vector>

#include "lockstep/comm/comm_by_device.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/comm/nccl_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "support/mib.hpp"
#include "support/ranks.hpp"
#include "support/text_of.hpp"

namespace {

struct HalvesImpl : torch::nn::Module {
  explicit HalvesImpl(at::Device device) : device(device) {
    first = register_module("first", torch::nn::Linear(4, 6));
    second = register_module("second", torch::nn::Linear(6, 3));
    second->to(device);
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(first(x).tanh().to(device)).cpu(); }
  at::Device device;
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Halves);

}  // namespace

TEST_CASE("a model on the CPU and a GPU is trained as one on the CPU") {
  const auto& world = test_world();
  lockstep::NcclComm gpu(world);
  const at::Device device = gpu.tensor_device();
  lockstep::CommByDevice comm{lockstep::GlooComm(world), std::move(gpu)};
  torch::manual_seed(5);
  Halves split(device);
  torch::manual_seed(5);
  Halves whole(at::kCPU);
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
  CHECK_THAT(text_of<lockstep::UsageError>(
                 [&] { lockstep::DistributedDataParallel(split, comm, {.device = at::Device(at::kCPU)}); }),
             ContainsSubstring("live on several devices"));
}
