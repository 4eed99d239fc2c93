#pragma once

#if __has_include(<malloc.h>)
#include <malloc.h>
#endif
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/cpu_affinity.hpp"
#include "lockstep/world/detail/launch_plan.hpp"
#include "lockstep/world/detail/nccl_environment.hpp"
#include "lockstep/world/detail/supervisor.hpp"
#include "lockstep/world/detail/worker.hpp"
#include "lockstep/world/environment.hpp"
#include "lockstep/world/launch.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// Makes the heap keep memory that a training step frees, since the next step allocates the same blocks
/// again. glibc returns large blocks to the system, whose pages must then be cleared and mapped again: for
/// the MNIST example's network a thousand page faults per step, a tenth of its time. No-op if the user has
/// set glibc's own variables, or with another C library.
inline void keep_freed_memory() {
#ifdef __GLIBC__
  for (const char* name : {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"})
    if (std::getenv(name)) return;
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the maximum in glibc
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
#endif
}

/// Starts this host's ranks and hosts the store for all hosts. Returns the exit code.
inline int launch_here(const LaunchPlan& plan, int argc, const char* const* argv,
                       const LaunchOptions& options) {
  const bool alone = plan.rendezvous.empty();
  const auto url = alone ? RendezvousUrl{} : parse_rendezvous(plan.rendezvous);
  // A run on one host needs no shared secret.
  const auto secret = alone ? random_secret() : read_store_secret();
  std::optional<Listener> listener;
  if (plan.first == 0 && url.path.empty())
    listener = listen_as_rank_zero(
        {alone ? loopback_address() : url.host, url.port, secret, plan.rendezvous_origin});
  const bool hosting = listener.has_value();
  // Where all ranks are here, they need no address that leads to this host from elsewhere.
  const bool local = alone || (hosting && plan.nproc == plan.size && listener->host_is_elsewhere);
  const auto rendezvous =
      local ? detail::formatted("tcp://{}:{}", loopback_address(), listener->port) : plan.rendezvous;

  SupervisorOptions supervised;
  supervised.arguments.assign(argv, argv + argc);
  supervised.jobs = jobs_of(plan, rendezvous, secret);
  supervised.prefix = plan.prefix;
  supervised.grace = options.grace;
  StorePtr store;
  // The store's threads start after the ranks have been forked. Until then the ranks queue at the listener.
  supervised.started = [&] {
    if (hosting) store = host_store(std::move(*listener), secret, std::chrono::seconds(10));
  };
  // A killed rank cannot report its failure to the other hosts.
  supervised.failed = [&](Failure failure) {
    if (alone || failure.kind == FailureKind::consequence) return;
    failure.host = host_name();
    at_most(std::chrono::milliseconds(1500),
            [failure, url, secret, size = plan.size, process = process_name(failure.pid)] {
              const StoreEndpoint endpoint = url.path.empty() ? StoreEndpoint{url.host, url.port, secret}
                                                              : endpoint_on_board(read_board(url.path));
              const auto tell = connect_store(endpoint, std::chrono::milliseconds(500));
              if (is_of_another_run(*tell, size, failure.rank, process)) return;
              tell->publish({.kind = Event::failed, .failure = failure});
            });
  };
  supervised.ended_well = [&](int rank) {
    if (hosting) record_end(*store, rank);
  };
  Supervisor supervisor(std::move(supervised));
  const int code = supervisor.run();
  if (hosting && !alone) outlive_ranks(*store, plan.size, code == 0);
  return code == 0 && hosting ? code_of_mismatch(*store) : code;
}

LOCKSTEP_INLINE int launch_ranks(int argc, const char* const* argv,
                                 const std::function<int(const World&, int argc, char** argv)>& fn,
                                 const LaunchOptions& options) {
  fill_standard_descriptors();
  end_on_uncaught();
  end_with_agent();
  LaunchPlan plan;
  try {
    plan = plan_launch(argc, argv, options);
    if (!plan.worker) return launch_here(plan, argc, argv, options);
  } catch (const Error& error) {
    if (dynamic_cast<const UsageError*>(&error) != nullptr)
      tell_waiting_ranks(error.what(), options.rank_source);
    fail_process(failure_of(std::current_exception()));
  }
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // a killed rank must not lose its last lines
  keep_freed_memory();
  // Before any CUDA call: CUDA reads the variable once.
  if (!plan.visible_devices.empty()) setenv("CUDA_VISIBLE_DEVICES", plan.visible_devices.c_str(), 1);
  if (plan.timeout) setenv("LOCKSTEP_TIMEOUT", std::to_string(*plan.timeout).c_str(), 1);
  set_nccl_environment();
  int code = 0;
  run_without_handlers([&] {
    const World world = World::from_environment(plan.rank_source);
    auto arguments = program_arguments(argc, argv, options);
    bool stopped = false;
    const pid_t owner = getpid();
    try {
      code = exit_status(fn(world, static_cast<int>(arguments.size() - 1), arguments.data()));
      if (getpid() != owner) std::exit(code);  // a forked child: its main thread runs in the parent alone
    } catch (const Stopped& stop) {            // on every rank; any other exception still finds no handler
      world.log.warning("{}", stop.what());
      code = stopped_exit_code;
      stopped = true;
    }
    flush_stdout();
    world.leave(stopped ? 0 : code);  // all ranks leave in good order
  });
  return code;
}

/// Returns this process's original command line.
inline std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) arguments.push_back(argument);
  return arguments;
}

