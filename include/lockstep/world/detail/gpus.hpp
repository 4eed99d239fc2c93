#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/environment.hpp"

namespace lockstep::detail {

/// Splits a list such as "0,1" at its commas. Keeps empty entries.
inline std::vector<std::string> entries_of(std::string_view list) {
  std::vector<std::string> entries;
  for (std::size_t begin = 0; begin <= list.size();) {
    const auto end = std::min(list.find(',', begin), list.size());
    entries.emplace_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return entries;
}

/// Parses a list of device numbers, such as "0,1". Throws UsageError if it is malformed or names a GPU twice,
/// since two ranks would share it.
inline std::vector<int> gpu_list(const std::string& list) {
  std::vector<int> gpus;
  for (const std::string& entry : entries_of(list)) {
    const auto number = whole_number(entry);
    if (!number || *number < 0)
      throw UsageError(detail::formatted("'{}' is not a list of device numbers such as 0,1", list));
    if (std::find(gpus.begin(), gpus.end(), *number) != gpus.end())
      throw UsageError(detail::formatted(
          "'{}' names GPU {} twice, and two ranks would share it: name each GPU once", list, *number));
    gpus.push_back(*number);
  }
  return gpus;
}

/// Returns CUDA_VISIBLE_DEVICES for a program that is to use `gpus`, in the driver's numbering. Throws
/// UsageError for a GPU that the variable, if set, excludes: it may belong to another job.
inline std::string visible_devices_of(const std::vector<int>& gpus, const Variables& variables) {
  const auto given = variables("CUDA_VISIBLE_DEVICES");
  std::vector<int> allowed;
  if (given)
    for (const std::string& entry : entries_of(*given)) {
      const auto number = whole_number(entry);
      if (!number)
        throw UsageError(detail::formatted(
            "GPUs are asked for by number ({}), but CUDA_VISIBLE_DEVICES={} names them otherwise: "
            "leave out the numbers, or unset it",
            joined(gpus, ","), *given));
      allowed.push_back(*number);
    }
  for (const int gpu : gpus)
    if (given && std::find(allowed.begin(), allowed.end(), gpu) == allowed.end())
      throw UsageError(detail::formatted(
          "GPU {} is asked for, but CUDA_VISIBLE_DEVICES={} leaves it out: ask for those in it, or "
          "unset it",
          gpu, *given));
  return joined(gpus, ",");
}

/// Returns whether the user allows two ranks on one GPU: NCCL_MULTI_RANK_GPU_ENABLE is a number other than 0,
/// as NCCL reads it.
inline bool may_share_gpu(const Variables& variables = process_variable) {
  const auto set = variables("NCCL_MULTI_RANK_GPU_ENABLE");
  return set && whole_number(*set).value_or(0) != 0;
}

/// Returns the GPU of a rank among the `visible` GPUs of its process: `wanted` if it is set, the only GPU if there is
/// one (srun can give each task its own), otherwise the local rank's, which srun with SLURM_GPUS_PER_TASK and ranks
/// that may share GPUs take modulo `visible`. Throws UsageError if there is none for this rank.
inline int gpu_of_rank(const Environment& rank, int visible, std::optional<int> wanted = std::nullopt,
                       const Variables& variables = process_variable) {
  const auto list = variables("CUDA_VISIBLE_DEVICES");
  const auto seen =
      detail::formatted("{} CUDA device{}{}", visible, visible == 1 ? "" : "s",
                        list ? detail::formatted(" (CUDA_VISIBLE_DEVICES={})", *list) : std::string());
  if (visible < 1)
    throw UsageError(detail::formatted(
        "rank {} has no GPU: there is no CUDA device{}. Is there a driver for this LibTorch "
        "(nvidia-smi)? On CPUs use GlooComm",
        rank.rank, list ? detail::formatted(" (CUDA_VISIBLE_DEVICES={})", *list) : std::string()));
  if (wanted && (*wanted < 0 || *wanted >= visible))
    throw UsageError(detail::formatted("rank {} is to use GPU {}, but it sees {}: they are numbered from 0",
                                       rank.rank, *wanted, seen));
  if (wanted) return *wanted;
  if (visible == 1) return 0;
  if (rank.local_rank < visible) return rank.local_rank;
  // srun --gpus-per-task shows each task its own GPUs, numbered from 0.
  const bool own_gpus = rank.launcher == "srun" && variables("SLURM_GPUS_PER_TASK");
  if (own_gpus || may_share_gpu(variables)) return rank.local_rank % visible;
  throw UsageError(detail::formatted(
      "rank {} is number {}{} on this host, which has {}: start at most {} ranks here "
      "(--nproc {}), or show them more devices",
      rank.rank, rank.local_rank + 1,
      rank.expected_local_rank ? std::string() : detail::formatted(" of the {}", rank.local_size), seen,
      visible, visible));
}

}  // namespace lockstep::detail
