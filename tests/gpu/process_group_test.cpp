// NcclComm: LibTorch's engines, and a ProcessGroupNCCL that the program holds.
#include <torch/torch.h>

#include <chrono>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/comm/nccl_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/lockstep.hpp"
#include "lockstep/train/captured_step.hpp"
#include "support/mib.hpp"
#include "support/ranks.hpp"
#include "train/nets.hpp"

namespace process_group_gpu_test {

namespace {

lockstep::ProcessGroupComm of_program(const lockstep::World& world, at::Device device) {
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  if (world.size() > 1) store = c10::make_intrusive<c10d::PrefixStore>("gpu_test", world.store());
  return {world,
          c10::make_intrusive<c10d::ProcessGroupNCCL>(store, world.rank(), world.size()),
          {.device = device}};
}

at::TensorOptions on(const lockstep::NcclComm& comm) {
  return at::TensorOptions(comm.tensor_device()).dtype(at::kFloat);
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

template <class One, class Other>
void check_same_training(One& one, Other& other) {
  const auto here = trained(one), there = trained(other);
  for (std::size_t i = 0; i < here.size(); ++i) {
    // Over more than two ranks NCCL may choose another order of the sum.
    CHECK(at::allclose(here[i], there[i], 1e-5, 1e-6));
    if (test_world().size() <= 2) CHECK(at::equal(here[i], there[i]));
  }
}

}  // namespace

TEST_CASE("collectives, bytes, messages and sub-groups of NcclComm", "[gpu]") {
  lockstep::NcclComm comm(test_world());
  const int size = comm.size(), rank = comm.rank();
  using List = std::vector<at::Tensor>;
  auto sum = at::arange(1000, on(comm)) * (rank + 1);
  comm.all_reduce(List{sum}).synchronize();
  CHECK(at::equal(sum, at::arange(1000, on(comm)) * (size * (size + 1) / 2)));
  auto mean = at::full({3}, rank + 1.0, on(comm));
  comm.all_reduce(List{mean}, lockstep::ReduceOp::avg).wait();
  CHECK(at::allclose(mean, at::full({3}, (size + 1) / 2.0, on(comm))));
  auto all = at::empty({size, 2}, on(comm));
  comm.all_gather(List{all}, List{at::full({2}, rank, on(comm))}).wait();
  for (int other = 0; other < size; ++other) CHECK(all[other][0].item<int>() == other);
  auto row = at::empty({2}, on(comm));
  comm.reduce_scatter(List{row}, List{at::ones({size, 2}, on(comm))}).wait();
  CHECK(row[0].item<int>() == size);
  auto sent = at::full({4}, rank == 0 ? 7 : 0, on(comm));
  comm.broadcast(List{sent}, 0).wait();
  CHECK(sent[3].item<int>() == 7);
  const auto bytes = comm.all_gather_bytes(std::to_string(rank));
  CHECK(bytes.back() == std::to_string(size - 1));
  comm.barrier();
  if (size > 1) {
    auto message = at::full({2}, rank, on(comm));
    if (rank == 0) comm.send(List{message}, 1).synchronize();
    if (rank == 1) comm.recv(List{message}, 0).synchronize();
    if (rank == 1) CHECK(message[0].item<int>() == 0);
  }
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  auto group = comm.new_group(ranks);
  REQUIRE(group.has_value());
  auto ones = at::ones({2}, on(comm));
  group->all_reduce(List{ones}).synchronize();
  CHECK(ones[0].item<int>() == size);
}

TEST_CASE("a ProcessGroupNCCL of the program's own computes what NcclComm computes", "[gpu]") {
  lockstep::NcclComm nccl(test_world());
  lockstep::ProcessGroupComm group = of_program(test_world(), nccl.tensor_device());
  CHECK(group.tensor_device() == nccl.tensor_device());
  check_same_training(nccl, group);
  group.shutdown();
}

#ifdef LOCKSTEP_DETAIL_HAS_NCCL2
TEST_CASE("both engines of LibTorch compute the same", "[gpu]") {
  lockstep::NcclComm nccl(test_world());
  lockstep::NcclComm nccl2(test_world(), {.engine = lockstep::NcclEngine::nccl2});
  check_same_training(nccl, nccl2);
}
#endif

TEST_CASE("a backward that fails throws on its rank, and on every rank one backward later", "[gpu][2+]") {
  lockstep::NcclComm comm(test_world());
  torch::manual_seed(5);
  torch::nn::Linear net(4, 3);
  net->to(comm.tensor_device());
  lockstep::DistributedDataParallel ddp{net, comm};
  const auto loss = [&] { return ddp(torch::randn({6, 4}, on(comm))).pow(2).mean(); };
  for (int step = 0; step < 2; ++step) ddp.backward(loss());
  CHECK(ddp.checks_late());
  auto failing = loss();
  if (comm.rank() == comm.size() - 1) {
    failing.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("thrown inside"); });
    CHECK_THROWS(ddp.backward(failing * 1));
  } else {
    ddp.backward(failing * 1);
  }
  CHECK_THROWS_AS(ddp.synchronize(), lockstep::Error);
  ddp.backward(loss());  // every rank goes on
}

TEST_CASE("a captured step reduces as DistributedDataParallel does", "[gpu][capture]") {
  lockstep::NcclComm comm(test_world());
  const auto optimizer_of = [&](TinyNet& net) {
    return lockstep::SGD(net->parameters(), {.momentum = 0.9,
                                             .implementation = lockstep::Implementation::fused,
                                             .lr_tensor = torch::full({}, 0.1, on(comm))});
  };
  const auto seeded = [&] {
    torch::manual_seed(3);
    TinyNet net;
    net->to(comm.tensor_device());
    return net;
  };
  const auto loss = [](TinyNet& net, const lockstep::Example& batch) {
    return torch::cross_entropy_loss(net(batch.data), batch.target);
  };
  TinyNet net = seeded(), by_hand = seeded();
  auto optimizer = optimizer_of(net), plain = optimizer_of(by_hand);
  lockstep::Fp32 precision;
  // A bucket a parameter: backward launches all but the last from LibTorch's thread.
  const lockstep::DdpOptions options{.bucket_cap_mb = lockstep_test::mib({1})};
  lockstep::CapturedStep step(comm.tensor_device(), net, comm, optimizer, precision, loss, {.ddp = options});
  lockstep::DistributedDataParallel ddp(by_hand, comm, options);
  for (int i = 0; i < 8; ++i) {
    auto generator =
        at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(10 * i + comm.rank() + 1));
    const auto data = torch::randn({4, 6}, generator);
    lockstep::Example batch{data.to(comm.tensor_device()),
                            data.slice(1, 0, 3).argmax(1).to(comm.tensor_device())};
    step(batch);
    plain.zero_grad();
    ddp.before_forward();
    ddp.backward(loss(by_hand, batch));
    plain.step();
  }
  CHECK(step.captured());
  const auto one = net->parameters(), two = by_hand->parameters();
  for (std::size_t i = 0; i < one.size(); ++i) CHECK(torch::allclose(one[i], two[i], 1e-4, 1e-5));
}

}  // namespace process_group_gpu_test
