#include "lockstep/grad/distributed_data_parallel.hpp"

#include <atomic>
#include <chrono>
#include <thread>

#include "defects.hpp"
#include "lockstep/grad/hooks/compression_hooks.hpp"
#include "lockstep/nn/sync_batch_norm.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/optim/zero_redundancy.hpp"
#include "support/catch.hpp"
#include "support/mib.hpp"
#include "thread_ranks.hpp"

namespace ddp_test {

using namespace lockstep_test;
using lockstep::DistributedDataParallel;
using lockstep::NcclBuffers;
using lockstep::World;
using std::vector;

static_assert(lockstep::Labelled<FakeComm> && lockstep::Buffered<FakeComm>);

namespace {

torch::nn::Sequential network() {
  return torch::nn::Sequential(torch::nn::Linear(6, 16), torch::nn::ReLU(), torch::nn::Linear(16, 3));
}
vector<torch::nn::Sequential> equal_networks(int number) {
  vector<torch::nn::Sequential> all;
  for (int i = 0; i < number; ++i) {
    torch::manual_seed(7);
    all.push_back(network());
  }
  return all;
}
at::Tensor loss_of(torch::nn::Sequential& model, const at::Tensor& batch) {
  return model->forward(batch).pow(2).mean();
}

// Small buckets, so that there are several, and three steps, so that they are rebuilt.
template <class Device = FakeDevice, class Hook = lockstep::AllReduceHook>
vector<std::string> train(FakeMachine& machine, vector<torch::nn::Sequential>& models, const at::Tensor& data,
                          NcclBuffers buffers = NcclBuffers::torch, const Hook& hook = {},
                          std::chrono::milliseconds poll = quick().poll) {
  return run_ranks(machine, static_cast<int>(models.size()), [&](const World& world) {
    auto& model = models[static_cast<std::size_t>(world.rank())];
    {
      lockstep::NcclOptions how = quick(std::chrono::seconds(20));
      how.buffers = buffers;
      how.poll = poll;
      lockstep::detail::BasicNcclComm<Device> comm(world, how);
      lockstep::DdpOptions options;
      options.bucket_cap_mb = lockstep_test::mib({100});
      DistributedDataParallel ddp{model, comm, options, Hook(hook)};
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        ddp.backward(loss_of(model, data[step][world.rank()]));
        optimizer.step();
      }
    }
    // The gradients lie in the buckets, and outlive the communicator.
    expect((machine.buffers_left() > 0) == (buffers == NcclBuffers::nccl), "the buckets to be NCCL's");
    for (auto& parameter : model->parameters()) {
      expect(torch::isfinite(parameter.grad()).all().item<bool>(), "gradients that are there");
      parameter.mutable_grad() = at::Tensor();
    }
  });
}

// Faults of the fake device, while one lives.
struct Faults {
  Faults() = default;
  ~Faults() { FakeDevice::faults() = {}; }
  FakeDevice::Faults* operator->() { return &FakeDevice::faults(); }
};

lockstep::NcclOptions with_buffers(NcclBuffers kind) {
  lockstep::NcclOptions options = quick(std::chrono::seconds(5));
  options.buffers = kind;
  return options;
}

}  // namespace

