// Steps that are captured on several ranks, whose communicator plays one that a graph can hold.
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/grad/hooks/compression_hooks.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/precision/precision.hpp"
#include "lockstep/train/captured_step.hpp"
#include "support/played_graph.hpp"
#include "support/ranks.hpp"
#include "train/nets.hpp"

namespace captured_step_ranks_test {

namespace {

struct PlayedComm : lockstep::GlooComm {
  using GlooComm::GlooComm;
  static constexpr bool capturable = true;

  std::vector<std::string> all_gather_bytes(const std::string& bytes) {
    ++asked;
    return GlooComm::all_gather_bytes(bytes);
  }
  using GlooComm::all_reduce;
  Work all_reduce(const at::Tensor& tensor, lockstep::ReduceOp op = lockstep::ReduceOp::sum) {
    ++reduced;
    return GlooComm::all_reduce(tensor, op);
  }
  int asked = 0;  // the other ranks for bytes, which the host waits for
  int reduced = 0;
};

lockstep::Example batch_of(int step) {
  auto generator =
      at::detail::createCPUGenerator(static_cast<std::uint64_t>(step * 10 + test_world().rank() + 1));
  const auto data = torch::randn({4, 6}, generator);
  return {data, data.slice(1, 0, 3).argmax(1)};
}

const auto loss = [](TinyNet& net, const lockstep::Example& batch) {
  return torch::cross_entropy_loss(net(batch.data), batch.target);
};

TinyNet seeded_net() {
  torch::manual_seed(3);
  return TinyNet();
}

lockstep::SGD sgd_of(TinyNet& net) {
  return lockstep::SGD(
      net->parameters(),
      {.momentum = 0.9, .implementation = lockstep::Implementation::fused, .lr_tensor = torch::tensor(0.1)});
}

/// A step over a played graph, and all that it needs.
template <class Hook, class Precision = lockstep::Fp32>
struct Captured {
  explicit Captured(Precision policy = {}) : precision(std::move(policy)) {}
  PlayedComm comm{test_world()};
  TinyNet net = seeded_net();
  lockstep::SGD optimizer = sgd_of(net);
  Precision precision;
  std::shared_ptr<PlayedGraph::Log> log = std::make_shared<PlayedGraph::Log>();
  lockstep::CapturedStep<PlayedGraph, TinyNet, PlayedComm, lockstep::SGD, Precision,
                         std::remove_const_t<decltype(loss)>, Hook>
      step{PlayedGraph(log), net, comm, optimizer, precision, loss};
};

template <class Hook>
void check_like_plain() {
  Captured<Hook> captured;
  PlayedComm other(test_world());
  TinyNet by_hand = seeded_net();
  auto plain = sgd_of(by_hand);
  lockstep::DistributedDataParallel ddp(by_hand, other, {}, Hook());
  for (int i = 0; i < 7; ++i) {
    auto batch = batch_of(i);
    captured.step(batch);
    plain.zero_grad();
    ddp.before_forward();
    ddp.backward(loss(by_hand, batch));
    plain.step();
  }
  const auto one = captured.net->parameters(), two = by_hand->parameters();
  for (std::size_t i = 0; i < one.size(); ++i) CHECK(torch::equal(one[i], two[i]));
  CHECK(captured.step.captured());
  CHECK(captured.log->reads.empty());
}

}  // namespace

TEST_CASE("a captured step reduces as DistributedDataParallel does") {
  SECTION("plainly") {
    check_like_plain<lockstep::AllReduceHook>();
  }
  SECTION("in half precision on the wire") {
    check_like_plain<lockstep::Fp16Hook>();
  }
}

TEST_CASE("while a step is captured no rank looks whether another has lost a gradient") {
  Captured<lockstep::AllReduceHook> captured;
  auto batch = batch_of(0);
  for (int i = 0; i < 3; ++i) captured.step(batch);
  const int before = captured.comm.asked;
  batch.data.fill_(std::numeric_limits<float>::quiet_NaN());
  captured.step(batch);
  CHECK(captured.step.captured());
  CHECK(captured.comm.asked == before);
}

TEST_CASE("while a step is captured ranks exchange no failures where the hook does not") {
  Captured<lockstep::NoOpHook> captured;
  auto batch = batch_of(0);
  for (int i = 0; i < 3; ++i) captured.step(batch);
  const int before = captured.comm.reduced;
  CHECK(before == 3);
  captured.step(batch);
  CHECK(captured.step.captured());
  CHECK(captured.comm.reduced == before);
}

TEST_CASE("in a captured step not-a-number is a value, and the ranks agree on what to skip") {
  Captured<lockstep::NoOpHook, lockstep::Fp16> captured(lockstep::Fp16({.init_scale = 64}));
  for (int i = 0; i < 7; ++i) {
    auto batch = batch_of(i);
    if (i >= 5 && test_world().rank() == 0) batch.data.fill_(std::numeric_limits<float>::quiet_NaN());
    captured.step(batch);
  }
  CHECK(captured.precision.scaler().skipped() == 2);
  CHECK(captured.precision.scaler().get_scale() == 16);
}

}  // namespace captured_step_ranks_test
