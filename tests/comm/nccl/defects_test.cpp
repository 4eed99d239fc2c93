#include "defects.hpp"

#include <mutex>

#include "support/catch.hpp"
#include "thread_ranks.hpp"

namespace defects_test {

using namespace lockstep_test;
using lockstep::NcclBuffers;
using lockstep::World;
using lockstep::detail::BasicNcclComm;
using std::vector;

namespace {

constexpr std::chrono::seconds enough(20), little(3);

/// All that went wrong, as one text: what the log of the machine holds, and what the ranks threw.
std::string verdict_of(FakeMachine& machine, const vector<std::string>& errors) {
  std::string text;
  for (const std::string& violation : machine.violations()) text += violation + "\n";
  for (const std::string& error : errors) text += error.empty() ? "" : error + "\n";
  return text;
}

/// The streams of a rank stand still for as long as this lives. What is issued meanwhile is not over when it
/// is asked about, however late the other ranks or this thread may be: no luck can order what nothing orders.
class StandStill {
 public:
  StandStill(FakeMachine& machine, int rank) : machine_(machine), rank_(rank) { machine_.freeze(rank_); }
  StandStill(const StandStill&) = delete;
  StandStill& operator=(const StandStill&) = delete;
  ~StandStill() { machine_.thaw(rank_); }

