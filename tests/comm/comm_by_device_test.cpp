#include "lockstep/comm/comm_by_device.hpp"

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/local_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "support/catch.hpp"

namespace comm_by_device_test {

namespace {

/// Notes what it is asked for; its device is that of tensors without memory, of which every machine has one.
class MetaComm {
 public:
  struct [[nodiscard]] Work : lockstep::LocalWork {};
  using Calls = std::vector<std::string>;
  MetaComm(const lockstep::World& world, std::shared_ptr<Calls> calls)
      : local_(world), calls_(std::move(calls)) {}

  [[nodiscard]] at::Device tensor_device() const { return at::kMeta; }
  [[nodiscard]] int rank() const { return 0; }
  [[nodiscard]] int size() const { return 1; }
  [[nodiscard]] const lockstep::World& world() const { return local_.world(); }
  template <class T>
  Work all_reduce(const T&, lockstep::ReduceOp = lockstep::ReduceOp::sum) {
    return note("all_reduce");
  }
  template <class T>
  Work reduce(const T&, int = 0, lockstep::ReduceOp = lockstep::ReduceOp::sum) {
    return note("reduce");
  }
  template <class T>
  Work broadcast(const T&, int = 0) {
    return note("broadcast");
  }
  template <class T>
  Work reduce_scatter(const T&, const T&, lockstep::ReduceOp = lockstep::ReduceOp::sum) {
    return note("reduce_scatter");
  }
  template <class T>
  Work all_gather(const T&, const T&) {
    return note("all_gather");
  }
  template <class T>
  Work all_to_all(const T&, const T&) {
    return note("all_to_all");
  }
  std::vector<std::string> all_gather_bytes(const std::string&) {
    throw std::logic_error("not over the device");
  }
  Work all_gather_bytes_async(std::vector<std::string>&, const std::string&) { return note("bytes"); }
  std::string broadcast_bytes(const std::string&, int = 0) { throw std::logic_error("not over the device"); }
  Work broadcast_bytes_async(std::string&, int = 0) { return note("bytes"); }
  void barrier() { static_cast<void>(note("barrier")); }
  Work barrier_async() { return note("barrier"); }
  void abort(const std::string&) { static_cast<void>(note("abort")); }
  void shutdown() { static_cast<void>(note("shutdown")); }
  at::Tensor empty_buffer(std::int64_t length, const at::Tensor& like) {
    static_cast<void>(note("empty_buffer"));
    return at::empty({length}, like.options());
  }
  void label(const std::shared_ptr<const std::string>& text) {
    static_cast<void>(note(text ? *text : "no label"));
  }

 private:
  Work note(const std::string& call) {
    calls_->push_back(call);
    return {};
  }
  lockstep::LocalComm local_;
  std::shared_ptr<Calls> calls_;
};

using Both = lockstep::CommByDevice<lockstep::LocalComm, MetaComm>;
static_assert(lockstep::Reducing<Both> && lockstep::Gathering<Both> && lockstep::Buffered<Both> &&
              lockstep::Labelled<Both> && !lockstep::DeviceCommunicator<Both>);

}  // namespace

TEST_CASE("each tensor goes over the communicator of its device, bytes and barriers over the host's") {
  const lockstep::World world;
  const auto calls = std::make_shared<MetaComm::Calls>();
  Both comm{lockstep::LocalComm(world), MetaComm(world, calls)};
  const auto here = torch::ones({2}), there = torch::ones({2}, torch::kMeta);
  using List = std::vector<at::Tensor>;
  comm.all_reduce(here).wait();
  comm.all_reduce(List{here, here}).synchronize();
  CHECK(comm.all_gather(torch::empty({1, 2}), here).error() == nullptr);
  CHECK(calls->empty());
  comm.all_reduce(there).synchronize(std::chrono::milliseconds(1));
  comm.reduce(List{there}).wait();
  comm.broadcast(there, 0).wait();
  comm.reduce_scatter(there, there).wait();
  comm.all_gather(List{there, there}, List{there, there}).wait();
  comm.all_to_all(there, there).wait();
  CHECK(*calls ==
        MetaComm::Calls{"all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all"});
  calls->clear();
  CHECK(comm.all_gather_bytes("x") == std::vector<std::string>{"x"});
  CHECK(comm.broadcast_bytes("y") == "y");
  comm.barrier();
  CHECK(calls->empty());
  CHECK(comm.empty_buffer(3, here).is_cpu());
  CHECK(comm.empty_buffer(3, there).is_meta());
  comm.abort("why");
  comm.shutdown();
  CHECK(*calls == MetaComm::Calls{"empty_buffer", "abort", "shutdown"});
  CHECK_THROWS_WITH(comm.all_reduce(List{here, there}), ContainsSubstring("tensors on cpu and on meta"));
  CHECK_THROWS_WITH((Both{lockstep::LocalComm(world), MetaComm(world, calls), MetaComm(world, calls)}),
                    ContainsSubstring("two communicators of meta"));
}

TEST_CASE("the gradients of a model on two devices are reduced on each") {
  const lockstep::World world;
  const auto calls = std::make_shared<MetaComm::Calls>();
  Both comm{lockstep::LocalComm(world), MetaComm(world, calls)};
  // A graph cannot go from tensors without memory to those with: the gradient of the second part is put in.
  std::vector<at::Tensor> parts{torch::ones({3}, torch::requires_grad()),
                                torch::ones({4}, torch::device(torch::kMeta).requires_grad(true))};
  lockstep::DistributedDataParallel ddp{parts, comm, {.find_unused_parameters = true, .init_sync = false}};
  REQUIRE(ddp.buckets().size() == 2);
  calls->clear();
  {
    const auto guard = ddp.no_sync();
    parts[1].mutable_grad() = torch::ones({4}, torch::kMeta);
  }
  ddp.backward(parts[0].sum());
  CHECK(std::count(calls->begin(), calls->end(), "all_reduce") == 1);
  CHECK(torch::equal(parts[0].grad(), torch::ones({3})));
}

}  // namespace comm_by_device_test
