#pragma once

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/process_wide.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/cpu_affinity.hpp"
#include "lockstep/world/detail/supervisor.hpp"
#include "lockstep/world/detail/worker.hpp"
#include "lockstep/world/environment.hpp"
#include "lockstep/world/launch_options.hpp"

namespace lockstep::detail {

/// Returns this process's original command line.
inline std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(file)), {});
  std::vector<std::string> arguments;
  for (std::size_t begin = 0; begin < all.size();) {
    const auto end = std::min(all.find('\0', begin), all.size());
    arguments.push_back(all.substr(begin, end - begin));
    begin = end + 1;
  }
  return arguments;
}

LOCKSTEP_PROCESS_WIDE inline int spawn_calls = 0;

}  // namespace lockstep::detail

namespace lockstep {

/// Starts `nproc` processes of this program, runs `fn(rank, nproc)` in each, and blocks until all have ended.
/// There is no rendezvous; `fn` may call `World::join` or `World::from_environment`. Output lines, signals
/// and exits are handled as by `launch`. Throws UsageError if `nproc` is not positive, ProcessError if a
/// process failed. An uncaught ProcessError is printed on one line and ends the program with the failed
/// process's exit code.
/// Counterpart: torch.multiprocessing.spawn.
///
/// Each process starts this program again with the same arguments, so main runs up to this call there too.
/// With several calls, each process skips the calls before its own, runs its own and ends with it.
template <class Fn>
void spawn(int nproc, Fn&& fn, Prefix prefix = Prefix::automatic) {
  detail::fill_standard_descriptors();
  detail::end_on_uncaught();
  detail::end_with_agent();
  const int call = detail::spawn_calls++;
  if (nproc < 1)
    throw UsageError(detail::formatted("spawn({}): the number of processes must be 1 or more", nproc));
  if (const auto wanted = process_variable("LOCKSTEP_SPAWN_CALL")) {
    if (std::to_string(call) != *wanted) return;
    const int rank = detail::integer_variable(process_variable, "LOCKSTEP_SPAWN_RANK", 0).value_or(0);
    unsetenv("LOCKSTEP_SPAWN_CALL");  // processes that fn starts are not part of this call
    detail::process_rank = rank;
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    detail::run_without_handlers([&] { fn(rank, nproc); });
    std::exit(0);
  }
  detail::SupervisorOptions options;
  options.arguments = detail::own_arguments();
  options.prefix = prefix;
  options.announce = false;
  for (int rank = 0; rank < nproc; ++rank) {
    detail::Job job{rank,
                    {detail::formatted("LOCKSTEP_SPAWN_CALL={}", call),
                     detail::formatted("LOCKSTEP_SPAWN_RANK={}", rank)}};
    if (!process_variable("OMP_NUM_THREADS"))
      job.environment.push_back(
          detail::formatted("OMP_NUM_THREADS={}", std::max(1, detail::usable_cores() / nproc)));
    options.jobs.push_back(std::move(job));
  }
  detail::RankFailure failure;
  options.failed = [&](const detail::RankFailure& first) { failure = first; };
  const int code = detail::Supervisor(std::move(options)).run();
  if (code == 0) return;
  if (failure.text.empty())
    failure.text = code > 128 ? detail::formatted("ended by signal {}", code - 128) : "a process failed";
  throw ProcessError(failure.text, code);
}

}  // namespace lockstep
