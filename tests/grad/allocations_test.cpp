// What a warm step allocates beyond the plain one: nothing of lockstep's own, and with a communicator's part,
// nothing that grows with the number of parameters.
#include <torch/torch.h>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/comm/local_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/mib.hpp"

namespace {

struct ScalarsImpl : torch::nn::Module {
  explicit ScalarsImpl(int count, at::ScalarType type) {
    for (int i = 0; i < count; ++i)
      weights.push_back(register_parameter("weight" + std::to_string(i), torch::ones({4}, type)));
  }
  torch::Tensor forward() { return torch::stack(weights).sum(); }
  std::vector<torch::Tensor> weights;
};

template <class Backward>
long warm_allocations(ScalarsImpl& model, Backward&& backward) {
  long most = 0;
  for (int step = 0; step < 40; ++step) {
    model.zero_grad(false);
    const auto loss = model.forward();
    const long before = lockstep_test::allocations;
    backward(loss);
    if (step >= 4) most = std::max(most, lockstep_test::allocations - before);  // warm by then
  }
  return most;
}

struct Nothing {
  void operator()() const {}
};

/// Allocations of a step's `backward(ddp, loss)` beyond those of a plain one with a hook on each parameter:
/// LibTorch copies the inputs of what has a hook.
template <class Comm, class Backward>
long extra_allocations(int count, Comm& comm, const lockstep::DdpOptions& options, Backward&& backward,
                       at::ScalarType type = at::kFloat) {
  ScalarsImpl plain(count, type), reduced(count, type);
  reduced.register_buffer("statistics", torch::ones({3}));
  std::vector<lockstep::detail::AccumulateHook<Nothing>> hooks;
  for (const auto& weight : plain.weights) hooks.emplace_back(weight, Nothing{});
  lockstep::DistributedDataParallel ddp{reduced, comm, options};
  const long without = warm_allocations(plain, [](const torch::Tensor& loss) { loss.backward(); });
  const long with = warm_allocations(reduced, [&](const torch::Tensor& loss) { backward(ddp, loss); });
  return with - without;
}

const auto plain_step = [](auto& ddp, const torch::Tensor& loss) {
  ddp.before_forward();
  ddp.backward(loss);
};

/// Two ranks with the same gradients, whose communicator has nothing to do: what is left is lockstep's own.
struct StillComm : lockstep::LocalComm {
  using LocalComm::LocalComm;
  [[nodiscard]] int size() const { return 2; }
  [[nodiscard]] std::vector<std::string> all_gather_bytes(const std::string& bytes) const {
    return {bytes, bytes};
  }
};

}  // namespace

TEST_CASE("once warm, lockstep allocates nothing for each parameter") {
  const auto world = lockstep::World::from_environment();
  lockstep::CpuComm comm{world};
  const long few = extra_allocations(10, comm, {}, plain_step);
  const long many = extra_allocations(210, comm, {}, plain_step);
  CAPTURE(few, many);
  CHECK(many - few < 20);
}

TEST_CASE("once warm, a step allocates nothing of lockstep's own") {
  StillComm comm{lockstep::World::from_environment()};
  lockstep::DdpOptions options;
  options.bucket_cap_mb = lockstep_test::mib({64});
  SECTION("with each option") {
    using Change = void (*)(lockstep::DdpOptions&);
    const auto change = GENERATE(values<Change>(
        {[](auto&) {},
         [](auto& given) { given.gradients = lockstep::GradientStorage::gradient_as_bucket_view; },
         [](auto& given) { given.batched_grad_copy = true; }, [](auto& given) { given.static_graph = true; },
         [](auto& given) { given.find_unused_parameters = true; }}));
    change(options);
    CHECK(extra_allocations(20, comm, options, plain_step) == 0);
    CHECK(extra_allocations(210, comm, options, plain_step) == 0);
  }
  SECTION("in other types") {
    for (const auto type : {at::kDouble, at::kBFloat16, at::kHalf})
      CHECK(extra_allocations(20, comm, options, plain_step, type) == 0);
  }
  SECTION("with an accumulated micro-batch before") {
    const auto accumulating = [](auto& ddp, const torch::Tensor& loss) {
      const auto guard = ddp.no_sync();
      ddp.before_forward();
      ddp.backward(loss);
    };
    CHECK(extra_allocations(20, comm, options, accumulating) == 0);
  }
}

TEST_CASE("counts take numbers of LibTorch's for each reduction, and nothing for each parameter") {
  StillComm comm{lockstep::World::from_environment()};
  const auto counting = [](auto& ddp, const torch::Tensor& loss) {
    ddp.before_forward();
    ddp.backward_sum(loss, 4);
  };
  CHECK(extra_allocations(20, comm, {}, counting) == extra_allocations(220, comm, {}, counting));
}
