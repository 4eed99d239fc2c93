// Captured steps of parts that a graph cannot hold: each is told by one sentence.
#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/grad/hooks/power_sgd_hook.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/optim/zero_redundancy.hpp"
#include "lockstep/train/captured_step.hpp"
#include "lockstep/train/extras.hpp"
#include "train/negative/common.hpp"

using lockstep::AllReduceHook;
using lockstep::CapturedStep;

struct ReadsOnHost {
  template <class Forward>
  decltype(auto) forward(Forward&& forward) {
    return std::forward<Forward>(forward)();
  }
  const torch::Tensor& scale(const torch::Tensor& loss) { return loss; }
  bool step(torch::optim::Optimizer&) { return true; }
};
struct NoTensors {};

void program(const c10::Device& device, TinyNet& net, LocalComm& comm, lockstep::CpuComm& gloo,
             lockstep::SGD& sgd, torch::optim::SGD& numbers,
             lockstep::ZeroRedundancyOptimizer<LocalComm>& sharded, Fp32& fp32, ReadsOnHost& reads) {
  const auto loss = [](TinyNet& model, const auto&) { return model->last->weight.sum(); };
  CapturedStep wrong_comm{device, net, gloo, sgd, fp32, loss};
  CapturedStep wrong_optimizer{device, net, comm, numbers, fp32, loss};
  CapturedStep sharded_optimizer{device, net, comm, sharded, fp32, loss};
  CapturedStep wrong_precision{device, net, comm, sgd, reads, loss};
  CapturedStep wrong_hook{device, net, comm, sgd, fp32, loss, {}, lockstep::PowerSgdHook{}};
  CapturedStep wrong_between{
      device, net, comm, sgd, fp32, loss, {}, AllReduceHook{}, lockstep::CheckFinite{}};
  CapturedStep step{device, net, comm, sgd, fp32, loss};
  NoTensors no_tensors;
  step(no_tensors);
  CapturedStep no_loss{device, net, comm, sgd, fp32, [](TinyNet&, const auto&) { return "no loss"; }};
  lockstep::Example batch;
  no_loss(batch);
}
