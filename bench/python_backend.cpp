// lockstep's shared memory as a backend of torch.distributed, so that Python's DistributedDataParallel can be measured over it:
//   dist.Backend.register_backend("lockstep", bench_python_backend.create, devices=["cpu"])
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/detail/shm_backend.hpp"
#include "lockstep/comm/detail/shm_exchange.hpp"

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Adds to a Work of ShmBackend the future that c10d::Reducer needs. ShmBackend has no thread that could complete a future, so
// getFuture() blocks until the Work is complete. A model of one bucket loses no overlap: its last gradient launches the bucket.
class FutureWork final : public c10d::Work {
 public:
  FutureWork(WorkPtr work, Tensors tensors) : work_(std::move(work)), tensors_(std::move(tensors)) {}

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  bool wait(std::chrono::milliseconds timeout) override { return work_->wait(timeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    work_->wait();
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(at::IValue(tensors_));
    return future;
  }

 private:
  const WorkPtr work_;
  const Tensors tensors_;
};

// The operations of ShmBackend that DistributedDataParallel calls.
class Backend final : public c10d::Backend {
 public:
  explicit Backend(c10::intrusive_ptr<lockstep::detail::ShmBackend> shm)
      : c10d::Backend(shm->getRank(), shm->getSize()), shm_(std::move(shm)) {}

  const std::string getBackendName() const override { return "lockstep"; }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return c10::make_intrusive<FutureWork>(shm_->allreduce(tensors, options), tensors);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return shm_->broadcast(tensors, options);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    return shm_->allgather(outputs, inputs, options);
  }

 private:
  const c10::intrusive_ptr<lockstep::detail::ShmBackend> shm_;
};

c10::intrusive_ptr<c10d::Backend> create(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                         std::chrono::milliseconds timeout) {
  const lockstep::detail::ShmBoard board{
      [&](const std::string& key, const std::string& value) { store->set(key, value); },
      [&](const std::string& key) { return store->get_to_str(key); }};
  auto shared = lockstep::detail::share_memory(board, rank, size, timeout);
  TORCH_CHECK(shared.memory, "the ranks cannot share memory: ", shared.obstacle);
  return c10::make_intrusive<Backend>(
      c10::make_intrusive<lockstep::detail::ShmBackend>(std::move(shared.memory), rank, shared.spins));
}

}  // namespace

PYBIND11_MODULE(bench_python_backend, module) {
  module.def("create", &create, py::call_guard<py::gil_scoped_release>());
}
