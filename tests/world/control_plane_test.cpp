// Control planes of many ranks in one process, without LibTorch.
#include <sys/resource.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/world/detail/control_plane.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/store_server.hpp"
#include "support/catch.hpp"

namespace control_plane_test {

using namespace std::chrono_literals;
using namespace lockstep::detail;

namespace {

// A communicator whose ranks are all in their seventh collective.
struct Waiting : ReportedGroup {
  using ReportedGroup::ReportedGroup;
  [[nodiscard]] lockstep::FailedCall position() const override {
    return {.operation = "all_reduce", .sequence = 7};
  }
  [[nodiscard]] CallMark mark() const override { return {7, 1}; }
  std::optional<CallMarks> new_marks() override { return std::nullopt; }
  void ask_calls() override {}
  void leave() override {}
};

// The store and the ranks of a run, each a thread, which has joined and is connected.
template <class Rank>
void run_ranks(int size, const Rank& rank_of) {
  Listener listener = listen_on("127.0.0.1", 0);
  const int port = listener.port;
  const StoreServer server(std::move(listener), "");
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.emplace_back([&, rank] {
      const auto connection = std::make_shared<StoreConnection>(StoreEndpoint{"127.0.0.1", port}, 60s);
      RunClient run(*connection, StoreConnection::Clock::now() + 100s);
      const RankIdentity identity{.process = formatted("node pid {}", rank), .host = "node"};
      static_cast<void>(run.join(rank, size, identity, true));
      static_cast<void>(run.meet("", {}, true));  // blocks until all have come
      rank_of(rank, connection);
    });
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace

TEST_CASE("256 ranks that ask at once blame the dead rank alone") {
  constexpr int size = 256, dead = 100;
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  std::atomic<int> wrong{0}, named{0}, unanswered{0};
  std::barrier all(size);
  std::vector<int> all_ranks(size);
  std::iota(all_ranks.begin(), all_ranks.end(), 0);
  run_ranks(size, [&](int rank, const std::shared_ptr<StoreConnection>& connection) {
    const auto group = std::make_shared<Waiting>("group", all_ranks);
    std::optional<ControlPlane> plane;
    plane.emplace(rank, connection);
    plane->add(group);
    // Until every rank has connected and answered once.
    while (plane->ask(*group, 60s, 60s).positions.size() < size - 1u) {
    }
    all.arrive_and_wait();
    if (rank == dead) plane.reset();
    all.arrive_and_wait();
    if (rank != dead) {
      // 255 ranks need a second for their answers, more on a busy machine.
      const auto answers = plane->ask(*group, 6s, 60s);
      if (!answers.conclusive) ++unanswered;
      for (int other = 0; other < size; ++other) {
        const auto found = answers.positions.find(other);
        const bool answered = found != answers.positions.end() && found->second.sequence == 7 &&
                              found->second.operation == "all_reduce";
        if (other == dead && !answered) ++named;
        if (other != dead && other != rank && !answered) ++wrong;
      }
    }
    all.arrive_and_wait();
  });
  CHECK(unanswered == 0);
  CHECK(wrong == 0);
  CHECK(named == size - 1);
}

TEST_CASE("a control plane made while the last one ends is told of events") {
  std::atomic<int> missed{0};
  std::barrier both(2);
  run_ranks(2, [&](int rank, const std::shared_ptr<StoreConnection>& connection) {
    const auto plane = [&] { return ControlPlane::of(rank, connection, nullptr); };
    for (int round = 0; round < 50; ++round) {
      const std::string group = formatted("group {}", round);
      auto first = plane();
      std::thread end([&] { first.reset(); });
      auto second = plane();
      end.join();
      both.arrive_and_wait();
      if (rank == 0) second->publish({.kind = Event::aborted, .rank = 0, .group = group});
      for (int i = 0; rank == 1 && i < 500 && !second->aborted(group); ++i)
        second->await_news(second->version(), 10ms);
      if (rank == 1 && !second->aborted(group)) ++missed;
      both.arrive_and_wait();
    }
  });
  CHECK(missed == 0);
}

}  // namespace control_plane_test
