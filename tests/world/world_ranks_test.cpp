#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/world/detail/world_state.hpp"
#include "lockstep/world/launch.hpp"
#include "support/ranks.hpp"

namespace world_ranks_test {

using namespace std::chrono_literals;

TEST_CASE("the ranks meet in one store") {
  const auto& world = test_world();
  auto store = world.store();
  store->set(fmt::format("test/met/{}", world.rank()), std::string("here"));
  for (int rank = 0; rank < world.size(); ++rank) store->wait({fmt::format("test/met/{}", rank)}, 20s);
  CHECK(world.local_rank() == world.rank());
  CHECK(world.local_size() == world.size());
}

TEST_CASE("launch sets the environment in which LibTorch does not end the process") {
  for (const auto& [name, value] : {std::pair("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"),
                                    {"TORCH_NCCL_ENABLE_MONITORING", "0"},
                                    {"TORCH_NCCL_DUMP_ON_TIMEOUT", "0"}}) {
    CAPTURE(name);
    const char* set = std::getenv(name);
    CHECK((set != nullptr && set == std::string(value)));
  }
}

TEST_CASE("a second connection works while the first one waits") {
  const auto& world = test_world();
  auto store = world.store();
  const auto key = fmt::format("test/late/{}", world.rank());
  std::thread other([&] { store->wait({key}, 20s); });
  std::this_thread::sleep_for(20ms);
  world.store()->set(key, std::string("here"));
  other.join();
  CHECK(store->check({key}));
}

TEST_CASE("rank_zero runs on rank 0 alone") {
  bool ran = false;
  test_world().rank_zero([&] { ran = true; });
  CHECK(ran == (test_world().rank() == 0));
}

TEST_CASE("local_zero_first lets the first rank of a host finish before the others begin") {
  const auto& world = test_world();
  auto store = world.store();
  const int order = world.local_zero_first([&] {
    if (world.local_rank() == 0) std::this_thread::sleep_for(50ms);
    return static_cast<int>(store->add("test/order", 1));
  });
  CHECK((order == 1) == (world.local_rank() == 0));
}

TEST_CASE("another World leaves this process its rank") {
  const lockstep::World alone;
  CHECK(alone.rank() == 0);
  CHECK(lockstep::Error("").rank() == test_world().rank());
}

TEST_CASE("a program's own parser sees none of launch's flags") {
  const auto left = [](std::vector<const char*> argv, const lockstep::LaunchOptions& options = {}) {
    argv.insert(argv.begin(), "program");
    const auto kept = lockstep::program_arguments(static_cast<int>(argv.size()), argv.data(), options);
    REQUIRE(kept.back() == nullptr);
    return std::vector<std::string>(kept.begin() + 1, kept.end() - 1);
  };
  using Strings = std::vector<std::string>;
  CHECK(left({"--nproc", "3", "--epochs", "2"}) == Strings{"--epochs", "2"});
  CHECK(left({"--epochs=2", "--nproc-per-node=3", "--prefix", "never", "data"}) ==
        Strings{"--epochs=2", "data"});
  CHECK(left({"--timeout", "9", "--nprocs", "4"}) == Strings{"--nprocs", "4"});
  CHECK(left({"--", "--nproc", "3"}) == Strings{"--", "--nproc", "3"});
  CHECK(left({"--nproc", "3"}, {.nproc_flag = false}) == Strings{"--nproc", "3"});
  CHECK(left({"--prefix", "x", "--timeout=9", "--nproc=2"}, {.prefix_flag = false, .timeout_flag = false}) ==
        Strings{"--prefix", "x", "--timeout=9"});
  CHECK(left({}).empty());
}

TEST_CASE("the help of launch lists its flags, and none that is left to the program") {
  const auto help = lockstep::launch_help({.nproc = 4});
  for (const char* flag : {"--nproc N", "(4)", "--prefix WHEN", "--timeout SECONDS"})
    CHECK_THAT(help, ContainsSubstring(flag));
  CHECK(std::count(help.begin(), help.end(), '\n') == 5);
  CHECK(lockstep::launch_help({.nproc_flag = false,
                               .prefix_flag = false,
                               .timeout_flag = false,
                               .threads_flag = false,
                               .max_restarts_flag = false})
            .empty());
}

}  // namespace world_ranks_test
