#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>

#include "lockstep/detail/linkage.hpp"
#include "lockstep/world/detail/process.hpp"
#include "lockstep/world/environment.hpp"

namespace lockstep::detail {

inline constexpr const char* share_of_cores = "the cores of the host divided by its ranks";
inline constexpr const char* cores_of_rank = "the cores to which the launcher has bound each rank";

/// A number of threads, and what determines it, for messages.
struct ThreadShare {
  int threads = 1;
  const char* source = share_of_cores;
};

/// Returns the number of threads of one of `ranks` ranks that share `host_cores` cores, where the rank itself
/// may run on `own_cores`: a launcher may bind it to its own part of them.
inline ThreadShare thread_share(int own_cores, int host_cores, int ranks) {
  const int share = std::max(1, host_cores / std::max(1, ranks)), own = std::max(1, own_cores);
  return share <= own ? ThreadShare{share} : ThreadShare{own, cores_of_rank};
}

/// Returns the number of threads of this rank under srun, mpirun or mpiexec, std::nullopt if they are not for
/// lockstep to set: OMP_NUM_THREADS or MKL_NUM_THREADS is set, the rank was started otherwise, or the
/// number of ranks of this host is unknown.
inline std::optional<ThreadShare> launched_threads(const Environment& env,
                                                   const Variables& variables = process_variable) {
  if (env.launcher.empty() || env.launcher == "torchrun" || env.store_is_hosted || !env.launched ||
      variables("OMP_NUM_THREADS") || variables("MKL_NUM_THREADS"))
    return std::nullopt;
  const int own = usable_cores();
  int host = env.host_cores.value_or(0);
  if (host == 0) {
    // An unbound rank has the cores of the launcher's process, a bound one a part of them.
    const pid_t launcher = launcher_process(env.rank_variables.substr(0, env.rank_variables.find(',')));
    host = launcher > 0 ? usable_cores(launcher) : own;
  }
  return thread_share(own, host, env.local_size);
}

/// The number of threads that lockstep has set in this process, 0 if it has not, and what determines it; see
/// launched_threads().
LOCKSTEP_PROCESS_WIDE inline std::atomic<int> shared_threads{0};
LOCKSTEP_PROCESS_WIDE inline std::atomic<const char*> shared_threads_source{share_of_cores};

/// Returns what determines the number of threads of this process, `threads`, for messages. `launched_here`:
/// `launch` started the process.
inline std::string thread_source(int threads, bool launched_here,
                                 const Variables& variables = process_variable) {
  if (const int shared = shared_threads; shared > 0)
    return shared == threads ? shared_threads_source.load() : "the program";
  const auto given = variables("OMP_NUM_THREADS");
  if (!given) return variables("MKL_NUM_THREADS") ? "MKL_NUM_THREADS" : "the default of LibTorch";
  // MKL uses no more threads than there are cores.
  if (threads > whole_number(*given).value_or(threads)) return "the program";
  const bool inherited = started_with(getppid(), "OMP_NUM_THREADS").value_or(true);
  if (!inherited && launched_here) return share_of_cores;
  return !inherited && variables("TORCHELASTIC_RUN_ID") ? "OMP_NUM_THREADS of torchrun" : "OMP_NUM_THREADS";
}

}  // namespace lockstep::detail
