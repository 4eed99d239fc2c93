// A program of several ranks that goes wrong in the way its first argument says: the tests start it and look
// at what is left.
#include <sys/prctl.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include "lockstep/log/log.hpp"
#include "lockstep/world/detail/world_state.hpp"
#include "lockstep/world/launch.hpp"
#include "support/meeting.hpp"

using namespace std::chrono_literals;
using lockstep::World;
using lockstep_test::meet;

namespace {

// Waits as one that looks now and then whether another rank has failed, and throws if so.
void wait_for_failure(const World& world) {
  const auto connection = lockstep::detail::state_of(world).connection();
  const auto end = std::chrono::steady_clock::now() + 60s;
  while (std::chrono::steady_clock::now() < end) {
    if (const auto failure = lockstep::detail::RunClient(*connection, 10s).summary().failure)
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
  } else if (mode == "first returns before restart" ||
             mode == "last returns before restart") {  // of number `file`
    meet(world);
    if (std::stoi(std::getenv("TORCHELASTIC_RESTART_COUNT")) < std::stoi(file))
      return world.rank() == (mode.starts_with("first") ? 0 : world.size() - 1) ? 3 : 0;
    ready();
  } else if (mode == "throws before restart") {  // of number `file`
    const bool first = std::stoi(std::getenv("TORCHELASTIC_RESTART_COUNT")) < std::stoi(file);
    if (first && world.rank() == world.size() - 1) throw lockstep::DataError("the file is not there yet");
    ready();
  } else if (mode == "crashes when it must end") {
    std::signal(SIGTERM, [](int) { std::abort(); });
    ready();
    std::this_thread::sleep_for(60s);
  } else if (mode == "fails before restart" ||
             mode == "first host fails before restart") {  // of number `file`
    meet(world);
    const int restart = std::stoi(std::getenv("TORCHELASTIC_RESTART_COUNT"));
    if (restart >= std::stoi(file)) return ready(), 0;
    if (mode.starts_with("first") && world.rank() >= world.size() / 2) return 0;
    while (mode.starts_with("first") && world.rank() == 0 &&  // until the others have ended well
           lockstep::detail::RunClient(*lockstep::detail::state_of(world).connection(), 10s).summary().ended <
               static_cast<std::size_t>(world.size() / 2))
      std::this_thread::sleep_for(10ms);
    if (world.rank() == (mode.starts_with("first") ? 0 : world.size() - 1)) kill(getpid(), SIGKILL);
    wait_for_failure(world);
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
  } else if (mode == "code before meeting") {
    if (world.rank() == 1) return 5;
    meet(world);
  } else if (mode == "exit before meeting") {
    if (world.rank() == 1) std::exit(5);
    meet(world);
  } else if (mode == "exits well before meeting") {
    std::exit(0);
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
  } else if (mode == "waits for failure" || mode == "answers by a code" || mode == "has no time to end") {
    if (mode == "answers by a code") std::signal(SIGTERM, [](int) { _exit(7); });
    if (mode == "has no time to end") std::signal(SIGTERM, SIG_IGN);
    ready();
    wait_for_failure(world);
  } else if (mode == "works before it joins" || mode == "sleeps before it joins") {
    const auto end = std::chrono::steady_clock::now() + 9s;
    while (world.rank() == 1 && std::chrono::steady_clock::now() < end)
      if (mode.starts_with("sleeps")) std::this_thread::sleep_for(100ms);
    ready();
  } else if (mode == "never communicates") {
    world.log.all().info("now");
    std::this_thread::sleep_for(60s);
  } else if (mode == "waits") {
    ready();
    std::this_thread::sleep_for(60s);
  } else if (mode == "threads") {
    world.log.all().info("threads {}", at::get_num_threads());
  } else if (mode == "variables") {
    world.log.all().info("GPUs {}, timeout {}", std::getenv("CUDA_VISIBLE_DEVICES"),
                         std::getenv("LOCKSTEP_TIMEOUT"));
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
  if (mode == "joins") try {
      const auto world = World::join(argv[2], std::stoi(argv[3]), std::stoi(argv[4]));
      meet(world);
      fmt::print("local {} of {}\n", world.local_rank(), world.local_size());
      std::fflush(stdout);
      lockstep::detail::state_of(world).end(0, true);
      return 0;
    } catch (const lockstep::Error& error) {
      fmt::print(stderr, "error: {}\n", error.what());
      return 1;
    }
  if (mode == "untouched") {
    const auto state = [] {
      std::vector<std::string> all{
          fmt::format("{}", fmt::ptr(std::get_terminate())), fmt::format("{}", FLAGS_caffe2_log_level),
          std::to_string(at::get_num_threads()),
          fmt::format("{}", static_cast<void*>(c10::WarningUtils::get_warning_handler()))};
      int signal_of_death = 0;
      prctl(PR_GET_PDEATHSIG, &signal_of_death);
      all.push_back(std::to_string(signal_of_death));
      for (int number = 1; number < NSIG; ++number) {
        struct sigaction action {};
        sigaction(number, nullptr, &action);
        all.push_back(fmt::format("{}", reinterpret_cast<void*>(action.sa_handler)));
      }
      for (char** entry = environ; *entry; ++entry) all.emplace_back(*entry);
      return all;
    };
    const auto before = state();
    {
      const auto world = World::from_environment();
      meet(world);
      if (state() != before) return 3;
    }
    at::set_num_threads(2);
    const auto world = World::from_environment({.threads = 3});
    fmt::print("threads {}\n", at::get_num_threads());
    // Rank 0 hosts the store, and ends last.
    if (world.rank() == 0)
      world.store()->wait({"program/end"}, 30s);
    else
      world.store()->set("program/end", std::string("here"));
    return 0;
  }
  const char* const* arguments = argv;
  if (mode == "unknown launcher") {
    using Copy = std::pair<const char*, const char*>;
    for (const auto& [name, source] :
         {Copy{"RANK", "MADE_UP_RANK"}, Copy{"WORLD_SIZE", "MADE_UP_SIZE"},
          Copy{"LOCAL_RANK", "MADE_UP_RANK"}, Copy{"LOCAL_WORLD_SIZE", "MADE_UP_SIZE"},
          Copy{"MASTER_PORT", "MADE_UP_PORT"}})
      setenv(name, std::getenv(source), 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    return lockstep::launch(argc, arguments, [](World world) { return rank_of("well", world, ""); });
  }
  if (mode == "arguments")
    return lockstep::launch(argc, arguments, [](const World& world, int count, char** rest) {
      std::string all;
      for (int i = 1; i < count; ++i) all += fmt::format(" '{}'", rest[i]);
      world.log.all().info("arguments{}", all);
    });
  return lockstep::launch(argc, arguments,
                          [&](World world) { return rank_of(mode, world, argc > 2 ? argv[2] : ""); },
                          {.gpus = mode == "variables" ? "2,0" : ""});
}
