// Captured steps of parts that a graph cannot hold: each is told by one sentence.
#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/grad/hooks/power_sgd_hook.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/optim/zero_redundancy.hpp"
#include "lockstep/train/captured_step.hpp"
#include "lockstep/train/extras.hpp"
#include "support/played_graph.hpp"
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

void program(PlayedGraph graph, TinyNet& net, LocalComm& comm, lockstep::GlooComm& gloo, lockstep::SGD& sgd,
             torch::optim::SGD& numbers, lockstep::ZeroRedundancyOptimizer<LocalComm>& sharded, Fp32& fp32,
             ReadsOnHost& reads) {
  const auto loss = [](TinyNet& model, const auto&) { return model->last->weight.sum(); };
  CapturedStep wrong_graph{3, net, comm, sgd, fp32, loss};
  CapturedStep wrong_comm{graph, net, gloo, sgd, fp32, loss};
  CapturedStep wrong_optimizer{graph, net, comm, numbers, fp32, loss};
  CapturedStep sharded_optimizer{graph, net, comm, sharded, fp32, loss};
  CapturedStep wrong_precision{graph, net, comm, sgd, reads, loss};
  CapturedStep wrong_hook{graph, net, comm, sgd, fp32, loss, {}, lockstep::PowerSgdHook{}};
  CapturedStep wrong_between{graph, net, comm, sgd, fp32, loss, {}, AllReduceHook{}, lockstep::CheckFinite{}};
  CapturedStep step{graph, net, comm, sgd, fp32, loss};
  NoTensors no_tensors;
  step(no_tensors);
  CapturedStep no_loss{graph, net, comm, sgd, fp32, [](TinyNet&, const auto&) { return "no loss"; }};
  lockstep::Example batch;
  no_loss(batch);
}
