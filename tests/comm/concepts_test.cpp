#include "lockstep/comm/communicator.hpp"

#include <type_traits>

#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/comm/local_comm.hpp"
#include "lockstep/comm/process_group_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "support/catch.hpp"

namespace concepts_test {

using lockstep::GlooComm;
using lockstep::LocalComm;
using lockstep::ProcessGroupComm;

// Each communicator models what its header says, and a Work is a thing that moves.
static_assert(lockstep::Communicator<GlooComm> && lockstep::Communicator<LocalComm>);
static_assert(lockstep::Splittable<GlooComm> && lockstep::Splittable<LocalComm>);
static_assert(lockstep::PointToPoint<GlooComm> && !lockstep::PointToPoint<LocalComm>);
static_assert(lockstep::AsyncWork<ProcessGroupComm::Work> && lockstep::AsyncWork<lockstep::LocalWork>);
static_assert(lockstep::PointToPoint<ProcessGroupComm> && lockstep::Splittable<ProcessGroupComm>);
static_assert(lockstep::DeviceCommunicator<ProcessGroupComm> && !lockstep::DeviceCommunicator<GlooComm>);
static_assert(!lockstep::Labelled<ProcessGroupComm>);
static_assert(!std::is_copy_constructible_v<GlooComm>);
static_assert(std::is_empty_v<lockstep::LocalWork>);
static_assert(!lockstep::Communicator<int> && !lockstep::AsyncWork<int>);

namespace {

/// A communicator with the required members alone, and no base: two ranks with the same tensors.
class OwnComm {
 public:
  using Work = lockstep::LocalWork;

  explicit OwnComm(const lockstep::World& world) : world_(world) {}
  [[nodiscard]] int rank() const { return 0; }
  [[nodiscard]] int size() const { return 2; }
  [[nodiscard]] const lockstep::World& world() const { return world_; }
  Work all_reduce(at::TensorList tensors, lockstep::ReduceOp op) {
    if (op != lockstep::ReduceOp::sum) throw lockstep::CommunicationError("sums only");
    for (const at::Tensor& tensor : tensors) tensor.detach().mul_(2);
    return {};
  }
  Work broadcast(at::TensorList, int) { return {}; }
  Work all_gather(at::TensorList outputs, at::TensorList inputs) {
    for (std::size_t i = 0; i < outputs.size(); ++i)
      outputs[i].detach().copy_(at::stack({inputs[i], inputs[i]}));
    return {};
  }
  std::vector<std::string> all_gather_bytes(const std::string& bytes) { return {bytes, bytes}; }
  std::string broadcast_bytes(const std::string& bytes, int) { return bytes; }
  void abort(const std::string&) {}
  void shutdown() {}

 private:
  lockstep::World world_;
};
static_assert(lockstep::Communicator<OwnComm> && !lockstep::Splittable<OwnComm>);

}  // namespace

TEST_CASE("DistributedDataParallel reduces over a communicator with the required members alone") {
  OwnComm comm{lockstep::World()};
  torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
  lockstep::DistributedDataParallel ddp{net, comm};
  const auto input = torch::randn({5, 3});
  const auto gradients = [&](auto&& backward) {
    net->zero_grad();
    backward(net->forward(input).square().sum());
    std::vector<at::Tensor> copies;
    for (const auto& parameter : net->parameters()) copies.push_back(parameter.grad().clone());
    return copies;
  };
  const auto averaged = gradients([&](const at::Tensor&) { ddp.backward(ddp(input).square().sum()); });
  const auto plain = gradients([](const at::Tensor& loss) { loss.backward(); });
  for (std::size_t i = 0; i < plain.size(); ++i) CHECK(torch::allclose(averaged[i], plain[i]));
}

}  // namespace concepts_test
