#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

#include "support/catch.hpp"
#include "thread_ranks.hpp"

namespace failures_test {

using namespace lockstep_test;
using lockstep::ReduceOp;
using lockstep::World;
using std::vector;
using namespace std::chrono_literals;

namespace {

/// Faults of the devices, gone at the end of a test.
struct WithFaults {
  FakeDevice::Faults& faults = FakeDevice::faults();
  ~WithFaults() { faults = {}; }
  FakeDevice::Faults* operator->() { return &faults; }
};

/// What each rank throws in `body`, with its type, where the log stays clean.
template <class Body>
vector<std::string> thrown_on_ranks(int size, Body body) {
  FakeMachine machine;
  vector<std::string> thrown(static_cast<std::size_t>(size));
  const auto errors = run_ranks(machine, size, [&](const World& world) {
    thrown[static_cast<std::size_t>(world.rank())] = thrown_by([&] { body(machine, world); });
  });
  for (const std::string& error : errors) CHECK(error == "");
  check_clean(machine);
  return thrown;
}

}  // namespace

TEST_CASE("a rank that never comes is named at the timeout, and the error stays") {
  Absence absence;
  const auto thrown = thrown_on_ranks(2, [&](FakeMachine&, const World& world) {
    FakeComm comm(world, quick(1s));
    comm.barrier();
    if (world.rank() == 1) return absence.stay_away(comm);
    const auto present = absence.until_end();
    comm.label(std::make_shared<const std::string>("bucket 2 of 5, with fc.weight"));
    auto work = comm.all_reduce(later({3}, 1));
    const auto early = thrown_by([&] { work.synchronize(20ms); });
    expect_text(early, "TimeoutError: rank 1 has not entered all_reduce #2 after ");
    expect_text(early, "last at barrier #1 (bucket 2 of 5, with fc.weight)");
    expect(work.error() == nullptr, "time left");
    const auto late = thrown_by([&] { work.synchronize(); });
    expect_text(late, "TimeoutError: rank 1 has not entered all_reduce #2 after ");
    expect(work.error() != nullptr, "an error of the Work");
    expect(thrown_by([&] { comm.barrier(); }) == late, "the same error again");
    expect(thrown_by([&] { work.wait(); }) == late, "the same error when it is joined");
    throw lockstep::TimeoutError(late.substr(14));
  });
  CHECK_THAT(thrown[0], ContainsSubstring("TimeoutError: rank 1 has not entered all_reduce #2"));
  CHECK_THAT(thrown[1],
             ContainsSubstring("PeerError: rank 0 failed first: rank 1 has not entered all_reduce #2"));
}

TEST_CASE("ranks that call different collectives are told which") {
  const auto thrown = thrown_on_ranks(2, [](FakeMachine&, const World& world) {
    FakeComm comm(world, quick(1s));
    auto tensor = later({3}, 1);
    // The second never launches on rank 1, whose first is another.
    if (world.rank() == 0) comm.all_gather(at::empty({2, 3}), tensor).synchronize();
    if (world.rank() == 1) comm.send(tensor, 0).synchronize();
  });
  CHECK_THAT(thrown[0] + thrown[1], ContainsSubstring("all_gather #1"));
}

TEST_CASE("a rank that throws while others wait ends their waits") {
  const auto thrown = thrown_on_ranks(3, [](FakeMachine&, const World& world) {
    FakeComm comm(world, quick(60s));
    auto tensor = later({3}, 1);
    comm.all_reduce(tensor).wait();
    if (world.rank() == 1) throw std::runtime_error("the data is broken");
    if (world.rank() == 0) comm.all_reduce(tensor).synchronize();
    comm.all_reduce(tensor).wait();
    read(tensor);  // as a program waits that knows nothing of the others
    comm.barrier();
  });
  CHECK(thrown[1] == "exception: the data is broken");
  CHECK_THAT(thrown[0], ContainsSubstring("PeerError: rank 1 failed first"));
  CHECK_THAT(thrown[2], ContainsSubstring("PeerError: rank 1 failed first"));
}

TEST_CASE("abort gives its reason to all, and ends what is in flight") {
  const auto thrown = thrown_on_ranks(2, [](FakeMachine&, const World& world) {
    FakeComm comm(world, quick(8s));
    auto tensor = later({3}, 1);
    if (world.rank() == 0) {
      comm.all_reduce(tensor).synchronize();
    } else {
      comm.abort("loss is NaN");
      comm.barrier();
    }
  });
  CHECK(thrown[0] == "PeerError: rank 1 failed first: loss is NaN");
  CHECK(thrown[1] == "CommunicationError: the communicator was aborted: loss is NaN");
}

TEST_CASE("a GPU out of memory on one rank is told to all, with a remedy") {
  WithFaults faults;
  SECTION("inside NCCL") {
    faults->group[1] = {NcclResult::cuda_error, "\nCuda failure 2 'out of memory'\n"};
    const auto thrown = thrown_on_ranks(2, [](FakeMachine&, const World& world) {
      FakeComm comm(world, quick(8s));
      comm.all_reduce(later({3}, 1)).synchronize();
    });
    CHECK(thrown[1] ==
          "CommunicationError: all_reduce #1 failed on rank 1: NCCL: unhandled CUDA error: Cuda failure 2 "
          "'out of "
          "memory': rank 1's GPU is full, so use a smaller batch or free what else is on it");
    CHECK_THAT(thrown[0],
               ContainsSubstring("PeerError: rank 1 failed first: all_reduce #1 failed on rank 1"));
  }
  SECTION("for a copy") {
    faults->memory[0] = "CUDA out of memory. Tried to allocate 2.00 GiB";
    const auto thrown = thrown_on_ranks(2, [](FakeMachine&, const World& world) {
      FakeComm comm(world, quick(8s));
      comm.all_reduce(later({3, 2}, 1).t()).synchronize();
    });
    CHECK_THAT(thrown[0],
               ContainsSubstring("CommunicationError: all_reduce #1 failed on rank 0: CUDA out of memory"));
    CHECK_THAT(thrown[0], ContainsSubstring("rank 0's GPU is full"));
    CHECK_THAT(thrown[1], ContainsSubstring("PeerError: rank 0 failed first"));
  }
}

TEST_CASE("a GPU that fails on one rank is told to all, with collective, bucket and remedy") {
  const std::string words = "cudaEvent failed: an illegal memory access was encountered";
  const auto check = [&](const vector<std::string>& thrown) {
    CHECK(thrown[1] == "CommunicationError: all_reduce #2 (bucket 2 of 5) failed on rank 1: " + words +
                           ": whatever rank 1's GPU was given before may be at fault, and "
                           "CUDA_LAUNCH_BLOCKING=1 shows where");
    CHECK_THAT(thrown[0], ContainsSubstring("PeerError: rank 1 failed first: all_reduce #2 (bucket 2 of 5) "
                                            "failed on rank 1: " +
                                            words));
  };
  const auto bucket = std::make_shared<const std::string>("bucket 2 of 5");
  for (const char* call : {"record", "wait", "copy"}) {
    CAPTURE(call);
    check(thrown_on_ranks(2, [&](FakeMachine& machine, const World& world) {
      FakeComm comm(world, quick(8s));
      const auto tensor = later({3, 2}, 1);
      comm.barrier();
      comm.label(bucket);
      if (world.rank() == 1) machine.break_device(1, call, words);
      const auto first = thrown_by([&] { comm.all_reduce(tensor.t()).synchronize(); });
      expect(thrown_by([&] { comm.barrier(); }) == first, "the same error again");
      expect(thrown_by([&] { comm.check_error(); }) == first, "an error that stays");
      comm.all_reduce(tensor).synchronize();
    }));
  }
  SECTION("when it is waited for") {
    for (const char* call : {"done", "wait"}) {
      CAPTURE(call);
      check(thrown_on_ranks(2, [&](FakeMachine& machine, const World& world) {
        FakeComm comm(world, quick(8s));
        comm.barrier();
        comm.label(bucket);
        const auto tensor = later({3}, 1);
        if (world.rank() == 0) {
          comm.all_reduce(tensor).wait();
          std::this_thread::sleep_for(300ms);
          return comm.barrier();
        }
        auto work = comm.all_reduce(tensor);
        machine.break_device(1, call, words);
        comm.label(nullptr);
        call == std::string("done") ? work.synchronize() : work.wait();
      }));
    }
  }
  SECTION("while the program computes") {
    check(thrown_on_ranks(2, [&](FakeMachine& machine, const World& world) {
      FakeComm comm(world, quick(8s));
      comm.barrier();
      comm.label(bucket);
      const auto tensor = later({3}, 1);
      if (world.rank() == 1) machine.freeze(1);
      auto work = comm.all_reduce(tensor);
      if (world.rank() == 1) {
        machine.break_device(1, "done", words);
        std::this_thread::sleep_for(300ms);
        machine.thaw(1);
      }
      work.synchronize();
    }));
  }
}

TEST_CASE("what NCCL finds by itself is thrown where the program next comes by") {
  std::atomic<bool> found{false};
  const auto thrown = thrown_on_ranks(2, [&](FakeMachine& machine, const World& world) {
    FakeComm comm(world, quick(8s));
    auto tensor = later({3}, 1);
    if (world.rank() == 0) {
      comm.all_reduce(tensor).wait();
      FakeDevice::inject(machine, 0, NcclResult::remote_error, "socket closed by peer");
      read(tensor);  // ends, because the watchdog has aborted what it waits for
      found = true;
    }
    while (!found) std::this_thread::sleep_for(5ms);
    comm.barrier();
  });
  CHECK_THAT(thrown[0],
             ContainsSubstring("CommunicationError: all_reduce #1 failed on rank 0: NCCL: a peer has gone, "
                               "or its network: socket closed by peer"));
  CHECK_THAT(thrown[1], ContainsSubstring("PeerError: rank 0 failed first: all_reduce #1 failed on rank 0"));
}

TEST_CASE("a rank without a GPU, two on one, and different NCCLs are errors on every rank") {
  WithFaults faults;
  const auto make = [](FakeMachine&, const World& world) { FakeComm comm(world, quick(8s)); };
  SECTION("none") {
    faults->no_device[1] = "rank 1 sees no CUDA device";
    for (const std::string& error : thrown_on_ranks(3, make))
      CHECK(error == "UsageError: rank 1 sees no CUDA device");
  }
  SECTION("shared") {
    faults->identity[1] = faults->identity[2] = "host/GPU-7";
    for (const std::string& error : thrown_on_ranks(3, make))
      CHECK_THAT(error, ContainsSubstring("ranks 1 and 2 are on one GPU (host/GPU-7): start one rank a GPU"));
  }
  SECTION("shared by ranks whose NCCL cannot") {
    faults->identity[1] = faults->identity[2] = "host/GPU-7";
    faults->shares[1] = faults->shares[2] = true;
    for (const std::string& error : thrown_on_ranks(3, make))
      CHECK_THAT(error,
                 ContainsSubstring("UsageError: ranks 1 and 2 are on one GPU (host/GPU-7): "
                                   "NCCL_MULTI_RANK_GPU_ENABLE lets them from NCCL 2.30.0 on, and this is "
                                   "2.27.6: install a newer torch"));
  }
  SECTION("shared by ranks of which one does not want to") {
    faults->version = {{0, 23007}, {1, 23007}, {2, 23007}};
    faults->identity[1] = faults->identity[2] = "host/GPU-7";
    faults->shares[2] = true;
    for (const std::string& error : thrown_on_ranks(3, make))
      CHECK_THAT(error, ContainsSubstring("NCCL_MULTI_RANK_GPU_ENABLE is set for rank 2 and not for rank 1"));
  }
  SECTION("versions") {
    faults->version[2] = 21805;
    for (const std::string& error : thrown_on_ranks(3, make))
      CHECK_THAT(error, ContainsSubstring("rank 0 has NCCL 2.27.6 and rank 2 has NCCL 2.18.5"));
  }
}

TEST_CASE("a communicator that cannot be made leaves nothing behind") {
  WithFaults faults;
  SECTION("because NCCL fails") {
    faults->init[1] = NcclResult::system_error;
    const auto thrown =
        thrown_on_ranks(2, [](FakeMachine&, const World& world) { FakeComm comm(world, quick(8s)); });
    CHECK_THAT(thrown[1],
               ContainsSubstring("CommunicationError: the start of the communicator failed on rank 1"));
    CHECK_THAT(thrown[0], ContainsSubstring("PeerError: rank 1 failed first: the start of the communicator"));
  }
  SECTION("because NCCL is too old for its buffers") {
    faults->version = {{0, 21805}, {1, 21805}};
    const auto thrown = thrown_on_ranks(2, [](FakeMachine&, const World& world) {
      auto options = quick(8s);
      options.buffers = lockstep::NcclBuffers::nccl;
      FakeComm comm(world, options);
    });
    CHECK_THAT(thrown[0], ContainsSubstring("UsageError: ") && ContainsSubstring("2.18.5"));
    CHECK(thrown[1] == thrown[0]);
  }
}

TEST_CASE("ranks may share a GPU where the user says so and NCCL can") {
  WithFaults faults;
  faults->version = {{0, 23007}, {1, 23007}};
  faults->identity = {{0, "host/GPU-7"}, {1, "host/GPU-7"}};
  faults->shares = {{0, true}, {1, true}};
  for (const std::string& error : thrown_on_ranks(2, [](FakeMachine&, const World& world) {
         FakeComm comm(world, quick(8s));
         comm.barrier();
       }))
    CHECK(error == "");
}

namespace {

/// A store in a process of its own, which can be stopped.
class OtherStore {
 public:
  OtherStore() {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("no pipe");
    const lockstep::detail::Descriptor from(ends[0]), to(ends[1]);
    process_ = fork();
    if (process_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      auto listener = lockstep::detail::listen_on("127.0.0.1", 0);
      const int port = listener.port;
      lockstep::detail::StoreServer server(std::move(listener), "");
      if (write(to.get(), &port, sizeof port) != sizeof port) _exit(1);
      for (;;) pause();
    }
    int port = 0;
    if (read(from.get(), &port, sizeof port) != sizeof port) throw std::runtime_error("no store");
    url_ = fmt::format("tcp://127.0.0.1:{}", port);
  }
  ~OtherStore() {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  OtherStore(const OtherStore&) = delete;
  OtherStore& operator=(const OtherStore&) = delete;

  [[nodiscard]] const std::string& url() const { return url_; }
  void stop() const { kill(process_, SIGSTOP); }

 private:
  std::string url_;
  pid_t process_ = 0;
};

}  // namespace

TEST_CASE("no call outlasts its timeout while the store is stopped") {
  for (const bool bytes : {true, false}) {
    const OtherStore store;
    FakeMachine machine;
    std::atomic<int> arrived{0};
    const auto errors = run_ranks(
        machine, 2,
        [&](const World& world) {
          FakeComm comm(world, quick(2s));
          std::vector<std::string> all;
          comm.all_gather_bytes_async(all, "before").synchronize();
          auto tensor = later({3}, 1);
          if (++arrived == 2) store.stop();
          while (arrived < 2) std::this_thread::sleep_for(1ms);
          std::this_thread::sleep_for(50ms);
          const auto start = std::chrono::steady_clock::now();
          const std::string error = thrown_by([&] {
            if (bytes)
              comm.all_gather_bytes_async(all, "after").synchronize();
            else if (world.rank() == 0)
              comm.all_reduce(tensor).synchronize();
            else
              comm.recv(tensor, 0).synchronize();
          });
          const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
          expect_text(error, "TimeoutError: ");
          expect_text(error, "does not answer");
          expect(thrown_by([&] { comm.barrier(); }) == error, "the same error again");
          expect(took.count() < 2 + 4, fmt::format("less than 6 s, not {} s", took.count()));
        },
        store.url());
    CAPTURE(bytes);
    for (const std::string& error : errors) CHECK(error == "");
  }
}

TEST_CASE("ranks without GPUs may go on with something else") {
  WithFaults faults;
  faults->no_device[0] = faults->no_device[1] = "there is no CUDA device";
  const auto thrown = thrown_on_ranks(2, [](FakeMachine&, const World& world) {
    expect_text(thrown_by([&] { FakeComm comm(world, quick(8s)); }), "there is no CUDA device");
    std::this_thread::sleep_for(100ms);
    expect(!world.published_failure(), "no failure told to the launcher");
  });
  for (const std::string& error : thrown) CHECK(error == "");
}

namespace {

// A rank that meets the others as a communicator does, up to the making of it, and is not heard of again.
void join_and_vanish(const World& world, bool makes_it) {
  lockstep::detail::Membership membership(world, {0, 1}, "lockstep/nccl/0", 8s);
  const auto device = FakeDevice::open(world, -1);
  membership.join(lockstep::detail::identity_text(device));
  if (!makes_it) return;
  const auto made = std::make_unique<FakeDevice::Comm>();
  device.init(*made, 2, membership.from_first("NCCL id", [] { return ""; }), 1);
}

}  // namespace

TEST_CASE("a rank that dies before its communicator is made is named") {
  FakeMachine machine;
  const auto errors = run_ranks(machine, 2, [](const World& world) {
    if (world.rank() == 1) return join_and_vanish(world, false);
    FakeComm comm(world, quick(1s));
  });
  CHECK_THAT(errors[0], ContainsSubstring("rank 1 has not reported a position after ") &&
                            ContainsSubstring("of the start of the communicator: dead, stopped or cut off"));
}

TEST_CASE("a rank that dies without a word is named by those whose collective ends with it") {
  FakeMachine machine;
  const auto errors = run_ranks(machine, 2, [&](const World& world) {
    if (world.rank() == 1) return join_and_vanish(world, true);
    FakeComm comm(world, quick(20s));
    auto work = comm.all_reduce(later({3}, 1));
    FakeDevice::inject(machine, 0, NcclResult::remote_error, "connection closed by peer");
    const std::string error = thrown_by([&] { work.synchronize(); });
    expect(thrown_by([&] { comm.barrier(); }) == error, "the same error again");
    throw std::runtime_error(error);
  });
  CHECK(
      errors[0] ==
      "PeerError: rank 1 failed first: it does not answer, and all_reduce #1 has ended with it (NCCL: a peer "
      "has gone, or its network: connection closed by peer) while rank 0 waits in all_reduce #1");
}

TEST_CASE("the first exchange of bytes finds ranks in different public calls") {
  const auto thrown = thrown_on_ranks(2, [&](FakeMachine&, const World& world) {
    FakeComm comm(world, quick(60s));
    const lockstep::detail::CallScope scope(world.rank() == 0 ? "Trainer::evaluate"
                                                              : "Trainer::save_checkpoint");
    lockstep::agree(comm, [] {});
  });
  for (const std::string& error : thrown)
    CHECK_THAT(error,
               ContainsSubstring("rank 0 is in Trainer::evaluate, rank 1 in Trainer::save_checkpoint; call "
                                 "both on every rank"));
}

TEST_CASE("ranks that disagree are told long before the timeout, with the public calls that they are in") {
  for (const bool served : {false, true}) {
    const auto thrown = thrown_on_ranks(2, [&](FakeMachine& machine, const World& world) {
      FakeComm comm(world, quick(60s));
      const char* name = world.rank() == 0 ? "Trainer::evaluate" : "Trainer::save_checkpoint";
      const lockstep::detail::CallScope scope(served ? lockstep::detail::ServedCall{name}
                                                     : lockstep::detail::ServedCall{});
      const auto tensor = later({3}, 1), all = at::empty({2, 3});
      if (world.rank() == 0) comm.all_reduce(tensor).synchronize();
      machine.freeze(1);
      struct Thaw {
        FakeMachine& machine;
        ~Thaw() { machine.thaw(1); }
      } const at_end{machine};
      comm.all_gather(all, tensor).synchronize();
    });
    const std::string text =
        served
            ? "rank 0 is in Trainer::evaluate, rank 1 in Trainer::save_checkpoint; call both on every rank, "
              "and equally often"
            : "the ranks disagree on collective #1: rank 0 called all_reduce, but rank 1 called all_gather";
    CHECK_THAT(thrown[0], ContainsSubstring("CommunicationError: " + text));
    CHECK_THAT(thrown[1], ContainsSubstring("PeerError: rank 0 failed first: " + text));
  }
}

TEST_CASE("a split that is given up leaves nothing behind") {
  Absence absence;
  const auto thrown = thrown_on_ranks(2, [&](FakeMachine&, const World& world) {
    FakeComm comm(world, quick(1s));
    comm.barrier();
    if (world.rank() == 1) return absence.stay_away(comm);
    const auto present = absence.until_end();
    static_cast<void>(comm.new_group({0, 1}));
  });
  CHECK_THAT(thrown[0], ContainsSubstring("TimeoutError: rank 1 has not entered new_group #2"));
  CHECK_THAT(thrown[1],
             ContainsSubstring("PeerError: rank 0 failed first: rank 1 has not entered new_group #2"));
}

TEST_CASE("a split waits for what is in flight, and no longer than that may take") {
  Absence absence;
  const auto thrown = thrown_on_ranks(3, [&](FakeMachine&, const World& world) {
    FakeComm comm(world, quick(1s));
    comm.barrier();
    if (world.rank() == 2) return absence.stay_away(comm);
    const auto present = absence.until_end();
    auto work = comm.all_reduce(later({3}, 1));
    static_cast<void>(comm.new_group({0, 1}));
  });
  CHECK_THAT(thrown[0] + thrown[1], ContainsSubstring("TimeoutError: rank 2 has not entered all_reduce #2"));
}

TEST_CASE("a rank that does not come to make the communicator is named") {
  const auto thrown = thrown_on_ranks(2, [](FakeMachine&, const World& world) {
    static_cast<void>(world.store());  // every rank joins the run
    if (world.rank() == 1) return;
    FakeComm comm(world, quick(500ms));
  });
  CHECK_THAT(thrown[0], ContainsSubstring("TimeoutError: rank 1 has not come to make the communicator"));
}

TEST_CASE("a rank that has left in good order is named by who needs it") {
  const auto thrown = thrown_on_ranks(2, [](FakeMachine&, const World& world) {
    auto comm = std::make_unique<FakeComm>(world, quick(3s));
    comm->barrier();
    if (world.rank() == 1) return;
    std::this_thread::sleep_for(50ms);
    comm->barrier();
  });
  CHECK(thrown[1] == "");
  CHECK_THAT(thrown[0],
             ContainsSubstring("PeerError: rank 1 has left after barrier #1 while rank 0 waits in "));
}

TEST_CASE("what NCCL cannot take is refused by name, and leaves the communicator as it was") {
  const auto thrown = thrown_on_ranks(2, [](FakeMachine& machine, const World& world) {
    FakeComm comm(world, quick(8s));
    auto good = later({4}, 1);
    auto on_host = at::zeros({4});
    machine.put_elsewhere(on_host);
    const auto refuse = [&](const std::string& why, auto&& call) { expect_text(thrown_by(call), why); };
    const auto rank = fmt::format("on rank {}: ", world.rank());
    refuse("CommunicationError: all_reduce " + rank +
               "the tensor [4] float32 is on cpu, and NCCL moves tensors on",
           [&] { static_cast<void>(comm.all_reduce(on_host)); });
    refuse("or use GlooComm", [&] { static_cast<void>(comm.all_reduce(vector{good, on_host})); });
    refuse("the tensor is undefined", [&] { static_cast<void>(comm.broadcast(at::Tensor())); });
    refuse("is not dense", [&] { static_cast<void>(comm.broadcast(at::eye(3).to_sparse())); });
    refuse("NCCL cannot reduce [2] int16",
           [&] { static_cast<void>(comm.all_reduce(at::zeros({2}, at::kShort))); });
    refuse("the average of [2] int64 is no int64",
           [&] { static_cast<void>(comm.all_reduce(at::zeros({2}, at::kLong), ReduceOp::avg)); });
    refuse("there is no rank 2 in a group of 2", [&] { static_cast<void>(comm.broadcast(good, 2)); });
    refuse("is not 2 times", [&] { static_cast<void>(comm.all_gather(at::zeros({7}), good)); });
    refuse("must have one row for each of 2 ranks", [&] { static_cast<void>(comm.all_to_all(good, good)); });
    refuse("cannot send to itself", [&] { static_cast<void>(comm.send(good, world.rank())); });
    refuse("NCCL knows no tags, and 3 is one",
           [&] { static_cast<void>(comm.send(good, 1 - world.rank(), 3)); });
    refuse("the ranks must ascend", [&] { (void)comm.new_group({1, 0}); });
    refuse("all_reduce called inside a rank-zero scope", [&] {
      const lockstep::RankZeroScope scope;
      static_cast<void>(comm.all_reduce(good));
    });
    comm.all_reduce(good).wait();
    expect_equal(read(good), at::full({4}, 2), "a sum");
    comm.shutdown();
    refuse("all_reduce called after shutdown()", [&] { static_cast<void>(comm.all_reduce(good)); });
  });
  for (const std::string& error : thrown) CHECK(error == "");
}

TEST_CASE("check_shapes turns a difference into one error on every rank") {
  const auto thrown = thrown_on_ranks(2, [](FakeMachine&, const World& world) {
    auto options = quick(8s);
    options.check_shapes = true;
    FakeComm comm(world, options);
    comm.all_reduce(later({4}, 1)).wait();
    comm.all_reduce(later({4 + world.rank()}, 1)).wait();
  });
  CHECK(thrown[0] == "MismatchError: all_reduce #2: rank 0 [4] float32, rank 1 [5] float32");
  CHECK(thrown[1] == thrown[0]);
}

TEST_CASE("options that cannot be are refused") {
  const World alone;
  CHECK_THAT(thrown_by([&] { FakeComm comm(alone, quick(0ms)); }), ContainsSubstring("leaves no time"));
  lockstep::NcclOptions options;
  options.poll = 0ms;
  CHECK_THAT(thrown_by([&] { FakeComm comm(alone, options); }),
             ContainsSubstring("the watchdog cannot look"));
}

}  // namespace failures_test