TEST_CASE("DistributedDataParallel over NCCL's communicator trains as one process by hand") {
  torch::set_num_threads(1);
  for (int size : {2, 3}) {
    torch::manual_seed(1);
    const auto data = torch::randn({3, size, 4, 6});
    auto models = equal_networks(size);
    FakeMachine machine(/*eager=*/true);
    for (const std::string& error : train(machine, models, data)) CHECK(error == "");
    for (const std::string& violation : machine.violations()) CHECK(violation == "");

    auto by_hand = equal_networks(1)[0];
    torch::optim::SGD optimizer(by_hand->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 3; ++step) {
      vector<at::Tensor> sums;
      for (int rank = 0; rank < size; ++rank) {
        optimizer.zero_grad();
        loss_of(by_hand, data[step][rank]).backward();
        for (std::size_t i = 0; i < by_hand->parameters().size(); ++i) {
          const auto part = by_hand->parameters()[i].grad() * (1.0 / size);
          rank == 0 ? sums.push_back(part) : void(sums[i] += part);
        }
      }
      for (std::size_t i = 0; i < sums.size(); ++i) by_hand->parameters()[i].mutable_grad() = sums[i];
      optimizer.step();
    }
    for (auto& model : models)
      for (std::size_t i = 0; i < by_hand->parameters().size(); ++i) {
        const at::Tensor got = model->parameters()[i], wanted = by_hand->parameters()[i];
        // At two ranks a half is a half; at three, a third depends on where it is taken.
        if (size == 2) CHECK(at::equal(got, wanted));
        CHECK(at::allclose(got, wanted, 1e-5, 1e-7));
        CHECK(at::equal(got, models[0]->parameters()[i]));
      }
  }
}

TEST_CASE(
    "gradients in NCCL's memory, or in registered memory, are those of LibTorch's, and are given back") {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  const auto data = torch::randn({3, 2, 4, 6});
  auto plain = equal_networks(2);
  {
    FakeMachine machine(/*eager=*/true);
    for (const std::string& error : train(machine, plain, data)) CHECK(error == "");
  }
  for (const auto kind : {NcclBuffers::registered, NcclBuffers::nccl}) {
    auto models = equal_networks(2);
    FakeMachine machine(/*eager=*/true);
    for (const std::string& error : train(machine, models, data, kind)) CHECK(error == "");
    for (const std::string& violation : machine.violations()) CHECK(violation == "");
    CHECK(machine.buffers_left() == 0);
    for (std::size_t i = 0; i < plain[0]->parameters().size(); ++i)
      CHECK(at::equal(models[1]->parameters()[i], plain[1]->parameters()[i]));
  }
}

TEST_CASE("gradients that travel in half precision, or as bytes, are nearly those of all their bits") {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  const auto data = torch::randn({3, 2, 4, 6});
  auto plain = equal_networks(2);
  {
    FakeMachine machine(/*eager=*/true);
    train(machine, plain, data);
  }
  const auto check = [&](const auto& hook) {
    auto models = equal_networks(2);
    FakeMachine machine(/*eager=*/true);
    for (const std::string& error : train(machine, models, data, NcclBuffers::torch, hook))
      CHECK(error == "");
    check_clean(machine);
    bool same = true;
    for (std::size_t i = 0; i < plain[0]->parameters().size(); ++i) {
      const at::Tensor got = models[0]->parameters()[i], wanted = plain[0]->parameters()[i];
      CHECK(at::equal(got, models[1]->parameters()[i]));
      CHECK(at::allclose(got, wanted, 1e-2, 1e-3));
      same = same && at::equal(got, wanted);
    }
    CHECK(!same);
  };
  check(lockstep::Fp16Hook());
  check(lockstep::QuantizedHook());
}

