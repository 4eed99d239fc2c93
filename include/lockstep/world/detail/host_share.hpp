#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <iterator>
#include <optional>
#include <string>
#include <system_error>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/process.hpp"

/// A rank's share of its host: its GPU and its threads.
namespace lockstep::inline v0_1::detail {

/// Returns the number of GPUs in LaunchOptions::gpus, a list such as "0,1". Throws UsageError if it is malformed,
/// names a GPU twice, since two ranks would share it, or one that CUDA_VISIBLE_DEVICES excludes: it may
/// belong to another job.
inline int count_gpus(const std::string& list, const Variables& variables) {
  const auto visible = variables("CUDA_VISIBLE_DEVICES");
  const auto gpus = entries_of(list), allowed = entries_of(visible.value_or(""));
  for (const std::string& gpu : gpus) {
    const auto is_named = [number = whole_number(gpu)](auto& other) { return whole_number(other) == number; };
    if (whole_number(gpu).value_or(-1) < 0)
      throw UsageError(formatted("'{}' is not a list of device numbers such as 0,1", list));
    if (std::count_if(gpus.begin(), gpus.end(), is_named) > 1)
      throw UsageError(
          formatted("'{}' names GPU {} twice, and two ranks would share it: name each GPU once", list, gpu));
    if (visible && std::none_of(allowed.begin(), allowed.end(), is_named))
      throw UsageError(
          formatted("GPU {} is asked for, but CUDA_VISIBLE_DEVICES={} leaves it out: ask for those in it by "
                    "number, or unset it",
                    gpu, *visible));
  }
  return static_cast<int>(gpus.size());
}
/// Throws UsageError if a host has several ranks, and not as many as GPUs are listed.
inline void require_one_each(const std::string& gpus, int ranks) {
  if (const auto count = entries_of(gpus).size(); ranks > 1 && count != static_cast<std::size_t>(ranks))
    throw UsageError(formatted(
        "the GPUs {} contradict the number of processes on this host, {}: leave --nproc out, or let "
        "the launcher start {}",
        gpus, ranks, count));
}

/// Returns the GPU of a rank among the `visible` GPUs of its process: `wanted` if it is set, the only GPU if there is
/// one (srun can give each task its own), otherwise the local rank's, which srun with SLURM_GPUS_PER_TASK and ranks
/// that may share GPUs take modulo `visible`. Throws UsageError if there is none for this rank.
inline int gpu_of_rank(const Environment& rank, int visible, std::optional<int> wanted = std::nullopt,
                       const Variables& variables = process_variable) {
  const auto list = variables("CUDA_VISIBLE_DEVICES");
  const auto limit = list ? formatted(" (CUDA_VISIBLE_DEVICES={})", *list) : std::string();
  const auto seen = formatted("{} CUDA device{}{}", visible, visible == 1 ? "" : "s", limit);
  if (visible < 1)
    throw UsageError(
        formatted("rank {} has no GPU: there is no CUDA device{}. Is there a driver for this LibTorch "
                  "(nvidia-smi)? On CPUs use CpuComm",
                  rank.rank, limit));
  if (wanted && (*wanted < 0 || *wanted >= visible))
    throw UsageError(formatted("rank {} is to use GPU {}, but it sees {}: they are numbered from 0",
                               rank.rank, *wanted, seen));
  if (wanted) return *wanted;
  if (visible == 1) return 0;
  if (rank.local_rank < visible) return rank.local_rank;
  // srun --gpus-per-task shows each task its own GPUs, numbered from 0.
  const bool own_gpus = rank.launcher == "srun" && variables("SLURM_GPUS_PER_TASK");
  // A number, as NCCL reads it.
  const bool shares = whole_number(variables("NCCL_MULTI_RANK_GPU_ENABLE").value_or("")).value_or(0) != 0;
  if (own_gpus || shares) return rank.local_rank % visible;
  throw UsageError(
      formatted("rank {} is number {}{} on this host, which has {}: start at most {} ranks here "
                "(--nproc {}), or show them more devices",
                rank.rank, rank.local_rank + 1,
                rank.expected_local_rank ? std::string() : formatted(" of the {}", rank.local_size), seen,
                visible, visible));
}

/// Returns the number of GPUs that a program started here would see, without using CUDA: the driver's list,
/// or the device files if a container hides that list, limited by CUDA_VISIBLE_DEVICES.
inline int visible_gpus(const char* driver_folder = "/proc/driver/nvidia/gpus",
                        const char* device_folder = "/dev") {
  using Entries = std::filesystem::directory_iterator;
  std::error_code absent;
  auto present = std::distance(Entries(driver_folder, absent), Entries());
  if (present == 0)
    present = std::count_if(Entries(device_folder, absent), Entries(), [](const auto& entry) {
      const std::string name = entry.path().filename().string();
      return name.starts_with("nvidia") && whole_number(name.substr(6));
    });
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr || present == 0) return static_cast<int>(present);
  const std::string list = visible;
  if (list.empty() || list.starts_with("-1") || list == "NoDevFiles") return 0;
  return static_cast<int>(std::min(present, 1 + std::count(list.begin(), list.end(), ',')));
}

inline constexpr const char* share_of_cores = "its share of the cores";

/// Returns the number of threads of one of `ranks` ranks that share `host_cores` cores, where the rank itself
/// may run on `own_cores`: a launcher may bind it to its own part of them.
inline int thread_share(int own_cores, int host_cores, int ranks) {
  return std::max(1, std::min(own_cores, host_cores / std::max(1, ranks)));
}

/// Returns the number of threads of this rank under srun, mpirun or mpiexec, std::nullopt if they are not for
/// lockstep to set: OMP_NUM_THREADS or MKL_NUM_THREADS is set, the rank was started otherwise, or the
/// number of ranks of this host is unknown.
inline std::optional<int> launched_threads(const Environment& env,
                                           const Variables& variables = process_variable) {
  if (env.launcher.empty() || env.launcher == "torchrun" || env.store_is_hosted || !env.launched ||
      variables("OMP_NUM_THREADS") || variables("MKL_NUM_THREADS"))
    return std::nullopt;
  int host = 0;
  if (env.launcher == by_slurm.launcher) {
    // `srun -c 4` asks for the cores of a task; otherwise the tasks share those of the step.
    const auto cores = [&](const char* name) { return whole_number(variables(name).value_or("")); };
    const auto each = cores("SLURM_CPUS_PER_TASK");
    host = each ? *each * env.local_size : cores("SLURM_CPUS_ON_NODE").value_or(0);
  }
  // An unbound rank has the cores of the launcher's process, a bound one a part of them.
  if (host == 0)
    host = usable_cores(launcher_process(env.rank_variables.substr(0, env.rank_variables.find(','))));
  return thread_share(usable_cores(), host, env.local_size);
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
  return launched_here && launcher_process("OMP_NUM_THREADS") == getppid() ? share_of_cores
                                                                           : "OMP_NUM_THREADS";
}

}  // namespace lockstep::inline v0_1::detail
