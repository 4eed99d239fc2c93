#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::inline v0_1 {

/// Which ranks' output lines get the prefix `[rank 3] `. `automatic`: every rank but 0, so that rank 0's
/// output stays unchanged.
enum class Prefix { automatic, always, never };

/// The defaults of `launch`, and which flags override them on the command line: `--nproc N` (or
/// `--nproc-per-node N`), `--prefix auto|always|never` for `prefix`, `--timeout SECONDS`, `--threads N` for
/// WorldOptions::threads, by default its share, and `--max-restarts N`. `launch` leaves a flag to the program if
/// `nproc_flag`, `prefix_flag`, `timeout_flag`, `threads_flag` or `max_restarts_flag` is false.
struct LaunchOptions {
  /// Processes to start on this host if neither the flag nor the environment (RANK, WORLD_SIZE, a launcher)
  /// determines their number. 0: one per GPU in `gpus`; if that is empty, one per GPU, or 1 without GPUs.
  std::int64_t nproc = 0;
  bool nproc_flag = true;
  /// The GPUs to use, by the driver's indices, such as "0,1"; sets CUDA_VISIBLE_DEVICES of this process and of its ranks. Several
  /// ranks of a host must be as many. Empty: keeps its value, or all GPUs if it is unset.
  std::string gpus = {};
  /// The prefix of the lines that the ranks print.
  Prefix prefix = Prefix::automatic;
  bool prefix_flag = true;
  bool timeout_flag = true, threads_flag = true;
  /// How often all ranks are started again after one has failed; the same on every host. A program that loads its last
  /// checkpoint then goes on from there. TORCHELASTIC_RESTART_COUNT is the number of restarts so far. Without effect under a
  /// launcher that starts the ranks itself (torchrun, srun or mpirun for each rank). Not after a UsageError,
  /// calls that differ, a RendezvousError, Stopped or a signal to `launch`. Counterpart: torchrun's --max-restarts.
  std::int64_t max_restarts = 0;
  bool max_restarts_flag = true;
  /// How long the other ranks may take to end after one has failed, before they are killed.
  std::chrono::milliseconds grace{3000};
};

}  // namespace lockstep::inline v0_1

namespace lockstep::inline v0_1::detail {

/// A flag of `launch`, which option lets `launch` read it, and its help.
struct LaunchFlag {
  std::string_view usage;
  bool LaunchOptions::*is_read;
  std::string_view help;

  [[nodiscard]] std::string_view name() const { return usage.substr(0, usage.find(' ')); }
};
inline constexpr LaunchFlag launch_flags[] = {
    {"--nproc N", &LaunchOptions::nproc_flag, "processes to start on this host"},
    {"--prefix WHEN", &LaunchOptions::prefix_flag,
     "put the rank in front of output lines: auto, always or never"},
    {"--timeout SECONDS", &LaunchOptions::timeout_flag, "timeout of collectives (1800, or 600 on GPUs)"},
    {"--threads N", &LaunchOptions::threads_flag, "threads of each rank (its share of the cores)"},
    {"--max-restarts N", &LaunchOptions::max_restarts_flag,
     "how often all ranks are started again after a failure (0)"}};

}  // namespace lockstep::inline v0_1::detail
