// Collectives that are captured into a graph, which a machine of the tests' own repeats.
#include "lockstep/train/captured_step.hpp"

#include <atomic>

#include "lockstep/optim/optimizers.hpp"
#include "lockstep/precision/precision.hpp"
#include "support/catch.hpp"
#include "thread_ranks.hpp"
#include "train/nets.hpp"

namespace capture_test {

using namespace lockstep_test;
using lockstep::World;
using std::vector;
using namespace std::chrono_literals;

static_assert(lockstep::StepGraph<CapturedGraph> && lockstep::Capturable<FakeComm>);

namespace {

void replay(FakeComm& comm, CapturedGraph& graph) {
  comm.watch_replay([&] { graph.replay(); });
}

}  // namespace

TEST_CASE("collectives that are captured happen in each replay, and leave nothing behind") {
  FakeMachine machine;
  run_clean_ranks(machine, 2, [&](const World& world) {
    FakeComm comm(world, quick());
    auto tensor = later({3}, world.rank() + 1), all = at::empty({2, 3}), often = later({3}, 0);
    CapturedGraph graph;
    comm.all_reduce(later({3}, 1)).wait();
    graph.capture([&] {
      for (int i = 0; i < 4; ++i) comm.all_reduce(tensor).wait();
      for (int i = 0; i < 20; ++i) comm.all_reduce(often).wait();
      auto dropped = comm.all_gather(all, tensor);
      comm.all_reduce(tensor).wait();
    });
    expect_equal(read(tensor), at::full({3}, world.rank() + 1), "nothing to happen in the capture");
    for (double sum = 3 * 8; sum < 3 * 8 * 32 * 32; sum *= 32) {
      replay(comm, graph);
      expect_equal(read(all), at::full({2, 3}, sum), "a gather");
      expect_equal(read(tensor), at::full({3}, 2 * sum), "five sums");
      auto between = later({2}, 1);
      comm.all_reduce(between).wait();
      expect_equal(read(between), at::full({2}, 2), "a sum between replays");
    }
  });
  CHECK(machine.events_made <= 2 * 16);
}

TEST_CASE("copies of what has strides live in the memory of the graph that they are captured into") {
  FakeMachine machine;
  run_clean_ranks(machine, 2, [&](const World& world) {
    FakeComm comm(world, quick());
    const auto wide = later({4, 6}, world.rank() + 1);
    CapturedGraph graph;
    comm.barrier();
    graph.capture([&] { comm.all_reduce(wide.t()).wait(); });
    for (const double sum : {3, 6, 12}) {
      comm.all_reduce(later({6, 4}, 1)).wait();  // which takes memory of the same size
      replay(comm, graph);
      expect_equal(read(wide), at::full({4, 6}, sum), "a sum");
    }
  });
}

TEST_CASE("a graph is not replayed once its communicator has failed") {
  FakeMachine machine;
  vector<std::string> thrown(2);
  std::atomic<int> replays{0};
  for (const std::string& error : run_ranks(machine, 2, [&](const World& world) {
         FakeComm comm(world, quick(8s));
         const auto tensor = later({3}, 1);
         CapturedGraph graph;
         comm.barrier();
         graph.capture([&] { comm.all_reduce(tensor).wait(); });
         replay(comm, graph);
         read(tensor);
         if (world.rank() == 1) return comm.abort("loss is NaN");
         thrown[0] = thrown_by([&] {
           for (;; std::this_thread::sleep_for(1ms))
             comm.watch_replay([&] {
               ++replays;
               graph.replay();
             });
         });
         const int before = replays;
         thrown[1] = thrown_by([&] { replay(comm, graph); });
         expect(replays == before, "no replay");
       }))
    CHECK(error == "");
  CHECK(thrown[0] == "PeerError: rank 1 failed first: loss is NaN");
  CHECK(thrown[1] == thrown[0]);
  check_clean(machine);
}

TEST_CASE("a replay that another rank does not come to ends at the timeout") {
  FakeMachine machine;
  std::string late;
  Absence absence;
  const auto errors = run_ranks(machine, 2, [&](const World& world) {
    FakeComm comm(world, quick(1s));
    const auto tensor = later({3}, 1);
    CapturedGraph graph;
    comm.barrier();
    graph.capture([&] { comm.all_reduce(tensor).wait(); });
    replay(comm, graph);
    read(tensor);
    if (world.rank() == 1) return absence.stay_away(comm);
    const auto present = absence.until_end();
    replay(comm, graph);
    read(tensor);  // as a program waits that knows nothing of the others
    late = thrown_by([&] { replay(comm, graph); });
  });
  CHECK_THAT(late, ContainsSubstring("TimeoutError: rank 1 has not entered captured step #4 after "));
  CHECK(errors[0] == "");
  CHECK_THAT(errors[1], ContainsSubstring("rank 0 failed first: rank 1 has not entered captured step #4"));
  check_clean(machine);
}

TEST_CASE("a replay counts in the groups that were split from the communicator and take part in it") {
  FakeMachine machine;
  run_clean_ranks(machine, 3, [&](const World& world) {
    FakeComm comm(world, quick(8s));
    auto pair = comm.new_group({0, 1}), idle = comm.new_group({0, 1, 2});
    const auto tensor = later({3}, 1), inner = later({3}, 1);
    CapturedGraph graph;
    comm.barrier();
    graph.capture([&] {
      comm.all_reduce(tensor).wait();
      if (pair) pair->all_reduce(inner).wait();
    });
    for (double sum = 1; sum < 100; sum *= 3) {
      replay(comm, graph);
      expect_equal(read(tensor), at::full({3}, 3 * sum), "a sum");
    }
    expect_equal(read(inner), at::full({3}, pair ? 32 : 1), "sums of two");
    expect(idle.has_value(), "a group of all");
    idle->barrier();
    if (pair) pair->barrier();
    pair.reset();  // its part of the graph is not replayed again
    comm.barrier();
  });
}

TEST_CASE("a replay whose sub-group another rank does not come to ends at the timeout") {
  FakeMachine machine;
  machine.timeout = 5s;
  std::string late;
  Absence absence;
  const auto errors = run_ranks(machine, 2, [&](const World& world) {
    FakeComm comm(world, quick(1s));
    auto group = comm.new_group({0, 1});
    const auto tensor = later({3}, 1);
    CapturedGraph graph;
    comm.barrier();
    graph.capture([&] { group->all_reduce(tensor).wait(); });
    replay(comm, graph);
    read(tensor);
    if (world.rank() == 1) return absence.stay_away(comm);
    const auto present = absence.until_end();
    replay(comm, graph);
    read(tensor);  // hangs unless the sub-group aborts
    late = thrown_by([&] { replay(comm, graph); });
  });
  CHECK_THAT(late, ContainsSubstring("TimeoutError: rank 1 has not entered captured step #"));
  CHECK(errors[0] == "");
}

TEST_CASE("a graph is not replayed once a sub-group of its communicator has failed") {
  FakeMachine machine;
  std::string thrown;
  std::atomic<int> replays{0};
  for (const std::string& error : run_ranks(machine, 2, [&](const World& world) {
         FakeComm comm(world, quick(8s));
         auto group = comm.new_group({0, 1});
         const auto tensor = later({3}, 1);
         CapturedGraph graph;
         comm.barrier();
         graph.capture([&] { group->all_reduce(tensor).wait(); });
         replay(comm, graph);
         read(tensor);
         group->abort("the statistics are NaN");
         const auto own = thrown_by([&] { comm.watch_replay([&] { ++replays; }); });
         if (world.rank() == 0) thrown = own;
       }))
    CHECK(error == "");
  CHECK(replays == 0);
  CHECK_THAT(thrown, ContainsSubstring("the communicator was aborted: the statistics are NaN"));
}

TEST_CASE("a device that fails in a replay is told to all") {
  FakeMachine machine;
  const auto errors = run_ranks(machine, 2, [&](const World& world) {
    FakeComm comm(world, quick(8s));
    const auto tensor = later({3}, 1);
    CapturedGraph graph;
    comm.barrier();
    graph.capture([&] { comm.all_reduce(tensor).wait(); });
    comm.watch_replay([&] {
      if (world.rank() == 1) throw std::runtime_error("cudaGraphLaunch failed: out of memory");
      graph.replay();
    });
    comm.barrier();
  });
  CHECK_THAT(errors[1], ContainsSubstring("captured step #3 failed on rank 1: cudaGraphLaunch failed: out of "
                                          "memory: rank 1's GPU is full"));
  CHECK_THAT(errors[0], ContainsSubstring("rank 1 failed first: captured step #3 failed on rank 1"));
  check_clean(machine);
}

TEST_CASE("what is of the host is refused by name while a graph is captured, and goes on afterwards") {
  FakeMachine machine;
  run_clean_ranks(machine, 2, [&](const World& world) {
    FakeComm comm(world, quick(8s));
    auto options = quick(8s);
    options.check_shapes = true;
    FakeComm checking(world, options);
    const auto tensor = later({3}, 1);
    CapturedGraph graph;
    graph.capture([&] {
      const auto refused = [&](const std::string& name, auto&& call) {
        expect_text(thrown_by(call), fmt::format("UsageError: {} called on rank {} while a graph is captured",
                                                 name, world.rank()));
      };
      std::string bytes = "bytes";
      vector<std::string> all;
      refused("barrier", [&] { comm.barrier(); });
      refused("barrier", [&] { static_cast<void>(comm.barrier_async()); });
      refused("all_gather_bytes", [&] { static_cast<void>(comm.all_gather_bytes(bytes)); });
      refused("all_gather_bytes", [&] { static_cast<void>(comm.all_gather_bytes_async(all, bytes)); });
      refused("broadcast_bytes", [&] { static_cast<void>(comm.broadcast_bytes(bytes)); });
      refused("broadcast_bytes", [&] { static_cast<void>(comm.broadcast_bytes_async(bytes)); });
      refused("new_group", [&] { static_cast<void>(comm.new_group({0, 1})); });
      refused("all_reduce", [&] { static_cast<void>(checking.all_reduce(tensor)); });
      auto work = comm.all_reduce(tensor);
      expect_text(thrown_by([&] { work.synchronize(); }), "is captured into a graph and has not happened");
      work.wait();
    });
    expect_text(thrown_by([&] { checking.check_capturable(); }), "UsageError: NcclOptions::check_shapes");
    comm.check_capturable();
    comm.barrier();
    expect(comm.all_gather_bytes("a").size() == 2, "the bytes of two");
    replay(comm, graph);
    expect_equal(read(tensor), at::full({3}, 2), "a sum");
  });
}

namespace {

// Steps of a small network that are captured, on a machine whose operators do all at once: in a replay the
// collectives alone happen, on what the capture has left in the buckets.
struct Training {
  explicit Training(const World& world, lockstep::NcclOptions options = quick(20s))
      : comm(world, options),
        optimizer(net->parameters(), {.momentum = 0.9,
                                      .implementation = lockstep::Implementation::fused,
                                      .lr_tensor = torch::tensor(0.1)}) {}

