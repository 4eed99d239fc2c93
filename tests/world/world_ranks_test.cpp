#include <thread>

#include "lockstep/world/detail/nccl_environment.hpp"
#include "lockstep/world/detail/store.hpp"
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
  CHECK(lockstep::detail::nccl_environment_warning().empty());
}

TEST_CASE("a second connection works while the first one waits") {
  const auto& world = test_world();
  auto store = world.store();
  const auto key = fmt::format("test/late/{}", world.rank());
  std::thread other([&] { store->wait({key}, 20s); });
  std::this_thread::sleep_for(20ms);
  world.connect_again()->set(key, std::string("here"));
  other.join();
  CHECK(store->check({key}));
}

TEST_CASE("a rendezvous file that cannot be opened is refused at once") {
  const auto begin = std::chrono::steady_clock::now();
  CHECK_THROWS_WITH(lockstep::detail::open_file_store("/nowhere/at/all", 2),
                    ContainsSubstring("cannot open the rendezvous file /nowhere/at/all (of "
                                      "LOCKSTEP_RENDEZVOUS or World::join): No such file"));
  CHECK_THROWS_AS(lockstep::detail::open_file_store("/tmp", 2), lockstep::UsageError);
  CHECK(std::chrono::steady_clock::now() - begin < 5s);
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
  CHECK(lockstep::detail::process_rank == test_world().rank());
}

}  // namespace world_ranks_test
