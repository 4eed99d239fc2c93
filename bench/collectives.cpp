// All-reduces of many sizes over CpuComm and GlooComm, and what the machine itself does: for collectives.py.
//   bench_collectives [--nproc N] shm|gloo SMALLEST LARGEST    (bytes; each size four times the one before)
//   bench_collectives machine       a ping of two processes over a flag and over a futex, and memcpy
// Prints lines that begin with BENCH: seconds of one call, the median of the batches.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/comm/detail/shm_memory.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/world/launch.hpp"
#include "sizes.hpp"

namespace {

using Clock = std::chrono::steady_clock;

// Runs `batch(calls)` until a batch takes 5 ms, then 9 batches. Returns the median seconds of one call.
template <class Batch>
double seconds_of(Batch&& batch, int calls) {
  std::vector<double> seconds;
  for (int i = 0; i < 10; ++i) {
    const auto begin = Clock::now();
    batch(calls);
    if (i > 0) seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count() / calls);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

void say(const char* system, std::size_t bytes, double seconds) {
  fmt::print("BENCH {{\"system\": \"{}\", \"bytes\": {}, \"seconds\": {:.9f}}}\n", system, bytes, seconds);
  std::fflush(stdout);
}

int calls_for(std::size_t bytes) {
  return static_cast<int>(std::clamp<std::size_t>((std::size_t{64} << 20) / (bytes + 65536), 3, 500));
}

template <class Comm>
void all_reduces(const lockstep::World& world, const char* system, std::size_t smallest,
                 std::size_t largest) {
  Comm comm{world};
  for (std::size_t bytes = smallest; bytes <= largest; bytes = size_after(bytes)) {
    at::Tensor tensor = at::zeros({static_cast<std::int64_t>(bytes / 4)});
    const double seconds = seconds_of(
        [&](int calls) {
          for (int i = 0; i < calls; ++i) comm.all_reduce(tensor).wait();
        },
        calls_for(bytes));
    if (world.rank() == 0) say(system, bytes, seconds);
  }
}

// One way of a ping between two processes; `sleeps`: over a futex.
double ping(bool sleeps) {
  auto* words = static_cast<std::atomic<std::uint32_t>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  auto &there = words[0], &back = words[32];
  const auto await = [&](std::atomic<std::uint32_t>& word, std::uint32_t value) {
    while (word.load(std::memory_order_acquire) != value)
      if (sleeps) lockstep::detail::await_change(word, value - 1, Clock::now() + std::chrono::seconds(1));
  };
  const auto send = [&](std::atomic<std::uint32_t>& word) {
    sleeps ? lockstep::detail::change(word) : void(word.fetch_add(1, std::memory_order_release));
  };
  constexpr std::uint32_t batches = 10, calls = 2000;
  if (fork() == 0) {
    for (std::uint32_t i = 1; i <= batches * calls; ++i) {
      await(there, i);
      send(back);
    }
    _exit(0);
  }
  std::uint32_t sent = 0;
  const double seconds = seconds_of(
      [&](int count) {
        for (int i = 0; i < count; ++i) {
          send(there);
          await(back, ++sent);
        }
      },
      calls);
  wait(nullptr);
  return seconds / 2;
}

void machine() {
  say("ping over a flag", 0, ping(false));
  say("ping over a futex", 0, ping(true));
  for (std::size_t bytes = 4096; bytes <= std::size_t{64} << 20; bytes = size_after(bytes)) {
    std::vector<char> from(bytes, 1), to(bytes);
    const double seconds = seconds_of(
        [&](int calls) {
          for (int i = 0; i < calls; ++i) {
            std::memcpy(to.data(), from.data(), bytes);
            asm volatile("" : : "r"(to.data()) : "memory");
          }
        },
        calls_for(bytes));
    say("memcpy", bytes, seconds);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "machine") {
    machine();
    return 0;
  }
  return lockstep::launch(argc, argv, [](const lockstep::World& world, int count, char** words) {
    if (count != 4) throw lockstep::UsageError("usage: [--nproc N] shm|gloo SMALLEST LARGEST, or machine");
    const std::size_t smallest = std::stoul(words[2]), largest = std::stoul(words[3]);
    if (std::string(words[1]) == "gloo")
      all_reduces<lockstep::GlooComm>(world, "gloo", smallest, largest);
    else
      all_reduces<lockstep::CpuComm>(world, "shm", smallest, largest);
  });
}
