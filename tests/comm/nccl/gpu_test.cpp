// NcclComm on real GPUs: one rank each, or several on one where NCCL_MULTI_RANK_GPU_ENABLE lets them.
#include "lockstep/comm/nccl_comm.hpp"

#include <c10/core/Event.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/torch.h>

#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/precision/precision.hpp"
#include "lockstep/train/captured_step.hpp"
#include "lockstep/train/cuda_graph.hpp"
#include "support/ranks.hpp"
#include "support/text_of.hpp"

namespace gpu_test {

using lockstep::NcclComm;
using lockstep::NcclOptions;
using lockstep::ReduceOp;
using std::vector;

namespace {

NcclComm& comm() {
  static NcclComm one(test_world(), {.timeout = std::chrono::seconds(60)});
  return one;
}
at::TensorOptions here(at::ScalarType type = at::kFloat) {
  return at::TensorOptions(type).device(at::kCUDA, c10::cuda::current_device());
}
double own() {
  return test_world().rank() + 1;
}
double total() {
  return test_world().size() * (test_world().size() + 1) / 2.0;
}
bool holds(const at::Tensor& tensor, double value) {
  return at::equal(tensor.cpu(), at::full_like(tensor.cpu(), value));
}

}  // namespace

TEST_CASE("NCCL reduces every type by every operation") {
  for (auto type :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kChar, at::kByte}) {
    CAPTURE(type);
    const auto reduced = [&](ReduceOp op) {
      auto tensor = at::full({1000}, own(), here(type));
      comm().all_reduce(tensor, op).wait();
      return tensor;
    };
    CHECK(holds(reduced(ReduceOp::sum), total()));
    CHECK(holds(reduced(ReduceOp::min), 1));
    CHECK(holds(reduced(ReduceOp::max), test_world().size()));
    CHECK(holds(reduced(ReduceOp::product), std::tgamma(test_world().size() + 1)));
    if (at::isFloatingType(type))
      CHECK(at::allclose(reduced(ReduceOp::avg).cpu().to(at::kFloat),
                         at::full({1000}, total() / test_world().size()), 1e-2));
  }
  auto any = at::zeros({4}, here(at::kBool));
  if (test_world().rank() == 0) any.fill_(true);
  comm().all_reduce(any).wait();
  CHECK(any.all().item<bool>());
}

TEST_CASE("NCCL moves every type") {
  const int size = test_world().size(), rank = test_world().rank();
  for (auto type : {at::kFloat, at::kShort, at::kBool, at::kComplexFloat}) {
    auto tensor = at::full({3}, own(), here(type));
    comm().broadcast(tensor, size - 1).wait();
    CHECK(at::equal(tensor.cpu(), at::full({3}, size, at::TensorOptions(type))));
    auto all = at::empty({size, 2}, here(type));
    comm().all_gather(all, at::full({2}, own(), here(type))).wait();
    CHECK(at::equal(all.cpu(), at::arange(1, size + 1).view({size, 1}).expand({size, 2}).to(type)));
  }
  auto there = at::full({3}, own(), here());
  comm().reduce(there, size - 1).wait();
  if (rank == size - 1) CHECK(holds(there, total()));
  auto row = at::empty({2}, here());
  comm().reduce_scatter(row, at::full({size, 2}, own(), here())).wait();
  CHECK(holds(row, total()));
  auto out = at::empty({size, 2}, here());
  auto in = (10 * own() + at::arange(size, here())).view({size, 1}).expand({size, 2}).contiguous();
  comm().all_to_all(out, in).wait();
  CHECK(at::equal(out.cpu(),
                  (10 * at::arange(1, size + 1) + rank).view({size, 1}).expand({size, 2}).to(at::kFloat)));
  if (size > 1 && rank == 0) comm().send(at::full({5}, 3, here()), 1).wait();
  if (size > 1 && rank == 1) {
    auto got = at::empty({5}, here());
    comm().recv(got, 0).wait();
    CHECK(holds(got, 3));
  }
  comm().barrier();
}

TEST_CASE("NCCL's lists, strides and bytes") {
  auto wide = at::full({4, 6}, own(), here());
  auto integers = at::full({3}, own(), here(at::kLong));
  comm().all_reduce(vector{integers, wide.narrow(1, 1, 2), at::empty({0}, here())}).wait();
  CHECK(holds(wide.narrow(1, 1, 2), total()));
  CHECK(holds(wide.narrow(1, 3, 3), own()));
  CHECK(holds(integers, total()));
  const auto texts = comm().all_gather_bytes(std::string(static_cast<std::size_t>(own()), 'x'));
  for (int r = 0; r < test_world().size(); ++r)
    CHECK(texts[static_cast<std::size_t>(r)].size() == static_cast<std::size_t>(r + 1));
  std::string text = test_world().rank() == 0 ? "from rank 0" : "";
  comm().broadcast_bytes_async(text, 0).synchronize();
  CHECK(text == "from rank 0");
}

TEST_CASE("joining does not wait for the stream") {
  auto tensor = at::full({1 << 20}, 1, here());
  for (int i = 0; i < 50; ++i) {
    auto work = comm().all_reduce(tensor);
    work.wait();
    tensor.div_(test_world().size());
    CHECK(work.error() == nullptr);
  }
  CHECK(holds(tensor, 1));
}

TEST_CASE("a CPU tensor is refused, and NCCL's group splits") {
  CHECK_THAT(
      text_of<lockstep::CommunicationError>([] { static_cast<void>(comm().all_reduce(at::ones({2}))); }),
      ContainsSubstring("on cpu, and NCCL moves tensors on cuda:"));
  auto first = comm().new_group({0});
  CHECK(first.has_value() == (test_world().rank() == 0));
  if (first) {
    auto tensor = at::ones({2}, here());
    first->all_reduce(tensor).wait();
    CHECK(holds(tensor, 1));
  }
}