TEST_CASE("batch norms over the ranks and a sharded optimizer make the steps on the joined batch") {
  torch::set_num_threads(1);
  const auto made = [] {
    torch::manual_seed(7);
    return torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8), torch::nn::Linear(8, 3));
  };
  const auto sgd = [](vector<at::Tensor> parameters) {
    return std::make_unique<lockstep::SGD>(std::move(parameters),
                                           lockstep::SgdOptions{.lr = 0.1, .momentum = 0.9});
  };
  torch::manual_seed(1);
  const auto data = torch::randn({2, 4, 6});
  vector<torch::nn::Sequential> models{made(), made()};
  auto joined = made();
  const auto alone = sgd(joined->parameters());
  for (int step = 0; step < 3; ++step) {
    alone->zero_grad();
    loss_of(joined, data.flatten(0, 1)).backward();
    alone->step();
  }
  vector<vector<at::Tensor>> trained(2);
  FakeMachine machine(/*eager=*/true);
  run_clean_ranks(machine, 2, [&](const World& world) {
    const auto rank = static_cast<std::size_t>(world.rank());
    FakeComm comm(world, quick());
    auto model = std::exchange(models[rank], nullptr);  // whose batch norm has a communicator of its own
    lockstep::convert_sync_batchnorm(model, comm);
    DistributedDataParallel ddp{model, comm};
    lockstep::ZeroRedundancyOptimizer optimizer{model->parameters(), comm, sgd};
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      ddp.backward(loss_of(model, data[world.rank()]));
      optimizer.step();
    }
    for (const at::Tensor& tensor : model->parameters()) trained[rank].push_back(tensor.detach().clone());
    for (const at::Tensor& tensor : model->buffers()) trained[rank].push_back(tensor.clone());
  });
  auto wanted = joined->parameters();
  for (const at::Tensor& tensor : joined->buffers()) wanted.push_back(tensor);
  for (const auto& got : trained) {
    REQUIRE(got.size() == wanted.size());
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(at::allclose(got[i], wanted[i], 1e-4, 1e-6));
  }
}

TEST_CASE("a backward whose reduction was ended by an error does not return") {
  torch::set_num_threads(1);
  auto models = equal_networks(2);
  FakeMachine machine(/*eager=*/true);
  const auto errors = run_ranks(machine, 2, [&](const World& world) {
    auto& model = models[static_cast<std::size_t>(world.rank())];
    FakeComm comm(world, quick(std::chrono::seconds(8)));
    DistributedDataParallel ddp{model, comm};
    comm.barrier();
    if (world.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      FakeDevice::inject(machine, 0, NcclResult::internal_error, "Net plugin broke");
      for (;;) comm.barrier();
    }
    ddp.backward(loss_of(model, torch::ones({4, 6})));
  });
  CHECK_THAT(errors[0], ContainsSubstring("failed on rank 0: NCCL: internal error: Net plugin broke"));
  CHECK_THAT(errors[1], ContainsSubstring("rank 0 failed first"));
}

TEST_CASE("buffers whose collective is aborted are given back once it has ended") {
  for (const auto kind : {NcclBuffers::registered, NcclBuffers::nccl}) {
    FakeMachine machine;
    machine.timeout = std::chrono::seconds(5);
    run_clean_ranks(machine, 1, [&](const World& world) {
      at::Tensor outlives;
      {
        FakeComm comm(world, with_buffers(kind));
        const at::Tensor like = at::empty({0}, at::kFloat);
        outlives = comm.empty_buffer(4, like);
        at::Tensor dropped = comm.empty_buffer(4, like);
        fill_later(dropped, 1);
        fill_later(outlives, 1);
        machine.freeze(0);
        static_cast<void>(comm.all_reduce(vector{dropped, outlives}));
        dropped = at::Tensor();
        comm.abort("the test says so");
        machine.thaw(0);
        // DistributedDataParallel makes its buckets anew after a failure: it gets memory all the same.
        expect(comm.empty_buffer(4, like).numel() == 4, "plain memory after an abort");
      }
      read(outlives);
    });
    CHECK(machine.buffers_left() == 0);
  }
}