 private:
  FakeMachine& machine_;
  int rank_;
};

// Steps as training makes them: results of operators are reduced in lists, some of them with strides, some
// dropped at once, and used by the operators behind.
template <class Device>
std::string order_scenario() {
  FakeMachine machine;
  machine.timeout = std::chrono::seconds(5);
  return verdict_of(machine, run_ranks(machine, 2, [&](const World& world) {
                      BasicNcclComm<Device> comm(world, quick(std::chrono::seconds(3)));
                      for (int step = 0; step < 3; ++step) {
                        at::Tensor sum_of_weights, sum_of_biases;
                        {
                          const StandStill until_read(machine, world.rank());
                          auto weights = later({4, 3}, 1), bias = later({5}, 2);
                          auto work = comm.all_reduce(vector{weights, bias, later({2, 7}, step).t()});
                          static_cast<void>(comm.all_reduce(later({9}, step)));
                          work.wait();
                          sum_of_weights = read_later(weights);
                          sum_of_biases = read_later(bias);
                        }
                        machine.synchronize(FakeMachine::seat().current);
                        expect_equal(sum_of_weights, at::full({4, 3}, 2), "a sum of weights");
                        expect_equal(sum_of_biases, at::full({5}, 4), "a sum of biases");
                      }
                      comm.barrier();
                    }));
}

// The same with buffers: one that is dropped while its collective is under way, one that is used again and
// again, and one that outlives the communicator.
template <class Device>
std::string buffer_scenario(NcclBuffers kind) {
  FakeMachine machine;
  machine.timeout = std::chrono::seconds(5);
  std::string verdict = verdict_of(machine, run_ranks(machine, 2, [&](const World& world) {
                                     lockstep::NcclOptions options = quick(std::chrono::seconds(3));
                                     options.buffers = kind;
                                     at::Tensor outlives;
                                     {
                                       BasicNcclComm<Device> comm(world, options);
                                       const at::Tensor like = at::empty({0}, at::kFloat);
                                       outlives = comm.empty_buffer(3, like);
                                       for (int step = 0; step < 3; ++step) {
                                         at::Tensor dropped = comm.empty_buffer(8, like), sum;
                                         fill_later(dropped, step);
                                         {
                                           const StandStill until_read(machine, world.rank());
                                           auto work = comm.all_reduce(dropped);
                                           dropped = at::Tensor();
                                           fill_later(outlives, 1);
                                           comm.all_reduce(outlives).wait();
                                           sum = read_later(outlives);
                                           work.wait();
                                         }
                                         machine.synchronize(FakeMachine::seat().current);
                                         expect_equal(sum, at::full({3}, 2), "a sum in a buffer");
                                       }
                                       comm.barrier();
                                     }
                                     expect_equal(read(outlives), at::full({3}, 2),
                                                  "what was in a buffer when the communicator ended");
                                   }));
  if (machine.buffers_left() > 0) verdict += "buffers are left\n";
  return verdict;
}

// A rank never comes, while the other blocks in `wait(comm, machine)`, whose collective is `late`. What ends
// that has `timeout` to do so: little where a defect is to be found.
template <class Device, class Wait>
std::string late_scenario(std::chrono::seconds timeout, const std::string& late, Wait&& wait) {
  FakeMachine machine;
  machine.timeout = timeout;
  std::atomic<bool> over{false};
  return verdict_of(machine, run_ranks(machine, 2, [&](const World& world) {
                      BasicNcclComm<Device> comm(world, quick(std::chrono::seconds(1)));
                      if (world.rank() == 1) {
                        while (!over) {
                          // Hears of the failure, so that nothing need end this process.
                          thrown_by([&] { static_cast<void>(comm.send(vector<at::Tensor>{}, 0)); });
                          std::this_thread::sleep_for(std::chrono::milliseconds(5));
                        }
                        comm.abort("the test is over");
                        return;
                      }
                      struct Over {
                        std::atomic<bool>& over;
                        ~Over() { over = true; }
                      } const at_end{over};
                      thrown_by([&] { wait(comm, machine); });
                      expect_text(thrown_by([&] { comm.barrier(); }),
                                  "TimeoutError: rank 1 has not entered " + late);
                    }));
}

// It waits for its stream, as it does for any number it reads.
template <class Device>
std::string late_read_scenario(std::chrono::seconds timeout = enough) {
  return late_scenario<Device>(timeout, "all_reduce #1", [](auto& comm, FakeMachine&) {
    auto tensor = later({2}, 1);
    comm.all_reduce(tensor).wait();
    read(tensor);
  });
}

// It launches a collective or a graph, and that returns only when the collective has ended, as where the
// queue of launches is full.
template <class Device>
std::string blocked_launch_scenario() {
  return late_scenario<Device>(enough, "all_reduce #1", [](auto& comm, FakeMachine&) {
    static_cast<void>(comm.all_reduce(later({2}, 1)));
  });
}
template <class Device>
std::string blocked_replay_scenario(std::chrono::seconds timeout = enough) {
  return late_scenario<Device>(timeout, "captured step #2", [](auto& comm, FakeMachine& machine) {
    const auto tensor = later({2}, 1);
    CapturedGraph graph;
    graph.capture([&] { comm.all_reduce(tensor).wait(); });
    const std::string thrown = thrown_by([&] {
      comm.watch_replay([&] {
        graph.replay();
        machine.synchronize(FakeMachine::seat().current);
      });
    });
    if (!thrown.starts_with("TimeoutError")) machine.complain("the replay threw '" + thrown + "'");
  });
}

// It waits as before, and meanwhile the driver answers nobody, so that no thread learns what has ended.
std::string locked_driver_scenario() {
  return late_scenario<LockedDriver>(enough, "all_reduce #1", [](auto& comm, FakeMachine& machine) {
    auto tensor = later({2}, 1);
    comm.all_reduce(tensor).wait();
    const std::lock_guard lock(LockedDriver::driver());
    machine.synchronize(FakeMachine::seat().current);
  });
}
std::string locked_driver_replay_scenario() {
  return late_scenario<LockedDriver>(enough, "captured step #3", [](auto& comm, FakeMachine& machine) {
    const auto tensor = later({2}, 1), other = later({2}, 1);
    CapturedGraph graph;
    graph.capture([&] { comm.all_reduce(tensor).wait(); });
    static_cast<void>(comm.all_reduce(other));
    comm.watch_replay([&] {
      const std::lock_guard lock(LockedDriver::driver());
      graph.replay();
      machine.synchronize(FakeMachine::seat().current);
    });
  });
}

// NCCL finds by itself that something is wrong.
template <class Device>
std::string error_scenario() {
  FakeMachine machine;
  machine.timeout = std::chrono::seconds(5);
  return verdict_of(machine, run_ranks(machine, 1, [&](const World& world) {
                      BasicNcclComm<Device> comm(world, quick(std::chrono::seconds(2)));
                      machine.freeze(0);
                      auto tensor = later({2}, 1);
                      auto work = comm.all_reduce(tensor);
                      FakeDevice::inject(machine, 0, NcclResult::internal_error, "Net plugin broke");
                      const std::string error = thrown_by([&] { work.synchronize(); });
                      machine.thaw(0);
                      expect_text(error, "NCCL: internal error: Net plugin broke");
                    }));
}

}  // namespace

TEST_CASE("the scenarios find nothing where nothing is wrong") {
  CHECK(order_scenario<FakeDevice>() == "");
  for (const auto kind : {NcclBuffers::torch, NcclBuffers::registered, NcclBuffers::nccl})
    CHECK(buffer_scenario<FakeDevice>(kind) == "");
  CHECK(late_read_scenario<FakeDevice>() == "");
  CHECK(error_scenario<FakeDevice>() == "");
}

TEST_CASE("a call that blocks hides no timeout") {
  CHECK(blocked_replay_scenario<FakeDevice>() == "");
  CHECK(blocked_launch_scenario<BlockedLaunch>() == "");
  CHECK(locked_driver_scenario() == "");
  CHECK(locked_driver_replay_scenario() == "");
}

TEST_CASE("each seeded defect is found") {
  SECTION("a missing event") {
    CHECK_THAT(order_scenario<NoEventBefore>(), ContainsSubstring("nothing orders them"));
    CHECK_THAT(order_scenario<NoEventBehind>(), ContainsSubstring("nothing orders them"));
  }
  SECTION("an event recorded too early") {
    CHECK_THAT(order_scenario<EventTooEarly>(), ContainsSubstring("while another call was in progress"));
  }
  SECTION("a copy on the wrong stream") {
    CHECK_THAT(order_scenario<CopyOnWrongStream>(), ContainsSubstring("nothing orders them"));
  }
  SECTION("a buffer freed early") {
    CHECK_THAT(order_scenario<FreedEarly>(), ContainsSubstring("may still use it"));
  }
  SECTION("buffers") {
    for (const auto kind : {NcclBuffers::registered, NcclBuffers::nccl}) {
      CHECK_THAT(buffer_scenario<FreedEarly>(kind),
                 ContainsSubstring("memory is deregistered by") && ContainsSubstring("may still use it"));
      CHECK_THAT(buffer_scenario<NoEventBehind>(kind), ContainsSubstring("nothing orders them"));
      CHECK_THAT(buffer_scenario<DeregisteredEarly>(kind),
                 ContainsSubstring("uses memory that was deregistered"));
      CHECK_THAT(buffer_scenario<NotDeregistered>(kind),
                 ContainsSubstring("memory is freed that is still registered") &&
                     ContainsSubstring("a communicator was destroyed while memory is registered with it"));
    }
    CHECK_THAT(buffer_scenario<FreedEarly>(NcclBuffers::nccl), ContainsSubstring("is freed by"));
    CHECK_THAT(buffer_scenario<BufferLeft>(NcclBuffers::nccl), ContainsSubstring("buffers are left"));
  }
  SECTION("a wrong group order") {
    CHECK_THAT(order_scenario<WrongGroupOrder>(), ContainsSubstring("the ranks issue different collectives"));
  }
  SECTION("a use after abort") {
    CHECK_THAT(order_scenario<UsedAfterAbort>(), ContainsSubstring("was used after abort"));
  }
  SECTION("a timeout ignored") {
    CHECK_THAT(late_read_scenario<DeadlineIgnored>(little), ContainsSubstring("nothing ends that"));
    CHECK_THAT(blocked_replay_scenario<DeadlineIgnored>(little), ContainsSubstring("nothing ends that"));
  }
  SECTION("a lock that is held across a launch, and that the abort needs") {
    CHECK_THAT(blocked_replay_scenario<AbortBehindLaunch>(little), ContainsSubstring("nothing ends that"));
  }
  SECTION("an error swallowed") {
    CHECK_THAT(error_scenario<ErrorSwallowed>(), ContainsSubstring("expected 'NCCL: internal error"));
  }
}

}  // namespace defects_test