TEST_CASE("a step of DistributedDataParallel on GPUs is the step on the joined batch") {
  torch::manual_seed(1);
  const auto make = [] {
    return torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::ReLU(), torch::nn::Linear(16, 1));
  };
  const int size = test_world().size(), rank = test_world().rank();
  auto model = make();
  model->to(here().device());
  const auto data = torch::randn({4 * size, 8}).to(here().device());
  auto twin = make();
  {
    torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < twin->parameters().size(); ++i)
      twin->parameters()[i].copy_(model->parameters()[i]);
  }
  twin->to(here().device());
  lockstep::DistributedDataParallel ddp{model, comm()};
  torch::optim::SGD optimizer(model->parameters(), 0.1), alone(twin->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    ddp.backward(model->forward(data.narrow(0, 4 * rank, 4)).pow(2).mean());
    optimizer.step();
    alone.zero_grad();
    twin->forward(data).pow(2).mean().backward();
    alone.step();
  }
  for (std::size_t i = 0; i < twin->parameters().size(); ++i)
    CHECK(torch::allclose(model->parameters()[i], twin->parameters()[i], 1e-4, 1e-6));
}

TEST_CASE("a backward does not wait for the GPU, and a rank that fails is heard of in the next one") {
  auto model = torch::nn::Linear(8, 4);
  model->to(here().device());
  lockstep::DistributedDataParallel ddp{model, comm()};
  const auto loss = [&] { return model->forward(torch::ones({2, 8}, here())).pow(2).mean(); };
  for (int step = 0; step < 3; ++step) ddp.backward(loss());
  CHECK(ddp.checks_late() == (test_world().size() > 1));
  ddp.synchronize();
  // Work that keeps the GPU busy for longer than a host needs to launch a backward.
  const auto busy = at::ones({4096, 4096}, here());
  auto product = busy;
  for (int i = 0; i < 100; ++i) product = product.matmul(busy).mul_(1.0 / 4096);
  ddp.backward(loss() + 0 * product[0][0]);
  c10::Event end(c10::DeviceType::CUDA);
  end.record(c10::cuda::getCurrentCUDAStream().unwrap());
  CHECK(!end.query());
  if (test_world().size() == 1) return;
  const int culprit = test_world().size() - 1;
  auto failing = loss();
  if (test_world().rank() == culprit)
    failing.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("thrown inside"); });
  const std::string own = text_of<std::exception>([&] { ddp.backward(failing * 1); });
  CHECK(own.empty() == (test_world().rank() != culprit));
  CHECK_THAT(text_of<lockstep::Error>([&] { ddp.backward(loss()); }),
             ContainsSubstring("thrown inside; found after backward 5 had returned"));
  ddp.backward(loss());
  ddp.synchronize();
}

TEST_CASE("a captured step with its reductions makes the steps of the plain one") {
  torch::manual_seed(1);
  const auto made = [] {
    return torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::ReLU(), torch::nn::Linear(16, 1));
  };
  auto net = made(), twin = made();
  net->to(here().device());
  twin->to(here().device());
  {
    torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < twin->parameters().size(); ++i)
      twin->parameters()[i].copy_(net->parameters()[i]);
  }
  const auto loss = [](torch::nn::Sequential& model, const at::Tensor& batch) {
    return model->forward(batch).pow(2).mean();
  };
  const auto options = [] {
    return lockstep::SgdOptions{.momentum = 0.9,
                                .implementation = lockstep::Implementation::fused,
                                .lr_tensor = torch::full({}, 0.1, here())};
  };
  lockstep::SGD optimizer(net->parameters(), options()), plain(twin->parameters(), options());
  lockstep::Fp32 precision;
  lockstep::CapturedStep step(lockstep::CudaGraph(here().device()), net, comm(), optimizer, precision, loss);
  lockstep::DistributedDataParallel ddp{twin, comm()};
  for (int i = 0; i < 8; ++i) {
    at::Tensor batch = torch::randn({4, 8}, here()).add_(own());
    step(batch);
    plain.zero_grad();
    ddp.backward(loss(twin, batch));
    plain.step();
  }
  CHECK(step.captured());
  for (std::size_t i = 0; i < twin->parameters().size(); ++i)
    CHECK(torch::allclose(net->parameters()[i], twin->parameters()[i], 1e-4, 1e-6));
}

TEST_CASE("buffers that are registered with NCCL reduce, and outlive the communicator") {
  for (const auto kind : {lockstep::NcclBuffers::registered, lockstep::NcclBuffers::nccl}) {
    at::Tensor outlives;
    {
      NcclComm own_comm(test_world(), {.timeout = std::chrono::seconds(60), .buffers = kind});
      const at::Tensor like = at::empty({0}, here());
      outlives = own_comm.empty_buffer(1000, like);
      for (int step = 0; step < 5; ++step) {
        at::Tensor dropped = own_comm.empty_buffer(100000, like).fill_(own());
        auto work = own_comm.all_reduce(dropped);
        dropped = at::Tensor();
        outlives.fill_(own());
        own_comm.all_reduce(outlives).wait();
        CHECK(holds(outlives, total()));
        work.wait();
      }
      auto model = torch::nn::Linear(8, 4);
      model->to(here().device());
      lockstep::DistributedDataParallel ddp{model, own_comm};
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        ddp.backward(model->forward(torch::ones({2, 8}, here())).sum());
        CHECK(holds(model->bias.grad(), 2));
      }
    }
    CHECK(holds(outlives, total()));
  }
}

}  // namespace gpu_test
