#pragma once

#include <chrono>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/world/detail/heap.hpp"
#include "lockstep/world/detail/launch_plan.hpp"
#include "lockstep/world/detail/supervisor.hpp"
#include "lockstep/world/detail/worker.hpp"
#include "lockstep/world/launch_options.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// Keeps the store alive until the ranks of the other hosts have finished: 5 minutes at most, or 2 s if a
/// rank of this host has failed.
inline void outlive_other_hosts(c10d::Store& store, int size, bool well) {
  const auto limit =
      std::chrono::steady_clock::now() + (well ? std::chrono::minutes(5) : std::chrono::seconds(2));
  std::vector<std::string> finished;
  for (int rank = 0; rank < size; ++rank) finished.push_back(World::finished_key(rank));
  try {
    while (!appear_within(store, finished, std::chrono::milliseconds(500)) &&
           std::chrono::steady_clock::now() < limit)
      if (well && published_failure(store)) {
        std::this_thread::sleep_for(std::chrono::seconds(1));  // other ranks may still read the failure
        return;
      }
  } catch (const c10::Error&) {  // the store is unreadable: stop waiting
  }
}

/// Starts this host's ranks and hosts the store for all hosts. Returns the exit code.
inline int launch_here(const LaunchPlan& plan, int argc, const char* const* argv,
                       const LaunchOptions& options) {
  const bool alone = plan.rendezvous.empty();
  const auto url = alone ? RendezvousUrl{} : parse_rendezvous(plan.rendezvous);
  const bool hosting = plan.first == 0 && url.path.empty();
  Listener listener;
  if (hosting) listener = listen_on(alone ? "127.0.0.1" : url.host, url.port);
  // A run on one host needs no shared secret.
  const auto secret = alone ? random_secret() : read_store_secret();
  const auto rendezvous = alone ? detail::formatted("tcp://127.0.0.1:{}", listener.port) : plan.rendezvous;

  SupervisorOptions supervised;
  supervised.arguments.assign(argv, argv + argc);
  supervised.jobs = jobs_of(plan, rendezvous, secret);
  supervised.prefix = plan.prefix;
  supervised.grace = options.grace;
  StorePtr store;
  // The store's threads start after the ranks have been forked. Until then the ranks queue at the listener.
  supervised.started = [&] {
    if (hosting) store = host_store(std::move(listener), secret, std::chrono::seconds(10));
  };
  // A killed rank cannot report its failure to the other hosts.
  supervised.failed = [&](const RankFailure& failure) {
    if (alone || failure.kind == FailureKind::peer) return;
    at_most(std::chrono::milliseconds(1500),
            [text = detail::formatted("{} on {}", failure.text, host_name()), url, secret, size = plan.size] {
              const StorePtr tell =
                  url.path.empty()
                      ? StorePtr(connect_store({url.host, url.port, secret}, std::chrono::milliseconds(500)))
                      : open_file_store(url.path, size);
              record_failure(*tell, text);
              StoreMailbox(tell, -1, size).notify_all_ranks();
            });
  };
  Supervisor supervisor(std::move(supervised));
  const int code = supervisor.run();
  if (hosting && !alone) outlive_other_hosts(*store, plan.size, code == 0);
  return code;
}

}  // namespace lockstep::detail

namespace lockstep {

/// Returns the command line without the flags that `launch` reads (see LaunchOptions) and their values, with
/// a final null pointer as in main's argv. For a program that parses its arguments before `launch`.
inline std::vector<char*> program_arguments(int argc, const char* const* argv,
                                            const LaunchOptions& options = {}) {
  return detail::program_arguments(argc, argv, options);
}

/// Returns the help text of the flags that `launch` reads, one line each, for the program's own `--help`.
inline std::string launch_help(const LaunchOptions& options = {}) {
  return detail::launch_help(options);
}

/// Runs `fn(World)` or `fn(World, argc, argv)` on every rank of the run. Call it as main's last statement.
///
/// Under torchrun (LOCAL_RANK is set) this process is one rank. Otherwise it starts `--nproc N` processes of
/// this program with the same arguments, relays their output lines and signals, and ends all of them when one
/// fails. Returns the exit code: 0; the nonzero value that `fn` returned; 2 after a UsageError; 1 after
/// another exception; 128 + signal for a killed rank.
/// Counterpart: torchrun.
///
/// `fn(World, int argc, char** argv)` gets the command line without lockstep's own flags (see LaunchOptions)
/// and their values, for the program's own parser. Arguments after `--` belong to the program.
///
/// Signals: forwards SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 to its ranks, whichever thread
/// receives them. A signal that is ignored at the start (`nohup`) stays ignored. A second SIGINT, SIGTERM or
/// SIGQUIT of the same kind kills the ranks; a second SIGHUP does not, since a closing terminal sends two.
///
/// Several hosts, started by hand: RANK is this host's first rank, so that this command starts ranks 3 to 6:
///
///   WORLD_SIZE=7 RANK=3 MASTER_ADDR=a MASTER_PORT=29500 prog --nproc 4
///
/// Any process that reaches that port can take part in the run, unless LOCKSTEP_STORE_SECRET is set to the
/// same text on all hosts.
///
/// `--timeout SECONDS` (or LOCKSTEP_TIMEOUT) sets the default timeout of collectives. A rank's heap keeps
/// freed memory, unless the user sets MALLOC_TRIM_THRESHOLD_. An exception from `fn` ends the whole run; no
/// destructor runs in the rank that threw.
template <class Fn>
int launch(int argc, const char* const* argv, Fn&& fn, const LaunchOptions& options = {}) {
  static_assert(std::is_invocable_v<Fn, World> || std::is_invocable_v<Fn, World, int, char**>,
                "lockstep: launch takes a function that is called as fn(World) or as fn(World, int argc, "
                "char** argv)");
  detail::fill_standard_descriptors();
  detail::end_on_uncaught();
  detail::end_with_agent();
  detail::LaunchPlan plan;
  try {
    plan = detail::plan_launch(argc, argv, options);
    if (!plan.worker) return detail::launch_here(plan, argc, argv, options);
  } catch (const Error& error) {
    detail::fail_process(detail::describe(std::current_exception()));
  }
  std::setvbuf(stdout, nullptr, _IOLBF,
               BUFSIZ);  // a killed rank must not lose its last lines
  detail::keep_freed_memory();
  // Before any CUDA call: CUDA reads the variable once.
  if (!plan.visible_devices.empty()) setenv("CUDA_VISIBLE_DEVICES", plan.visible_devices.c_str(), 1);
  if (plan.timeout) setenv("LOCKSTEP_TIMEOUT", std::to_string(*plan.timeout).c_str(), 1);
  int code = 0;
  detail::run_without_handlers([&] {
    World world = World::from_environment();
    auto arguments = detail::program_arguments(argc, argv, options);
    const auto call = [&]() -> decltype(auto) {
      if constexpr (std::is_invocable_v<Fn, World>)
        return fn(world);
      else
        return fn(world, static_cast<int>(arguments.size() - 1), arguments.data());
    };
    if constexpr (std::is_void_v<decltype(call())>)
      call();
    else
      code = detail::exit_status(call());
    detail::flush_stdout();
    world.leave(code);
  });
  return code;
}

}  // namespace lockstep
