// How a communicator on a device ends the operations of its backend: once, on another thread, and bounded.
#include "lockstep/comm/process_group_comm.hpp"

#include <ATen/ATen.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "support/catch.hpp"

namespace device_failure_test {

using lockstep::ProcessGroupComm;
using lockstep::World;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

/// Stands for ProcessGroupNCCL: its operations hang until they are aborted.
struct HangingBackend : c10d::Backend {
  struct HangingWork : c10d::Work {
    explicit HangingWork(const std::atomic<int>& aborted) : aborted(aborted) {}
    bool isCompleted() override { return aborted > 0; }
    bool wait(std::chrono::milliseconds) override { return true; }
    const std::atomic<int>& aborted;
  };

  HangingBackend() : Backend(0, 1) {}
  [[nodiscard]] const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override {
    ++operations;
    return c10::make_intrusive<HangingWork>(aborted);
  }
  void abort() override {
    ++aborts;
    aborted_on = std::this_thread::get_id();
    while (abort_hangs) std::this_thread::sleep_for(1ms);
    ++aborted;
  }
  void shutdown() override { ++shutdowns; }

  std::atomic<int> operations{0}, aborts{0}, aborted{0}, shutdowns{0};
  std::atomic<std::thread::id> aborted_on{};
  std::atomic<bool> abort_hangs{false};
};

lockstep::ProcessGroupOptions on_meta(std::chrono::milliseconds timeout = 60s) {
  lockstep::ProcessGroupOptions options;
  options.device = at::Device(at::kMeta, 0);
  options.timeout = timeout;
  return options;
}

std::chrono::milliseconds since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
}

/// Waits until `happened()`, at most 10 s.
template <class Happened>
bool soon(const Happened& happened) {
  for (const auto start = Clock::now(); !happened(); std::this_thread::sleep_for(1ms))
    if (since(start) > 10s) return false;
  return true;
}

}  // namespace

TEST_CASE("an abort ends pending waits within 100 ms, on a thread that is not the program's") {
  const auto backend = c10::make_intrusive<HangingBackend>();
  ProcessGroupComm comm{World(), backend, on_meta()};
  const auto tensor = at::empty({2}, at::kMeta);
  auto pending = comm.all_reduce(tensor);
  Clock::time_point ended;
  std::string text;
  std::thread waiting([&] {
    try {
      pending.synchronize();
    } catch (const lockstep::CommunicationError& error) {
      text = error.what();
    }
    ended = Clock::now();
  });
  std::this_thread::sleep_for(50ms);
  const auto start = Clock::now();
  comm.abort("a test");
  waiting.join();
  CHECK(ended - start < 100ms);
  CHECK(text == "the communicator was aborted: a test");
  CHECK(soon([&] { return backend->aborted == 1; }));
  CHECK(backend->aborted_on.load() != std::this_thread::get_id());

  // No use of the backend afterwards, and no second abort.
  comm.abort("again");
  CHECK_THROWS_AS(comm.all_reduce(tensor), lockstep::CommunicationError);
  CHECK_THROWS_AS(comm.barrier(), lockstep::CommunicationError);
  CHECK_THROWS_AS(pending.wait(), lockstep::CommunicationError);
  comm.shutdown();
  CHECK(backend->aborts == 1);
  CHECK(backend->operations == 1);
  CHECK(backend->shutdowns == 0);
}

TEST_CASE("an operation that only a stream waits for times out, and the next call throws") {
  const auto backend = c10::make_intrusive<HangingBackend>();
  ProcessGroupComm comm{World(), backend, on_meta(200ms)};
  const auto tensor = at::empty({2}, at::kMeta);
  const auto start = Clock::now();
  auto work = comm.all_reduce(tensor);
  work.wait();  // orders the stream
  CHECK(since(start) < 150ms);
  CHECK(soon([&] { return backend->aborts == 1; }));  // the program is in no call of lockstep
  CHECK(since(start) >= 200ms);
  CHECK_THROWS_AS(comm.check_error(), lockstep::TimeoutError);
  CHECK_THROWS_AS(comm.all_reduce(tensor), lockstep::TimeoutError);
  CHECK_THROWS_AS(work.synchronize(), lockstep::TimeoutError);
  CHECK(backend->aborts == 1);
  CHECK(backend->operations == 1);
}

TEST_CASE("a timeout on the host aborts the backend") {
  const auto backend = c10::make_intrusive<HangingBackend>();
  ProcessGroupComm comm{World(), backend, on_meta(200ms)};
  auto work = comm.all_reduce(at::empty({2}, at::kMeta));
  CHECK_THROWS_AS(work.synchronize(), lockstep::TimeoutError);
  CHECK(soon([&] { return backend->aborted == 1; }));
  CHECK(backend->aborted_on.load() != std::this_thread::get_id());
}

TEST_CASE("an abort that hangs delays the program by a bounded time") {
  const auto backend = c10::make_intrusive<HangingBackend>();
  backend->abort_hangs = true;
  const auto start = Clock::now();
  {
    ProcessGroupComm comm{World(), backend, on_meta()};
    auto work = comm.all_reduce(at::empty({2}, at::kMeta));
    comm.abort("a test");
    CHECK(since(start) < 500ms);
    CHECK_THROWS_AS(work.synchronize(), lockstep::CommunicationError);
    CHECK(since(start) < 500ms);
  }
  CHECK(since(start) < 3s);
  backend->abort_hangs = false;  // the thread that was left behind still uses the backend
  CHECK(soon([&] { return backend->aborted == 1; }));
  CHECK(backend->aborts == 1);
}

TEST_CASE("a backend that the communicator alone holds is shut down before it is destroyed") {
  static std::atomic<int> ended{0};
  struct Own : HangingBackend {
    void shutdown() override { ++ended; }
  };
  { ProcessGroupComm comm{World(), c10::make_intrusive<Own>(), on_meta()}; }
  CHECK(ended == 1);
  const auto shared = c10::make_intrusive<Own>();
  { ProcessGroupComm comm{World(), shared, on_meta()}; }
  CHECK(ended == 1);
}

}  // namespace device_failure_test
