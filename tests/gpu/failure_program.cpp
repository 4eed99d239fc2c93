// Two ranks on one GPU, or on two. After a few all-reduces rank 1 is killed ("killed") or stopped ("stopped")
// while rank 0 waits for the GPU, in no call of lockstep. Rank 0 prints the type and the text of the
// exception that its next call throws, and how long that took.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <iostream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>

#include "lockstep/comm/nccl_comm.hpp"
#include "lockstep/world/launch.hpp"

namespace {

using Clock = std::chrono::steady_clock;

void survive(lockstep::NcclComm& comm) {
  std::signal(SIGTERM, SIG_IGN);  // of the launcher, which sees the end of the other rank as soon as this one
  const auto start = Clock::now();
  std::string kind = "no exception", text;
  const auto say = [&](const char* type, const std::exception& error) {
    kind = type;
    text = error.what();
  };
  try {
    auto tensor = at::ones({1 << 16}, at::TensorOptions(comm.tensor_device()));
    comm.all_reduce(std::vector<at::Tensor>{tensor}).wait();
    static_cast<void>(tensor.sum().item<float>());  // the host waits for the GPU until the abort
    comm.check_error();
  } catch (const lockstep::PeerError& error) {
    say("PeerError", error);
  } catch (const lockstep::TimeoutError& error) {
    say("TimeoutError", error);
  } catch (const std::exception& error) {
    say("another exception", error);
  }
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
  std::cout << "survivor: " << kind << " after " << took.count() << " ms: " << text << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  if (c10::cuda::device_count() == 0) {
    std::cout << "SKIPPED: no CUDA device: skipped" << std::endl;
    return 77;
  }
  const std::string fault = argc > 1 ? argv[1] : "killed";
  // NCCL refuses two ranks of one host on one GPU: to NCCL each rank is a host of its own.
  const auto number = std::to_string(getpid());
  setenv("NCCL_HOSTID", number.c_str(), 1);
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    lockstep::NcclOptions options;
    options.timeout = std::chrono::seconds(20);
    options.device = world.local_rank() % static_cast<int>(c10::cuda::device_count());
    lockstep::NcclComm comm(world, options);
    for (int i = 0; i < 3; ++i) {
      auto tensor = at::ones({4}, at::TensorOptions(comm.tensor_device()));
      comm.all_reduce(std::vector<at::Tensor>{tensor}).synchronize();
    }
    if (world.rank() == 1) raise(fault == "stopped" ? SIGSTOP : SIGKILL);
    survive(comm);
    return 0;
  });
}
