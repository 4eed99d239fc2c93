// Many connections to one store, from real processes.
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/store_server.hpp"
#include "support/catch.hpp"

namespace store_scale_test {

using namespace std::chrono_literals;
using namespace lockstep::detail;

constexpr int ranks = 4096, processes = 4;

// When each rank has joined, and has been told of the failure; 0 if it has not. Shared by the processes.
struct Shared {
  std::atomic<std::int64_t> joined[ranks], told[ranks];
};

// One rank: joins, makes a communicator, subscribes, and waits for the failure.
void take_part(Shared& shared, int port, int rank) try {
  const auto identity = RankIdentity{.process = formatted("node pid {}", rank), .host = "node"};
  StoreConnection connection({"127.0.0.1", port}, 60s);
  RunClient run(connection, StoreConnection::Clock::now() + 100s);
  static_cast<void>(run.join(rank, ranks, identity, true));
  static_cast<void>(run.meet("", {}, true));
  static_cast<void>(run.meet("comm", {}, true));
  connection.post(StoreOperation::subscribe, rank);
  shared.joined[rank] = monotonic_nanoseconds();
  if (rank == ranks - 1) raise(SIGSTOP);  // of this process: a reader that stops
  bool failed = false;
  connection.serve(
      [&](StorePush kind, FrameReader& in) {
        failed = kind == StorePush::event && in.value<Event>().kind == Event::failed;
        if (failed) shared.told[rank] = monotonic_nanoseconds();
      },
      StoreConnection::Clock::now() + 100s, [&] { return failed; });
} catch (const std::exception& error) {
  fmt::print(stderr, "rank {}: {}\n", rank, error.what());
}

pid_t start(Shared& shared, int port, int first, int end) {
  const pid_t child = fork();
  if (child != 0) return child;
  std::vector<std::thread> threads;
  for (int rank = first; rank < end; ++rank)
    threads.emplace_back([&shared, port, rank] { take_part(shared, port, rank); });
  for (std::thread& thread : threads) thread.join();
  _exit(0);
}

double resident_megabytes() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> pages;
  return static_cast<double>(pages) * static_cast<double>(sysconf(_SC_PAGESIZE)) / 1e6;
}

TEST_CASE("4096 ranks join one store, and are told of a failure though one does not read", "[.release]") {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_max < ranks + 200) {
    WARN("SKIPPED: this process may open " << limit.rlim_max << " files (ulimit -Hn), and needs "
                                           << ranks + 200);
    return;
  }
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  auto* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  auto& shared = *new (memory) Shared{};
  Listener listener = listen_on("127.0.0.1", 0);
  const int port = listener.port;
  std::vector<pid_t> children;
  const auto begin = monotonic_nanoseconds();
  for (int i = 0; i < processes; ++i)
    children.push_back(start(shared, port, i * (ranks - 1) / processes, (i + 1) * (ranks - 1) / processes));
  children.push_back(start(shared, port, ranks - 1, ranks));
  const double before = resident_megabytes();
  const StoreServer server(std::move(listener), "");
  const auto count = [](const auto& times) {
    return std::count_if(std::begin(times), std::end(times), [](const auto& time) { return time != 0; });
  };
  for (const auto until = begin + 100'000'000'000;
       count(shared.joined) < ranks && monotonic_nanoseconds() < until;)
    std::this_thread::sleep_for(10ms);
  CHECK(count(shared.joined) == ranks);
  const double after = resident_megabytes();
  std::int64_t joined = 0;
  for (const auto& time : shared.joined) joined = std::max(joined, time.load());

  std::this_thread::sleep_for(500ms);
  StoreConnection other({"127.0.0.1", port}, 20s);
  const auto failed = monotonic_nanoseconds();
  CHECK(RunClient(other, 20s).publish({.failure = {.rank = 7, .message = "boom"}}));
  kill(children.back(), SIGKILL);
  for (const pid_t child : children) waitpid(child, nullptr, 0);
  std::vector<double> times;
  for (const auto& time : shared.told)
    if (time != 0) times.push_back(static_cast<double>(time - failed) / 1e6);
  CHECK(times.size() == ranks - 1);
  std::sort(times.begin(), times.end());
  REQUIRE_FALSE(times.empty());
  const auto quantile = [&](double part) {
    return times[static_cast<std::size_t>(part * static_cast<double>(times.size() - 1))];
  };
  fmt::print(
      "{} ranks: all have joined after {:.2f} s; a failure reaches them after {:.1f} ms (p50), {:.1f} ms "
      "(p99); "
      "memory of the store: {:.1f} MB\n",
      ranks, static_cast<double>(joined - begin) / 1e9, quantile(0.5), quantile(0.99), after - before);
  CHECK(times.back() < 10'000);
  CHECK(after - before < 200);
  munmap(memory, sizeof(Shared));
}

}  // namespace store_scale_test
