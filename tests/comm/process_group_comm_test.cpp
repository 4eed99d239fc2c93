// ProcessGroupComm over backends of this test: without operations, polled, and on a device.
#include "lockstep/comm/process_group_comm.hpp"

#include <ATen/ATen.h>

#include <atomic>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "support/catch.hpp"
#include "support/refuses.hpp"

namespace process_group_comm_test {

using lockstep::ProcessGroupComm;
using lockstep::ReduceOp;
using lockstep::World;
using namespace std::chrono_literals;

namespace {

/// A work that completes when it is asked for the `questions`-th time.
struct PolledWork : c10d::Work {
  explicit PolledWork(int questions = 1) : left(questions) {}
  bool isCompleted() override { return --left <= 0; }
  bool wait(std::chrono::milliseconds) override { return ++waits > 0; }

  std::atomic<int> left;
  int waits = 0;
};

/// A backend without any operation.
struct PoorBackend : c10d::Backend {
  explicit PoorBackend(int rank = 0, int size = 1) : Backend(rank, size) {}
  [[nodiscard]] const std::string getBackendName() const override { return "poor"; }
};

/// Keeps the last operation, and returns a PolledWork.
struct KeepingBackend : PoorBackend {
  explicit KeepingBackend(std::string name) : name(std::move(name)) {}
  [[nodiscard]] const std::string getBackendName() const override { return name; }

  c10::intrusive_ptr<c10d::Work> keep(std::string what) {
    last = std::move(what);
    return work = c10::make_intrusive<PolledWork>(questions);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&,
                                           const c10d::AllreduceOptions& options) override {
    const auto op = static_cast<c10d::ReduceOp::RedOpType>(options.reduceOp);
    return keep(op == c10d::ReduceOp::AVG ? "allreduce avg" : "allreduce");
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor&, at::Tensor&,
                                                      const c10d::ReduceScatterOptions&) override {
    return keep("reduce_scatter");
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor&, at::Tensor&,
                                                 const c10d::AllgatherOptions&) override {
    return keep("allgather");
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>&, int, int) override { return keep("send"); }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    return keep("barrier on " + std::to_string(options.device_ids.size()));
  }

  std::string name, last;
  int questions = 1;
  c10::intrusive_ptr<PolledWork> work;
};

lockstep::ProcessGroupOptions on_meta() {
  lockstep::ProcessGroupOptions options;
  options.device = at::Device(at::kMeta, 0);
  return options;
}

}  // namespace

TEST_CASE("a backend that does not fit is refused") {
  const auto made = [](c10::intrusive_ptr<c10d::Backend> backend,
                       const lockstep::ProcessGroupOptions& options = {}) {
    return [=] { const ProcessGroupComm comm{World(), backend, options}; };
  };
  using lockstep::UsageError;
  refuses<UsageError>(made({}), "the backend is null");
  refuses<UsageError>(made(c10::make_intrusive<PoorBackend>(1, 2)),
                      "the backend is rank 1 of 2, and the world is rank 0 of 1");
  lockstep::ProcessGroupOptions options;
  options.device = at::Device(at::kMeta);
  refuses<UsageError>(made(c10::make_intrusive<PoorBackend>(), options), "the device 'meta' has no index");
  options = {};
  options.timeout = 0ms;
  refuses<UsageError>(made(c10::make_intrusive<PoorBackend>(), options),
                      "ProcessGroupOptions: a timeout of 0 ms");
}

TEST_CASE("an operation that the backend lacks is refused with both names") {
  ProcessGroupComm comm{World(), c10::make_intrusive<PoorBackend>()};
  const auto tensor = at::ones({2});
  using lockstep::CommunicationError;
  refuses<CommunicationError>([&] { static_cast<void>(comm.all_reduce(tensor)); },
                              "all_reduce: the backend 'poor' refused it: Backend poor does not support");
  refuses<CommunicationError>([&] { static_cast<void>(comm.all_reduce(at::empty({2}, at::kMeta))); },
                              "is on meta, and the backend 'poor' moves CPU tensors: call cpu() first");
  CHECK_THROWS_AS(comm.reduce_scatter(tensor[0], tensor[0].view({1})), CommunicationError);
  CHECK_THROWS_AS(comm.barrier(), CommunicationError);
  CHECK_FALSE(comm.can_split());
  refuses<CommunicationError>([&] { static_cast<void>(comm.new_group({0})); },
                              "new_group: the backend 'poor' cannot split");
}

TEST_CASE("a work that announces nothing is asked until it is complete") {
  const auto backend = c10::make_intrusive<KeepingBackend>("quiet");
  ProcessGroupComm comm{World(), backend};
  const auto tensor = at::ones({2});
  backend->questions = 3;
  auto work = comm.all_reduce(tensor, ReduceOp::avg);
  CHECK(backend->last == "allreduce");  // a CPU's backend sums, and the caller divides
  work.wait();
  CHECK(backend->work->left == 0);
  backend->questions = 1 << 30;
  auto late = comm.all_reduce(tensor);
  CHECK_THROWS_AS(late.synchronize(10ms), lockstep::TimeoutError);
  CHECK(late.error() == nullptr);
  backend->work->left = 1;
  late.synchronize();
}

TEST_CASE("on a device a wait is the stream's, and the backend averages and scatters itself") {
  const auto backend = c10::make_intrusive<KeepingBackend>("nccl");
  ProcessGroupComm comm{World(), backend, on_meta()};
  CHECK(comm.tensor_device() == at::Device(at::kMeta, 0));
  const auto tensor = at::empty({2}, at::kMeta);
  backend->questions = 1 << 30;  // never complete on the host
  auto work = comm.all_reduce(tensor, ReduceOp::avg);
  CHECK(backend->last == "allreduce avg");
  work.wait();
  CHECK(backend->work->waits == 1);
  CHECK_THROWS_AS(work.synchronize(10ms), lockstep::TimeoutError);
  comm.reduce_scatter(at::empty({3}, at::kMeta), at::empty({1, 3}, at::kMeta)).wait();
  CHECK(backend->last == "reduce_scatter");
  comm.all_gather(at::empty({1, 3}, at::kMeta), at::empty({3}, at::kMeta)).wait();
  CHECK(backend->last == "allgather");
  static_cast<void>(comm.barrier_async());
  CHECK(backend->last == "barrier on 1");
  backend->last.clear();
  CHECK(comm.all_gather_bytes("bytes") == std::vector<std::string>{"bytes"});
  CHECK(comm.broadcast_bytes("bytes") == "bytes");
  CHECK(backend->last.empty());  // one rank sends nothing
  CHECK_THROWS_AS(comm.all_reduce(at::ones({2})), lockstep::CommunicationError);
}

}  // namespace process_group_comm_test