  template <class Steps>
  void run(int rank, Steps&& steps) {
    const auto loss = [](TinyNet& model, const lockstep::Example& batch) {
      return torch::cross_entropy_loss(model(batch.data), batch.target);
    };
    lockstep::CapturedStep step(CapturedGraph(), net, comm, optimizer, precision, loss,
                                {.num_warmup_iters = 2});
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(rank) + 1);
    const auto data = torch::randn({4, 6}, generator);
    lockstep::Example batch{data, data.slice(1, 0, 3).argmax(1)};
    steps(step, batch);
  }

  TinyNet net;
  FakeComm comm;
  lockstep::SGD optimizer;
  lockstep::Fp32 precision;
};

}  // namespace

TEST_CASE("a captured step over NCCL's communicator repeats its reductions") {
  torch::set_num_threads(1);
  FakeMachine machine(/*eager=*/true);
  vector<vector<at::Tensor>> captured(2), reduced(2);
  run_clean_ranks(machine, 2, [&](const World& world) {
    Training training(world);
    const auto gradients = [&] {
      vector<at::Tensor> all;
      for (const auto& parameter : training.net->parameters()) all.push_back(parameter.grad().clone());
      return all;
    };
    training.run(world.rank(), [&](auto& step, auto& batch) {
      const auto rank = static_cast<std::size_t>(world.rank());
      for (int i = 0; i < 2; ++i) step(batch);
      expect(!step.captured(), "steps as ever");
      step(batch);
      expect(step.captured(), "a graph");
      machine.synchronize(FakeMachine::seat().current);
      captured[rank] = gradients();
      step(batch);
      machine.synchronize(FakeMachine::seat().current);
      reduced[rank] = gradients();
      training.comm.barrier();
    });
  });
  REQUIRE(!captured[0].empty());
  for (std::size_t i = 0; i < captured[0].size(); ++i) {
    CHECK(at::equal(captured[0][i], captured[1][i]));  // reduced by the first replay
    CHECK(at::equal(reduced[0][i], 2 * captured[0][i]));
    CHECK(at::equal(reduced[0][i], reduced[1][i]));
  }
}

TEST_CASE("a captured step that is told of a failure repeats nothing") {
  torch::set_num_threads(1);
  FakeMachine machine(/*eager=*/true);
  const auto errors = run_ranks(machine, 2, [&](const World& world) {
    Training training(world);
    training.run(world.rank(), [&](auto& step, auto& batch) {
      for (int i = 0; i < 4; ++i) step(batch);
      if (world.rank() == 1) return training.comm.abort("loss is NaN");
      for (;;) step(batch);
    });
  });
  CHECK(errors[0] == "rank 1 failed first: loss is NaN");
  CHECK(errors[1] == "");
  check_clean(machine);
}

TEST_CASE("a captured step refuses options of the communicator that a graph cannot hold") {
  FakeMachine machine(/*eager=*/true);
  auto options = quick(8s);
  options.check_shapes = true;
  const auto errors = run_ranks(machine, 1, [&](const World& world) {
    Training training(world, options);
    training.run(0, [](auto& step, auto& batch) { step(batch); });
  });
  CHECK_THAT(errors[0], ContainsSubstring("NcclOptions::check_shapes"));
}

}  // namespace capture_test