TEST_CASE("buffers that cannot be had are errors that say what to do") {
  Faults faults;
  FakeMachine machine;
  machine.timeout = std::chrono::seconds(5);
  SECTION("an NCCL that has none") {
    faults->version = {{0, 21805}};
    for (const auto kind : {NcclBuffers::registered, NcclBuffers::nccl})
      CHECK_THAT(
          run_ranks(machine, 1, [&](const World& world) { FakeComm comm(world, with_buffers(kind)); })[0],
          ContainsSubstring("which NCCL 2.18.5 cannot do: install a torch with NCCL 2.19 or newer") &&
              ContainsSubstring("leave NcclBuffers::torch"));
    run_clean_ranks(machine, 1, [&](const World& world) { FakeComm comm(world, quick()); });
  }
  SECTION("no memory, or none that NCCL registers, on one rank") {
    const bool memory = GENERATE(true, false);
    std::string expected;
    if (memory) {
      faults->buffers = {{1, "CUDA out of memory"}};
      expected = "empty_buffer failed on rank 1: CUDA out of memory: rank 1's GPU is full";
    } else {
      faults->registration = {{1, NcclResult::system_error}};
      expected = "empty_buffer failed on rank 1: a buffer of 16 bytes cannot be registered: NCCL: ";
    }
    const auto errors = run_ranks(machine, 2, [&](const World& world) {
      FakeComm comm(world, with_buffers(NcclBuffers::nccl));
      const std::string error = thrown_by([&] {
        static_cast<void>(comm.empty_buffer(4, at::empty({0}, at::kFloat)));
        comm.barrier();
      });
      throw std::runtime_error(error);
    });
    CHECK_THAT(errors[1], ContainsSubstring("CommunicationError: " + expected));
    CHECK_THAT(errors[0], ContainsSubstring("PeerError: rank 1 failed first: " + expected));
    for (const std::string& violation : machine.violations()) CHECK(violation == "");
    CHECK(machine.buffers_left() == 0);
  }
}

TEST_CASE("a step whose operators do not wait for the reduction trains otherwise") {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  const auto data = torch::randn({3, 2, 4, 6});
  auto right = equal_networks(2), wrong = equal_networks(2);
  {
    FakeMachine machine(/*eager=*/true);
    train(machine, right, data);
  }
  FakeMachine machine(/*eager=*/true);
  std::string errors;
  // The machine does its work when somebody asks, and here no watchdog must do so before the step reads.
  for (const std::string& error : train<NoEventBehind>(machine, wrong, data, NcclBuffers::torch,
                                                       lockstep::AllReduceHook(), std::chrono::hours(1)))
    errors += error;
  for (const std::string& violation : machine.violations()) errors += violation;
  bool equal = true;  // on each rank: the one that comes to a collective last has the sums at once
  for (std::size_t rank = 0; rank < 2; ++rank)
    for (std::size_t i = 0; i < right[rank]->parameters().size(); ++i)
      equal = equal && at::equal(right[rank]->parameters()[i], wrong[rank]->parameters()[i]);
  CHECK((!equal || !errors.empty()));
}

TEST_CASE("a backward returns while its reduction is still to come") {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  const auto data = torch::randn({6, 2, 4, 6});
  auto models = equal_networks(2), twins = equal_networks(2);
  FakeMachine machine;  // the operators' stream does nothing before somebody waits for it
  std::atomic<int> returned{0};
  const int waits_before = FakeNanCheck::host_waits();
  std::atomic<int> waits_after_first{0};
  const auto errors = run_ranks(machine, 2, [&](const World& world) {
    auto& model = models[static_cast<std::size_t>(world.rank())];
    CheckedFakeComm comm(world, quick());
    lockstep::DdpOptions options;
    options.bucket_cap_mb = lockstep_test::mib({100});
    options.init_sync = false;
    DistributedDataParallel ddp{model, comm, options};
    const auto end_of_step = [&](int step) {
      machine.synchronize(FakeMachine::seat().current);
      at::Tensor wanted = at::zeros_like(model->parameters()[0]);
      for (int rank = 0; rank < 2; ++rank) {
        auto& twin = twins[static_cast<std::size_t>(world.rank())];
        loss_of(twin, data[step][rank]).backward();
        wanted += twin->parameters()[0].grad() / 2;
        twin->zero_grad();
      }
      expect(at::allclose(model->parameters()[0].grad(), wanted, 1e-4, 1e-6), "the mean of the gradients");
      model->zero_grad();
      comm.barrier();
    };
    ddp.backward(loss_of(model, data[0][world.rank()]));
    expect(ddp.checks_late() == false, "the first backward to be checked at once");
    end_of_step(0);
    if (world.rank() == 0) waits_after_first = FakeNanCheck::host_waits().load();
    comm.barrier();
    for (int step = 1; step < 5; ++step) {
      // Rank 1 comes to its backward when that of rank 0 has returned: rank 0 cannot have waited for the sums. The
      // second step begins with a broadcast of the bucket order, which does wait.
      const auto begin = std::chrono::steady_clock::now();
      while (step > 1 && world.rank() == 1 && returned < step) {
        expect(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10),
               "a backward that returns");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      ddp.backward(loss_of(model, data[step][world.rank()]));
      expect(ddp.checks_late(), "a late check");
      if (world.rank() == 0) returned = step;
      end_of_step(step);
    }
    ddp.synchronize();
    model->zero_grad();
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
  });
  for (const std::string& error : errors) CHECK(error == "");
  check_clean(machine);
  CHECK(waits_after_first >= waits_before);
  CHECK(FakeNanCheck::host_waits() == waits_after_first);  // and no host came to a check too early
}

