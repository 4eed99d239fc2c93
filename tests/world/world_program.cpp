// A program of several ranks that goes wrong in the way its first argument says: the tests start it and look
// at what is left.
#include <csignal>
#include <fstream>
#include <thread>

#include "lockstep/log/log.hpp"
#include "lockstep/world/detail/store.hpp"
#include "lockstep/world/launch.hpp"
#include "support/meeting.hpp"

using namespace std::chrono_literals;
using lockstep::World;
using lockstep_test::meet;

namespace {

// Waits as one that looks now and then whether another rank has failed.
void wait_for_failure(const World& world) {
  auto side = world.connect_again();
  const auto end = std::chrono::steady_clock::now() + 60s;
  while (std::chrono::steady_clock::now() < end) {
    if (const auto failure = lockstep::detail::published_failure(*side))
      throw lockstep::PeerError(lockstep::detail::consequence_of(*failure, world.rank(), {}));
    std::this_thread::sleep_for(20ms);
  }
}

int rank_of(const std::string& mode, World world, const std::string& file) {
  const auto ready = [&] {
    meet(world);
    world.log.all().info("rank {} of {}, local {} of {}", world.rank(), world.size(), world.local_rank(),
                         world.local_size());
  };
  if (mode == "well") {
    ready();
  } else if (mode == "late") {
    ready();
    if (world.rank() != 0) std::this_thread::sleep_for(1s);
    world.store()->set(fmt::format("program/late/{}", world.rank()), std::string("here"));
    if (world.rank() == world.size() - 1)
      for (int rank = 0; rank < world.size(); ++rank)
        world.store()->wait({fmt::format("program/late/{}", rank)}, 30s);
  } else if (mode == "throws") {
    ready();
    if (world.rank() == 1) throw std::out_of_range("no such digit");
    wait_for_failure(world);
  } else if (mode == "torch throws") {
    ready();
    if (world.rank() == 1) TORCH_CHECK(false, "a tensor of LibTorch is wrong");
    wait_for_failure(world);
  } else if (mode == "throws controls") {
    ready();
    if (world.rank() == 1) throw lockstep::DataError("a bad \x1b[2Jfile\nerror: rank 7 failed");
    wait_for_failure(world);
  } else if (mode == "first twice") {
    bool kept = true;
    for (const char* end : {"0", "1"}) {
      // Another World of the same process, which meets in the same store.
      const World again = World::from_environment();
      again.local_zero_first([&] {
        if (again.local_rank() > 0) {
          kept = kept && std::ifstream(file + end).good();
        } else {
          std::this_thread::sleep_for(300ms);
          std::ofstream{file + end} << "done";
        }
      });
    }
    world.log.all().info("local {} of {}, order {}", world.local_rank(), world.local_size(),
                         kept ? "kept" : "broken");
  } else if (mode == "killed") {
    ready();
    if (world.rank() == world.size() - 1) kill(getpid(), SIGKILL);
    wait_for_failure(world);
  } else if (mode == "usage") {
    throw lockstep::UsageError("--epochs -1 is too small: it must be 0 or more");
  } else if (mode == "usage after meeting") {
    meet(world);
    throw lockstep::UsageError("--epochs -1 is too small: it must be 0 or more");
  } else if (mode == "fails once") {
    const bool second = std::ifstream(file).good();
    // The others read the address that rank 0 of the first attempt has left in the agent's store.
    if (second && world.rank() == 0) std::this_thread::sleep_for(1s);
    meet(world);
    if (second) {
      ready();
    } else if (world.rank() == 2) {
      std::ofstream{file} << "failed";
      throw lockstep::Error("the first attempt fails");
    } else {
      std::this_thread::sleep_for(30s);
    }
  } else if (mode == "code") {
    return world.rank() == 1 ? 5 : (std::this_thread::sleep_for(30s), 0);
  } else if (mode == "code before meeting") {
    if (world.rank() == 1) return 5;
    meet(world);
  } else if (mode == "exit before meeting") {
    if (world.rank() == 1) std::exit(5);
    meet(world);
  } else if (mode == "first fails") {
    world.local_zero_first([&] {
      if (world.rank() == 0) throw lockstep::DataError("the archive is damaged");
    });
  } else if (mode == "first is killed") {
    meet(world);
    world.local_zero_first([&] {
      if (world.local_rank() != 0) return;
      std::this_thread::sleep_for(1s);  // in which the others come to wait for it
      raise(SIGKILL);
    });
  } else if (mode == "first takes long") {
    world.local_zero_first(
        [&] {
          if (world.local_rank() == 0) std::this_thread::sleep_for(3s);
        },
        500ms);
  } else if (mode == "collective in scope") {
    world.rank_zero([&] { lockstep::forbid_in_rank_zero_scope("barrier"); });
    wait_for_failure(world);
  } else if (mode == "waits for failure") {
    ready();
    wait_for_failure(world);
  } else if (mode == "waits") {
    ready();
    std::this_thread::sleep_for(60s);
  } else if (mode == "threads") {
    world.log.all().info("threads {}", at::get_num_threads());
  } else if (mode == "progress") {
    meet(world);
    lockstep::Progress progress(world.log, 50, {.title = "epoch 1/1", .line_every = 300ms});
    for (int step = 0; step < 50; ++step) {
      std::this_thread::sleep_for(20ms);
      if (step == 25 && world.rank() == 1) world.log.all().info("half way");
      if (step == 25) meet(world, "half way");
      progress.advance(64, 1.0 / (1 + step));
    }
    progress.finish();
    world.log.info("done");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "well";
  if (mode == "spawn") {
    lockstep::spawn(3, [](int rank, int size) { fmt::print("first {} of {}\n", rank, size); });
    lockstep::spawn(2, [](int rank, int size) { fmt::print("second {} of {}\n", rank, size); });
    fmt::print("joined\n");
    return 0;
  }
  if (mode == "spawn fails") {
    lockstep::spawn(3, [](int rank, int) {
      if (rank == 2) throw lockstep::DataError("a bad file");
      std::this_thread::sleep_for(30s);
    });
    fmt::print("never\n");
    return 0;
  }
  if (mode == "spawn joins") {
    const std::string url = argv[2];
    lockstep::spawn(3, [&](int rank, int size) {
      const auto world = World::join(url, rank, size);
      meet(world);
      world.log.info("met {}", size);
      fmt::print("local {} of {}\n", world.local_rank(), world.local_size());
      world.leave();
    });
    return 0;
  }
  if (mode == "level one waits") {
    const auto world = World::from_environment();
    return rank_of("waits", world, "");
  }
  if (mode == "level one") {  // a loop of the user's own, without launch
    const auto world = World::from_environment();
    meet(world);
    if (world.rank() == 1) throw lockstep::DataError("a bad file");
    wait_for_failure(world);
    return 0;
  }
  const char* const* arguments = argv;
  if (mode == "source of ranks") {  // of a launcher that lockstep does not know
    const auto source = [](const lockstep::Variables& variables) -> std::optional<lockstep::LaunchedRank> {
      const auto rank = variables("MADE_UP_RANK"), size = variables("MADE_UP_SIZE");
      if (!rank || !size) return std::nullopt;
      return lockstep::LaunchedRank{"madeup", std::stoi(*rank), std::stoi(*size)};
    };
    return lockstep::launch(argc, arguments, [](World world) { return rank_of("well", world, ""); },
                            {.rank_source = source});
  }
  if (mode == "arguments")
    return lockstep::launch(argc, arguments, [](const World& world, int count, char** rest) {
      std::string all;
      for (int i = 1; i < count; ++i) all += fmt::format(" '{}'", rest[i]);
      world.log.all().info("arguments{}", all);
    });
  return lockstep::launch(argc, arguments,
                          [&](World world) { return rank_of(mode, world, argc > 2 ? argv[2] : ""); });
}
