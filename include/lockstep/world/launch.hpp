#pragma once

#include <sys/ioctl.h>

#include <chrono>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/world/arguments.hpp"
#include "lockstep/world/devices.hpp"
#include "lockstep/world/supervisor.hpp"
#include "lockstep/world/worker.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep {

/// What a program may decide about its launching; `--nproc` and `--prefix` on the command line come first.
struct LaunchOptions {
  /// Processes to start on this host; 0: one a GPU, or 2 where there is none.
  int nproc = 0;
  Prefix prefix = Prefix::automatic;
  /// How long the other ranks may take to end, once one has failed, before they are killed.
  std::chrono::milliseconds grace{3000};
};

namespace detail {

/// How `launch` will run: as one worker, or as the launching process of `nproc` ranks from `first` on.
struct LaunchPlan {
  bool worker = false;
  int nproc = 1;
  int first = 0;
  int size = 1;
  Prefix prefix = Prefix::automatic;
  std::string rendezvous;  ///< of several hosts; empty where all ranks are on this one
};

/// Decides it from the command line and the environment. Throws UsageError where they contradict each other.
inline LaunchPlan plan_launch(int argc, char** argv, const LaunchOptions& options,
                              const Variables& variables = process_variable) {
  LaunchPlan plan;
  if (options.nproc < 0)
    throw UsageError(
        fmt::format("LaunchOptions::nproc is {}: it must be a number of processes, or 0", options.nproc));
  auto nproc = nproc_argument(argc, argv);
  plan.prefix = prefix_argument(argc, argv).value_or(options.prefix);
  const auto size = integer_variable(variables, "WORLD_SIZE", 1);
  const auto rank = integer_variable(variables, "RANK", 0);
  const auto local_rank = integer_variable(variables, "LOCAL_RANK", 0);
  if (local_rank && !rank)
    throw UsageError(fmt::format("LOCAL_RANK={} is set but RANK is not: set both, or neither", *local_rank));
  if (local_rank) {
    const auto env = read_environment(variables);
    if (nproc && variables("LOCAL_WORLD_SIZE") && *nproc != env.local_size)
      throw UsageError(
          fmt::format("--nproc {} contradicts LOCAL_WORLD_SIZE={}: the launcher has already started this "
                      "host's processes, so leave --nproc out",
                      *nproc, env.local_size));
    plan.worker = true;
    return plan;
  }
  if (!nproc && options.nproc > 0) nproc = options.nproc;
  if (rank) {
    plan.nproc = nproc.value_or(1);
    if (plan.nproc == 1) {
      read_environment(variables);
      plan.worker = true;
      return plan;
    }
    if (!size)
      throw UsageError(fmt::format(
          "RANK={} is set but WORLD_SIZE is not: set WORLD_SIZE to the number of all ranks", *rank));
    if (*rank + plan.nproc > *size)
      throw UsageError(
          fmt::format("RANK={} is this host's first rank, and with --nproc {} its last is {}: WORLD_SIZE={} "
                      "allows no rank above {}",
                      *rank, plan.nproc, *rank + plan.nproc - 1, *size, *size - 1));
    plan.first = *rank;
    plan.size = *size;
    if (plan.nproc < plan.size) {
      plan.rendezvous = rendezvous_url(variables, true);
      parse_rendezvous(plan.rendezvous);
    }
    return plan;
  }
  if (!nproc) nproc = size ? *size : std::max(visible_gpus(), 0) > 0 ? visible_gpus() : 2;
  if (size && *size != *nproc)
    throw UsageError(
        fmt::format("WORLD_SIZE={} contradicts --nproc {}: on one host leave WORLD_SIZE out, on several set "
                    "RANK to this host's first rank",
                    *size, *nproc));
  plan.nproc = plan.size = *nproc;
  plan.worker = plan.nproc == 1;
  return plan;
}

/// The environment of each rank that a launching process starts.
inline std::vector<Job> jobs_of(const LaunchPlan& plan, const std::string& rendezvous) {
  std::vector<std::string> common{
      fmt::format("WORLD_SIZE={}", plan.size), fmt::format("LOCAL_WORLD_SIZE={}", plan.nproc),
      "LOCKSTEP_STORE_IS_HOSTED=1", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"};
  if (rendezvous.starts_with("tcp://")) {
    const auto url = parse_rendezvous(rendezvous);
    common.push_back(fmt::format("MASTER_ADDR={}", url.host));
    common.push_back(fmt::format("MASTER_PORT={}", url.port));
    common.push_back("LOCKSTEP_RENDEZVOUS");
  } else {
    common.push_back(fmt::format("LOCKSTEP_RENDEZVOUS={}", rendezvous));
  }
  if (!process_variable("OMP_NUM_THREADS"))
    common.push_back(fmt::format("OMP_NUM_THREADS={}", std::max(1, usable_cores() / plan.nproc)));
  winsize window{};
  if (isatty(1) == 1) {
    common.push_back("LOCKSTEP_TTY=1");
    if (ioctl(1, TIOCGWINSZ, &window) == 0 && window.ws_col > 0)
      common.push_back(fmt::format("COLUMNS={}", window.ws_col));
  }
  std::vector<Job> jobs;
  for (int i = 0; i < plan.nproc; ++i) {
    jobs.push_back({plan.first + i, common});
    jobs.back().environment.push_back(fmt::format("RANK={}", plan.first + i));
    jobs.back().environment.push_back(fmt::format("LOCAL_RANK={}", i));
  }
  return jobs;
}

/// Keeps the store up until the ranks of the other hosts have ended too.
inline void outlive_other_hosts(c10d::Store& store, int size, bool well) {
  const auto limit =
      std::chrono::steady_clock::now() + (well ? std::chrono::minutes(5) : std::chrono::seconds(2));
  while (std::chrono::steady_clock::now() < limit) {
    if (well && store.check({"lockstep/failure"})) {
      std::this_thread::sleep_for(std::chrono::seconds(1));  // for those who have not read it yet
      return;
    }
    int ended = 0;
    for (int rank = 0; rank < size; ++rank) ended += World::finished(store, rank) ? 1 : 0;
    if (ended == size) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

/// Starts the ranks of this host and hosts the store for all. Returns the exit code.
inline int launch_here(const LaunchPlan& plan, int argc, char** argv, const LaunchOptions& options) {
  const bool alone = plan.rendezvous.empty();
  const auto url = alone ? RendezvousUrl{} : parse_rendezvous(plan.rendezvous);
  const bool hosting = plan.first == 0 && url.path.empty();
  Listener listener;
  if (hosting) listener = listen_on(url.port, alone);
  const auto rendezvous = alone ? fmt::format("tcp://127.0.0.1:{}", listener.port) : plan.rendezvous;

  SupervisorOptions supervised;
  supervised.arguments.assign(argv, argv + argc);
  supervised.jobs = jobs_of(plan, rendezvous);
  supervised.prefix = plan.prefix;
  supervised.grace = options.grace;
  StorePtr store;
  // Its threads start after the ranks have been forked; they wait in the listener's queue until then.
  supervised.started = [&] {
    if (hosting)
      store = host_tcp_store(alone ? "127.0.0.1" : "localhost", std::move(listener), rendezvous_timeout());
  };
  // A rank that was killed cannot tell the other hosts itself.
  supervised.failed = [&](const RankFailure& failure) {
    if (alone || failure.kind == FailureKind::peer) return;
    at_most(std::chrono::milliseconds(1500),
            [text = fmt::format("{} on {}", failure.text, host_name()), url, size = plan.size] {
              const auto tell = url.path.empty()
                                    ? connect_tcp_store(url.host, url.port, std::chrono::milliseconds(500))
                                    : StorePtr(c10::make_intrusive<c10d::FileStore>(url.path, size));
              tell->compareSet("lockstep/failure", {}, to_bytes(text));
            });
  };
  Supervisor supervisor(std::move(supervised));
  const int code = supervisor.run();
  if (hosting && !alone) outlive_other_hosts(*store, plan.size, code == 0);
  return code;
}

}  // namespace detail

/// Runs `fn(World)` on every rank. Under torchrun (LOCAL_RANK is set) this process is one of them. Otherwise
/// it starts
/// `--nproc N` processes of this program with the same arguments, relays their lines and signals, ends all
/// when one fails, and returns the exit code: 0, what `fn` returned if not 0, 2 after a UsageError, 1 after
/// another exception, 128 + signal for a rank that was killed. `launch(argc, argv, fn)` should be the last
/// thing that main does.
///
/// By hand on several hosts, RANK is this host's first rank: `WORLD_SIZE=7 RANK=3 MASTER_ADDR=a
/// MASTER_PORT=29500 prog
/// --nproc 4` starts ranks 3 to 6. What `fn` throws ends the whole run: no destructor runs in the rank that
/// threw.
template <class Fn>
int launch(int argc, char** argv, Fn&& fn, const LaunchOptions& options = {}) {
  detail::end_on_uncaught();
  detail::LaunchPlan plan;
  try {
    plan = detail::plan_launch(argc, argv, options);
    if (!plan.worker) return detail::launch_here(plan, argc, argv, options);
  } catch (const Error& error) {
    detail::fail_process(detail::describe(std::current_exception()));
  }
  std::setvbuf(stdout, nullptr, _IOLBF,
               BUFSIZ);  // a rank that is killed must not take its last lines with it
  int code = 0;
  detail::run_without_handlers([&] {
    World world = World::from_environment();
    if constexpr (std::is_void_v<std::invoke_result_t<Fn, World>>) {
      fn(world);
    } else {
      code = fn(world);
    }
    world.leave(code);
  });
  return code;
}

}  // namespace lockstep
