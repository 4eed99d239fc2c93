// A few collectives in order, then what the first argument names goes wrong on the rank of the second.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/random_calls.hpp"
#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/comm/detail/call_watch.hpp"
#include "lockstep/comm/detail/group.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/comm/process_group_comm.hpp"
#include "lockstep/comm/shm_comm.hpp"
#include "lockstep/world/launch.hpp"
#include "support/meeting.hpp"
#include "support/process.hpp"

namespace {

using namespace std::chrono_literals;

// CpuComm, whose ranks share memory here, or GlooComm.
class Comm : public lockstep::ProcessGroupComm {
 public:
  explicit Comm(const lockstep::World& world, lockstep::GlooOptions options = {})
      : ProcessGroupComm(std::getenv("LOCKSTEP_TEST_GLOO") != nullptr
                             ? lockstep::ProcessGroupComm(lockstep::GlooComm(world, std::move(options)))
                             : lockstep::ProcessGroupComm(lockstep::CpuComm(world, std::move(options)))) {}
};

// Helper processes that outlive this rank: one that is executed and one that is only forked.
void start_helpers() {
  char name[] = "sleep", time[] = "60";
  char* command[] = {name, time, nullptr};
  pid_t helper = 0;
  posix_spawnp(&helper, name, nullptr, nullptr, command, environ);
  if (fork() == 0) {
    alarm(60);
    for (;;) pause();
  }
}

// Waits until the process that hosts the store is stopped: the launcher, or rank 0.
pid_t host_of_store(const lockstep::World& world) {
  if (lockstep::detail::state_of(world).current_environment().store_is_hosted) return getppid();
  const auto store = world.store();
  if (world.rank() == 0) store->set("program/host", std::to_string(getpid()));
  store->wait({"program/host"}, 60s);
  return std::atoi(store->get_to_str("program/host").c_str());
}
void await_stop(pid_t pid) {
  while (lockstep_test::process_state(pid).state != 'T') usleep(10000);
}

void say_when(std::chrono::steady_clock::time_point start) {
  const auto took =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
  std::cerr << "TimeoutError after " << took.count() << " ms" << std::endl;
}

// Calls of which none may hold up the program for longer than its timeout, although the store does not answer.
int run_stopped(const lockstep::World& world, const std::string& call, int culprit) {
  lockstep::GlooOptions options;
  options.timeout = 3s;
  const pid_t host = host_of_store(world);
  lockstep_test::meet(world);
  std::optional<Comm> comm;
  auto tensor = at::ones({1000});
  if (call != "meet") {
    comm.emplace(world, options);
    comm->all_reduce(tensor).synchronize();
  }
  std::cout << "now" << std::endl;
  if (world.rank() == culprit)
    for (;;) pause();
  await_stop(host);
  const auto start = std::chrono::steady_clock::now();
  try {
    if (call == "meet") comm.emplace(world, options);
    if (call == "reduce") comm->all_reduce(tensor).synchronize();
    if (call == "recv") comm->recv(tensor, culprit).synchronize();
    if (call == "shutdown") comm->shutdown();
  } catch (const lockstep::TimeoutError&) {
    say_when(start);
    throw;
  }
  return 0;
}

// The program of collectives of `seed`, in which rank `culprit` makes a mistake unless it is -1.
int run_calls(const lockstep::World& world, unsigned seed, int culprit) {
  constexpr at::ScalarType dtypes[] = {at::kFloat, at::kDouble, at::kBFloat16};
  std::mt19937 random(seed);
  auto steps = lockstep_test::random_steps(random);
  if (world.rank() == culprit) steps = lockstep_test::mistaken(std::move(steps), random);
  Comm comm{world};
  using enum lockstep_test::Operation;
  for (const lockstep_test::Step& step : steps) {
    const auto options = at::TensorOptions(dtypes[step.dtype]);
    const auto op = static_cast<lockstep::ReduceOp>(std::max(step.op, 0));
    const int root = std::max(step.root, 0) % world.size();
    auto tensor = at::ones({step.elements}, options);
    auto rows = at::ones({world.size(), step.elements}, options), received = at::empty_like(rows);
    switch (step.operation) {
      case all_reduce:
        comm.all_reduce(tensor, op).synchronize();
        break;
      case reduce:
        comm.reduce(tensor, root, op).synchronize();
        break;
      case reduce_scatter:
        comm.reduce_scatter(tensor, rows, op).synchronize();
        break;
      case broadcast:
        comm.broadcast(tensor, root).synchronize();
        break;
      case all_gather:
        comm.all_gather(rows, tensor).synchronize();
        break;
      case all_to_all:
        comm.all_to_all(received, rows).synchronize();
        break;
      case new_group: {
        std::vector<int> members(1 + static_cast<std::size_t>(step.elements % world.size()));
        std::iota(members.begin(), members.end(), 0);
        if (auto group = comm.new_group(members)) group->all_reduce(tensor).synchronize();
        break;
      }
      case bytes:
        static_cast<void>(comm.all_gather_bytes("bytes"));
        break;
      case barrier:
        comm.barrier();
    }
  }
  return 0;
}

// Makes a system call fail in all threads of this process.
void refuse(unsigned call, unsigned error) {
  sock_filter program[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                           BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
                           BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
                           BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog filter{4, program};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter) != 0)
    throw std::runtime_error("no seccomp");
}
void limit(decltype(RLIMIT_AS) resource, rlim_t most) {
  const rlimit both{most, most};
  if (setrlimit(resource, &both) != 0) throw std::runtime_error("no setrlimit");
}
void take_away(const std::string& what) {
  std::size_t mapped_pages = 0;
  std::ifstream("/proc/self/statm") >> mapped_pages;
  if (what == "limit") limit(RLIMIT_FSIZE, 1 << 20);
  if (what == "mapped")
    limit(RLIMIT_AS, mapped_pages * 4096 + (std::size_t{350} << 20));  // 3 ranks share 384 MiB
  if (what == "locked") limit(RLIMIT_MEMLOCK, 0);
  if (what == "memfd") refuse(SYS_memfd_create, ENOSYS);
  if (what == "full") refuse(SYS_fallocate, ENOSPC);
  if (what == "user" && setuid(65534) != 0) throw std::runtime_error("no setuid");
  if (what == "network" && unshare(CLONE_NEWNET) != 0) throw std::runtime_error("no unshare");
  if (what.starts_with("/") && !(std::ofstream(what + "/cgroup.procs") << getpid() << std::flush))
    throw std::runtime_error("no cgroup");
}