LOCKSTEP_PROCESS_WIDE inline int spawn_calls = 0;

/// Throws UsageError if a launcher has started this process as one of several ranks, each of which would spawn `nproc`
/// processes. RANK and WORLD_SIZE set by hand may number hosts, as in Python's programs with mp.spawn.
inline void require_no_launcher(int nproc, const Variables& given = process_variable) {
  const auto variables = without_batch_job(given);
  const auto found = find_launched_rank(variables, launched_rank);
  std::string launcher = found ? found->launcher : std::string();
  if (!found && integer_variable(variables, "WORLD_SIZE", 1).value_or(1) > 1)
    launcher = variables("LOCKSTEP_STORE_IS_HOSTED") ? "launch"
               : variables("TORCHELASTIC_RUN_ID")    ? "torchrun"
                                                     : "";
  if (launcher.empty()) return;
  throw UsageError(
      detail::formatted("spawn({}): {} has already started the ranks of this run ({}): start the program "
                        "without it, or call launch "
                        "instead of spawn",
                        nproc, launcher, found ? found->variables : "RANK, WORLD_SIZE"));
}

LOCKSTEP_INLINE void spawn_processes(int nproc, const std::function<void(int rank, int nproc)>& fn,
                                     Prefix prefix) {
  fill_standard_descriptors();
  end_on_uncaught();
  end_with_agent();
  const int call = spawn_calls++;
  if (nproc < 1)
    throw UsageError(detail::formatted("spawn({}): the number of processes must be 1 or more", nproc));
  require_no_launcher(nproc);
  if (const auto wanted = process_variable("LOCKSTEP_SPAWN_CALL")) {
    if (std::to_string(call) != *wanted) return;
    const int rank = integer_variable(process_variable, "LOCKSTEP_SPAWN_RANK", 0).value_or(0);
    unsetenv("LOCKSTEP_SPAWN_CALL");  // processes that fn starts are not part of this call
    process_rank = rank;
    in_spawned_process = true;
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    set_nccl_environment();
    run_without_handlers([&] { fn(rank, nproc); });
    std::exit(0);
  }
  SupervisorOptions options;
  options.arguments = own_arguments();
  options.prefix = prefix;
  options.announce = false;
  // At one fixed port, two runs of a program would otherwise mix their ranks. With RANK or WORLD_SIZE by hand,
  // processes of several calls may make one run.
  const bool alone =
      !process_variable("RANK") && integer_variable(process_variable, "WORLD_SIZE", 1).value_or(1) == 1;
  const auto secret = alone ? "LOCKSTEP_SPAWN_SECRET=" + random_secret() : "LOCKSTEP_SPAWN_SECRET";
  for (int rank = 0; rank < nproc; ++rank) {
    Job job{rank,
            {detail::formatted("LOCKSTEP_SPAWN_CALL={}", call),
             detail::formatted("LOCKSTEP_SPAWN_RANK={}", rank), secret}};
    if (!process_variable("OMP_NUM_THREADS"))
      job.environment.push_back(detail::formatted("OMP_NUM_THREADS={}", std::max(1, usable_cores() / nproc)));
    options.jobs.push_back(std::move(job));
  }
  std::string text;
  options.failed = [&](const Failure& first) { text = headline(first, std::vector<int>()); };
  const int code = Supervisor(std::move(options)).run();
  if (code == 0) return;
  if (text.empty())
    text = code > 128 ? detail::formatted("ended by signal {}", code - 128) : "a process failed";
  throw ProcessError(text, code);
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE std::vector<char*> program_arguments(int argc, const char* const* argv,
                                                     const LaunchOptions& options) {
  detail::Flags flags;
  if (options.nproc_flag) flags = detail::nproc_flags;
  if (options.prefix_flag) flags.push_back("--prefix");
  if (options.timeout_flag) flags.push_back("--timeout");
  std::vector<char*> kept;
  bool over = false;  // after `--`
  for (int i = 0; i < argc; ++i) {
    const std::string_view argument = argv[i];
    over = over || argument == "--";
    int match = 0;
    for (std::size_t f = 0; f < flags.size() && i > 0 && !over && match == 0; ++f)
      match = detail::matches_flag(argument, flags[f]);
    if (match == 0) kept.push_back(const_cast<char*>(argv[i]));  // argv of main, which a program may change
    if (match == 1) ++i;
  }
  kept.push_back(nullptr);
  return kept;
}

LOCKSTEP_INLINE std::optional<std::string> flag_without_value(int argc, const char* const* argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    if (text.empty()) return argv[i - 1][0] == '-' ? argv[i - 1] : detail::formatted("argument {}", i);
    if (text == "--") break;
    if (text.compare(0, 2, "--") == 0 && text.find('=') == text.size() - 1) return text;
  }
  return std::nullopt;
}

LOCKSTEP_INLINE std::string launch_help(const LaunchOptions& options) {
  std::string help;
  const auto add = [&](bool read, std::string_view flag, const std::string& text) {
    if (read) help += detail::formatted("  {:<22} {}\n", flag, text);
  };
  const auto nproc = options.nproc > 0 ? std::to_string(options.nproc) : "one per GPU, or 1 without GPUs";
  add(options.nproc_flag, "--nproc N", "processes to start on this host (" + nproc + ")");
  add(options.prefix_flag, "--prefix WHEN", "put the rank in front of output lines: auto, always or never");
  add(options.timeout_flag, "--timeout SECONDS", "timeout of collectives (1800, or 600 on GPUs)");
  return help;
}

}  // namespace lockstep
