// A program of several ranks that reduce tensors until something happens, as its first argument says.
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/world/detail/world_state.hpp"
#include "lockstep/world/launch.hpp"
#include "support/meeting.hpp"
#include "support/store_news.hpp"

using namespace std::chrono_literals;

namespace {

/// Forks a child without exec that ends as `mode` says, as a helper of the program does, and waits for it. Returns
/// true in the child, which then returns as from main.
bool is_child_that_returns(const std::string& mode) {
  const pid_t child = fork();
  if (child == 0) {
    if (mode == "a child throws") throw std::runtime_error("of a helper");
    if (mode == "a child exits") std::exit(3);
    return true;
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (mode != "a child throws" && (!WIFEXITED(status) || WEXITSTATUS(status) != 3)) std::exit(9);
  return false;
}

// Makes calls of which the last is another one on rank `culprit`, and ends without leaving the communicator.
[[noreturn]] void exit_differently(const lockstep::World& world, int culprit) {
  auto* comm = new lockstep::GlooComm(world);  // which does not compare by itself
  for (int call = 0; call < 6; ++call) {
    auto one = torch::ones({4});
    const bool differs = call == 5 && world.rank() == culprit;
    comm->all_reduce(one, differs ? lockstep::ReduceOp::max : lockstep::ReduceOp::sum).synchronize();
  }
  std::exit(0);
}

// Destroys a communicator whose message the last rank has not received yet.
int leave_message(const lockstep::World& world, int culprit) {
  lockstep::GlooComm comm{world};
  auto numbers = torch::full({1 << 22}, world.rank());
  if (world.rank() != culprit) {
    const auto work = comm.send(numbers, culprit);
    return 0;
  }
  for (int rank = 0; rank < culprit; ++rank) {
    std::this_thread::sleep_for(1s);
    comm.recv(numbers, rank).synchronize();
    world.log.all().info("has {} of rank {}", numbers.sum().item<float>(), rank);
  }
  return 0;
}

// Makes six calls, of which the third is another one on rank `culprit`. No rank waits in vain, so that the program would
// end well.
int call_differently(const std::string& mode, const lockstep::World& world, int culprit) {
  const bool differs = world.rank() == culprit;
  lockstep::CpuComm comm{world};
  const auto reduce = [&](at::ScalarType type = at::kFloat, lockstep::ReduceOp op = lockstep::ReduceOp::sum,
                          std::int64_t elements = 4) {
    auto tensor = torch::ones({elements}).to(type);
    comm.all_reduce(tensor, op).synchronize();
  };
  const auto broadcast = [&](std::int64_t elements) {
    auto tensor = torch::ones({elements});
    comm.broadcast(tensor, world.size() - 1).synchronize();
  };
  for (int call = 0; call < 6; ++call) {
    if (call != 2 || !differs || mode == "other count")
      mode == "other size" && call == 2 ? broadcast(8) : reduce();
    else if (mode == "other dtype")
      reduce(at::kInt);
    else if (mode == "other op")
      reduce(at::kFloat, lockstep::ReduceOp::product);
    else if (mode == "other size")
      broadcast(4);  // the root sends less than the others expect
  }
  std::this_thread::sleep_for(1500ms);                 // a loop would go on; the store has compared by then
  if (mode == "other count" && differs) broadcast(4);  // of which nobody reads
  if (mode == "other dtype") static_cast<void>(comm.all_gather_bytes("result"));
  return 0;
}

std::ptrdiff_t entries(const char* folder) {
  const std::filesystem::directory_iterator found(folder);
  return std::distance(begin(found), end(found));
}

// Makes communicators, each of which rank `culprit` aborts while collectives are in flight, and keeps.
int fail_often(const lockstep::World& world, int culprit) {
  std::vector<lockstep::CpuComm> kept;
  const auto use = [&](bool fails) {
    lockstep::CpuComm comm{world};
    std::vector<torch::Tensor> tensors(4);
    for (auto& tensor : tensors) tensor = torch::ones({1 << 18});
    comm.barrier();
    std::vector<lockstep::CpuComm::Work> works;
    for (auto& tensor : tensors) {
      works.push_back(comm.all_reduce(tensor));
      if (!fails || world.rank() != culprit) continue;
      comm.abort("out of memory");
      kept.push_back(std::move(comm));
      return 0.0F;
    }
    for (auto& work : works) work.synchronize();
    return tensors[3][0].item<float>();
  };
  std::ptrdiff_t descriptors = 0, threads = 0;
  const auto more_descriptors = [&] { return std::max(entries("/proc/self/fd") - descriptors, {}); };
  const auto more_threads = [&] { return std::max(entries("/proc/self/task") - threads, {}); };
  for (int attempt = 0; attempt < 10; ++attempt) {
    try {
      use(true);
    } catch (const std::exception&) {
    }
    if (attempt > 0) continue;
    std::this_thread::sleep_for(1s);
    descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task");
  }
  float sum = use(false);
  if (world.rank() == culprit) sum = use(false);  // when the others have looked
  kept.clear();
  for (int wait = 0; wait < 50 && (more_descriptors() > 0 || more_threads() > 0); ++wait)
    std::this_thread::sleep_for(100ms);
  world.log.all().info("rank {} has {}, {} more descriptors, {} more threads", world.rank(), sum,
                       more_descriptors(), more_threads());
  if (world.rank() != culprit) use(false);
  return 0;
}

int rank_of(const std::string& mode, lockstep::World world) {
  const auto timeout = mode == "never comes" ? 2000ms : 1800000ms;
  const bool first = mode.ends_with(" first");  // rank 0, which by hand hosts the store
  const int culprit = first ? 0 : world.size() - 1;
  if (mode.starts_with("never meets") && world.rank() == culprit) {
    std::this_thread::sleep_for(1500ms);  // the others are waiting by then
    throw lockstep::DataError("a bad batch");
  }
  if (mode == "comes after a death") {  // of rank 1, which the store has noticed and not published
    world.log.all().info("rank {} waits for a death", world.rank());
    lockstep_test::await_death(lockstep::detail::state_of(world).current_environment().rendezvous, 1);
  }
  if (mode == "never comes") lockstep_test::meet(world);
  if (mode == "fails often") return fail_often(world, culprit);
  if (mode == "exits differently") exit_differently(world, culprit);
  if (mode == "leaves a message") return leave_message(world, culprit);
  if (mode.starts_with("retries")) {
    for (int attempt = 0; attempt < 2; ++attempt) try {
        lockstep::CpuComm comm{world};
        auto one = torch::ones({1});
        const bool throws = attempt == 0 && (mode == "retries" || world.rank() == culprit);
        if (throws && mode != "retries late") throw std::runtime_error("out of memory");
        comm.all_reduce(one).synchronize();
        if (throws) throw std::runtime_error("out of memory");
        world.log.all().info("attempt {}: rank {} has {}", attempt, world.rank(), one.item<float>());
      } catch (const std::exception& error) {
        world.log.all().info("attempt {}: caught {}", attempt, error.what());
        if (mode.starts_with("retries alone") && world.rank() != culprit) throw;
      }
    return 0;
  }
  if (mode == "a child before") {
    lockstep_test::meet(world);
    if (world.rank() == 0 && is_child_that_returns(mode)) return 3;
  }
  if (mode.starts_with("other ")) return call_differently(mode, world, culprit);
  lockstep::CpuComm comm{world, {.timeout = timeout}};
  auto tensor = torch::ones({1 << 20});
  if (mode.starts_with("a child")) tensor.mul(2);  // starts the OpenMP threads, which a child does not have
  // Each step of every rank ends when the last rank has done it.
  for (int step = 0; mode == "well" || mode.starts_with("a child") ? step < 20 : true; ++step) {
    if (step == 5 && world.rank() == 0 && mode.starts_with("a child ") && is_child_that_returns(mode))
      return 3;
    if (step == 5 && world.rank() == culprit) {
      if (mode == "killed" || mode == "killed first") kill(getpid(), SIGKILL);
      if (mode == "throws") throw lockstep::DataError("a bad batch");
      if (mode == "throws in flight") {
        auto work = comm.all_reduce(tensor, lockstep::ReduceOp::sum);
        auto other = comm.all_reduce(tensor.clone(), lockstep::ReduceOp::sum);
        throw lockstep::DataError("a bad batch");
      }
      if (mode == "never comes") std::this_thread::sleep_for(60s);
      if (mode == "finishes early") return 0;
      if (mode == "early exit") std::exit(0);
    }
    auto work = comm.all_reduce(tensor, lockstep::ReduceOp::avg);
    work.synchronize();
    if (step == 4) world.log.all().info("rank {} has reached step 5", world.rank());
  }
  comm.shutdown();
  world.log.info("sum {}", tensor.sum().item<float>());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (const std::string mode = argv[1]; mode.starts_with("level one")) try {  // without launch
      const auto world = lockstep::World::from_environment();
      static_cast<void>(world.store());
      const bool ends = world.rank() == 1 && !mode.ends_with("uneven") && !mode.ends_with("unlike");
      if (ends) std::this_thread::sleep_for(1s);  // the others wait by then: rank 0 hosts the store
      if (ends && mode.ends_with("dies")) std::abort();
      if (ends) throw lockstep::DataError("a bad file");
      if (mode.ends_with("unlike")) {
        lockstep::GlooComm comm{world};
        auto one = torch::ones({4});
        comm.all_reduce(one, world.rank() == 1 ? lockstep::ReduceOp::max : lockstep::ReduceOp::sum)
            .synchronize();
        if (world.rank() > 0) std::this_thread::sleep_for(1s);
        return 0;
      }
      lockstep::CpuComm comm{world};
      comm.barrier();
      if (mode.ends_with("uneven") && world.rank() == 0) static_cast<void>(comm.broadcast(at::ones({4}), 0));
      if (mode.ends_with("uneven") && world.rank() > 0) std::this_thread::sleep_for(3s);
      if (mode.starts_with("level one leaves")) return 0;  // rank 0 does not wait for the others
      comm.shutdown();
      return 0;
    } catch (const lockstep::MismatchError&) {
      fmt::print("mismatch\n");
      return 1;
    } catch (const lockstep::Error& error) {
      fmt::print(stderr, "error: {}\n", error.what());
      const bool consequence = error.failure().kind == lockstep::FailureKind::consequence;
      fmt::print("{} of rank {}\n", consequence ? "consequence" : "error", error.failure().cause);
      return 1;
    }
  return lockstep::launch(argc, argv, [&](lockstep::World world) { return rank_of(argv[1], world); });
}