TEST_CASE("a rank whose backward fails on a device is heard of in the next one") {
  torch::set_num_threads(1);
  auto models = equal_networks(3);
  FakeMachine machine(/*eager=*/true);
  const auto errors = run_ranks(machine, 3, [&](const World& world) {
    auto& model = models[static_cast<std::size_t>(world.rank())];
    CheckedFakeComm comm(world, quick());
    DistributedDataParallel ddp{model, comm};
    const auto loss = [&] { return loss_of(model, torch::ones({4, 6}) * (world.rank() + 1)); };
    for (int step = 0; step < 2; ++step) ddp.backward(loss());
    auto failing = loss();
    if (world.rank() == 1)
      failing.register_hook(
          [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("thrown inside"); });
    const std::string own = thrown_by([&] { ddp.backward(failing * 1); });
    expect(own.empty() == (world.rank() != 1), "an error of the rank that fails alone");
    std::string found = thrown_by([&] { ddp.backward(loss()); });
    ddp.backward(loss());
    ddp.synchronize();
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
    throw std::runtime_error(found);
  });
  for (const std::string& error : errors)
    CHECK_THAT(error, ContainsSubstring("backward threw on rank 1: thrown inside") &&
                          ContainsSubstring("found after backward 3 had returned"));
  CHECK_THAT(errors[0], ContainsSubstring("PeerError: "));
  CHECK_THAT(errors[1], !ContainsSubstring("PeerError: "));
  check_clean(machine);
}

TEST_CASE("a rank that never comes to a backward is named with the bucket") {
  torch::set_num_threads(1);
  auto models = equal_networks(2);
  FakeMachine machine(/*eager=*/true);
  Absence absence;
  const auto errors = run_ranks(machine, 2, [&](const World& world) {
    auto& model = models[static_cast<std::size_t>(world.rank())];
    FakeComm comm(world, quick(std::chrono::seconds(2)));
    DistributedDataParallel ddp{model, comm};
    comm.barrier();
    if (world.rank() == 1) return absence.stay_away(comm);
    const auto present = absence.until_end();
    const std::string error = thrown_by([&] {
      ddp.backward(loss_of(model, torch::ones({4, 6})));
      comm.barrier();
    });
    throw std::runtime_error(error);
  });
  CHECK_THAT(errors[0], ContainsSubstring("TimeoutError: rank 1 has not entered all_reduce #"));
  CHECK_THAT(errors[0], ContainsSubstring("(bucket 1 of 1, with parameter 0 "));
  CHECK_THAT(errors[1], ContainsSubstring("rank 0 failed first: rank 1 has not entered all_reduce #"));
}

}  // namespace ddp_test
