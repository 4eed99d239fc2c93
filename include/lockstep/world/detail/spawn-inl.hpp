#pragma once

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/cpu_affinity.hpp"
#include "lockstep/world/detail/supervisor.hpp"
#include "lockstep/world/detail/worker.hpp"
#include "lockstep/world/environment.hpp"
#include "lockstep/world/launch_options.hpp"
#include "lockstep/world/spawn.hpp"

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

LOCKSTEP_INLINE void spawn_processes(int nproc, const std::function<void(int rank, int nproc)>& fn,
                                     Prefix prefix) {
  fill_standard_descriptors();
  end_on_uncaught();
  end_with_agent();
  const int call = spawn_calls++;
  if (nproc < 1)
    throw UsageError(detail::formatted("spawn({}): the number of processes must be 1 or more", nproc));
  if (const auto wanted = process_variable("LOCKSTEP_SPAWN_CALL")) {
    if (std::to_string(call) != *wanted) return;
    const int rank = integer_variable(process_variable, "LOCKSTEP_SPAWN_RANK", 0).value_or(0);
    unsetenv("LOCKSTEP_SPAWN_CALL");  // processes that fn starts are not part of this call
    process_rank = rank;
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    run_without_handlers([&] { fn(rank, nproc); });
    std::exit(0);
  }
  SupervisorOptions options;
  options.arguments = own_arguments();
  options.prefix = prefix;
  options.announce = false;
  for (int rank = 0; rank < nproc; ++rank) {
    Job job{rank,
            {detail::formatted("LOCKSTEP_SPAWN_CALL={}", call),
             detail::formatted("LOCKSTEP_SPAWN_RANK={}", rank)}};
    if (!process_variable("OMP_NUM_THREADS"))
      job.environment.push_back(detail::formatted("OMP_NUM_THREADS={}", std::max(1, usable_cores() / nproc)));
    options.jobs.push_back(std::move(job));
  }
  RankFailure failure;
  options.failed = [&](const RankFailure& first) { failure = first; };
  const int code = Supervisor(std::move(options)).run();
  if (code == 0) return;
  if (failure.text.empty())
    failure.text = code > 128 ? detail::formatted("ended by signal {}", code - 128) : "a process failed";
  throw ProcessError(failure.text, code);
}

}  // namespace lockstep::detail