// Ranks of which one cannot share memory, or not as much as the others.
int run_unshared(const lockstep::World& world, const std::string& what, int culprit) {
  const bool later = what.starts_with("later ");
  auto tensor = at::arange(16 << 20, at::kFloat).fmod_(1000);  // in more blocks than a rank begins with
  const auto sum = tensor * 3;
  const bool mine = world.rank() == culprit;
  lockstep_test::meet(world);
  if (mine && !later) take_away(what);
  lockstep::CpuComm comm{world, {.timeout = 20s}};
  try {
    lockstep::ShmComm by_name{world};
  } catch (const lockstep::CommunicationError& error) {
    std::cout << "ShmComm: " << error.what() << std::endl;
  }
  if (mine && later) take_away(what.substr(6));
  if (!mine) usleep(500'000);  // so that the rank needs all its blocks at once
  comm.all_reduce(tensor).synchronize();
  std::cout << (at::equal(tensor, sum) ? "right sum" : "wrong sum") << std::endl;
  return 0;
}

int run(const lockstep::World& world, const std::string& fault, int culprit) {
  if (fault.starts_with("unshared ")) return run_unshared(world, fault.substr(9), culprit);
  if (fault.starts_with("calls of "))
    return run_calls(world, static_cast<unsigned>(std::stoul(fault.substr(9))), culprit);
  if (fault.starts_with("stopped ")) return run_stopped(world, fault.substr(8), culprit);
  const bool mine = world.rank() == culprit;
  const auto timeout = fault == "never"  ? 1500ms
                       : fault == "slow" ? 12000ms
                       : fault == "cut"  ? 4000ms
                                         : std::chrono::milliseconds(30min);
  if (fault == "never") lockstep_test::meet(world);
  Comm comm{world, {.timeout = timeout}};
  auto tensor = at::ones({1000});
  for (int i = 0; i < 3; ++i) comm.all_reduce(tensor).synchronize();
  if (fault == "left") comm.new_group({0, 1, 2})->shutdown();
  if (mine) std::cout << "now" << std::endl;

  if (fault == "throw") {
    auto first = comm.all_reduce(tensor);
    auto second = comm.all_reduce(tensor);
    if (mine) {
      auto third = comm.all_reduce(tensor);
      throw std::runtime_error("boom");
    }
    for (int i = 0; i < 10; ++i) comm.all_reduce(tensor).synchronize();
  } else if (fault == "catch") {
    // The exception ends `inner`, with work in flight, and not `comm`, which also has some.
    try {
      Comm inner{world};
      auto first = comm.all_reduce(tensor);
      auto second = inner.all_reduce(tensor);
      if (mine) {
        auto third = inner.all_reduce(tensor);
        throw std::runtime_error("boom");
      }
      for (int i = 0; i < 10; ++i) inner.all_reduce(tensor).synchronize();
    } catch (const std::exception& error) {
      std::cerr << "rank " << world.rank() << " caught: " << error.what() << std::endl;
      try {
        comm.barrier();
      } catch (const std::exception& again) {
        std::cerr << "rank " << world.rank() << " again: " << again.what() << std::endl;
      }
      return 3;
    }
  } else if (fault == "abort") {
    if (mine) {
      auto work = comm.all_reduce(tensor);
      comm.abort("the disk is full");
      try {
        comm.check_error();
        return 3;
      } catch (const lockstep::CommunicationError&) {
      }
      comm.barrier();
    }
    for (int i = 0; i < 10; ++i) comm.all_reduce(tensor).synchronize();
  } else if (fault == "kill") {
    if (mine) raise(SIGKILL);
    comm.all_reduce(tensor).synchronize();
  } else if (fault == "stop") {
    if (mine) raise(SIGSTOP);
    comm.all_reduce(tensor).synchronize();
  } else if (fault == "left") {
    if (mine) raise(SIGKILL);
    if (world.rank() == 1) sleep(60);  // busy with something else than collectives
    comm.all_reduce(tensor).synchronize();
  } else if (fault == "helper") {
    if (mine) {
      start_helpers();
      raise(SIGKILL);
    }
    comm.all_reduce(tensor).synchronize();
  } else if (fault == "farewell") {
    comm.shutdown();
    using lockstep::detail::Group;
    Group group(world, {0, 1, 2}, "test/farewell", 5min);
    group.join();
    if (mine) raise(SIGKILL);
    group.depart();
    lockstep::detail::CallWatch(group, Group::making()).await_departures();
    std::cout << "left" << std::endl;
    return 0;
  } else if (fault == "cut") {
    sleep(1);
    for (;;) {
      const auto start = std::chrono::steady_clock::now();
      try {
        comm.all_reduce(tensor).synchronize();
      } catch (const lockstep::TimeoutError&) {
        say_when(start);
        throw;
      }
    }
  } else if (fault == "never" || fault == "slow") {
    if (mine) sleep(600);
    comm.all_reduce(tensor).synchronize();
  } else if (fault == "early") {
    if (mine) return 0;
    comm.all_reduce(tensor).synchronize();
  } else if (fault == "absent") {
    if (mine) throw std::runtime_error("boom");
    sleep(600);  // busy with something else than collectives
  } else if (fault.starts_with("outlives")) {
    // Rank 0, which hosts the store, is killed after its end.
    auto host = at::full({1}, static_cast<std::int64_t>(getpid()), at::kLong);
    comm.broadcast(host, culprit).synchronize();
    const std::string entered = "comm_fault/entered";  // a call after rank 0 has left would throw
    if (mine) {
      world.store()->wait({entered}, 60s);
      return 0;
    }
    std::optional<Comm::Work> more;
    if (fault == "outlives and differs") more = comm.broadcast(tensor, world.rank());
    world.store()->set(entered, std::string("yes"));
    while (kill(static_cast<pid_t>(host.item<std::int64_t>()), 0) == 0) usleep(20000);
    std::exit(0);
  } else if (fault == "gone peer") {
    std::optional<Comm> other{Comm{world}};
    other->all_reduce(tensor).synchronize();
    if (mine)
      other.reset();  // in good order, and lives on
    else
      other->recv(tensor, culprit).synchronize();
    usleep(60'000'000);
  } else if (fault == "recv") {
    if (!mine) comm.recv(tensor, culprit).synchronize();
    usleep(300000);
    throw std::runtime_error("boom");
  } else if (fault == "bytes") {
    static_cast<void>(comm.all_gather_bytes(std::string(100000, 'x')));
    if (mine) throw std::runtime_error("boom");
    static_cast<void>(comm.all_gather_bytes("y"));
  } else if (fault == "differ and leave" && mine) {
    auto first = comm.broadcast(tensor, 2), second = comm.broadcast(tensor, 2);
    comm.shutdown();
    return 0;
  } else if (fault.starts_with("differ")) {
    if (!mine) comm.all_reduce(tensor).synchronize();
    comm.barrier();
  }
  comm.barrier();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const std::string fault = argv[1];
  const int culprit = std::atoi(argv[2]);
  if (std::getenv("WITHOUT_LAUNCH")) return run(lockstep::World::from_environment(), fault, culprit);
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    const int code = run(world, fault, culprit);
    if (fault.starts_with("outlives")) std::cout << "left" << std::endl;
    return code;
  });
}
