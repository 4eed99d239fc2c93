#pragma once

#include <chrono>
#include <string>

namespace lockstep {

/// Which lines of the ranks get `[rank 3] ` in front. `automatic`: those of all ranks but 0, so that what
/// rank 0 alone prints stays as it is.
enum class Prefix { automatic, always, never };

/// The defaults of a launch. The command line overrides them: `--nproc N` (or `--nproc-per-node N`),
/// `--prefix auto|always|never`, `--timeout SECONDS`.
struct LaunchOptions {
  /// Processes to start on this host; 0: one for each of `gpus`, else one per GPU, or 2 where there is none.
  int nproc = 0;
  /// The flag that overrides `nproc`. Another name than the default replaces `--nproc-per-node` too, and an
  /// empty one leaves the number of processes to the program.
  std::string nproc_flag = "--nproc";
  /// The GPUs to use, by the driver's numbers as in "0,1": CUDA_VISIBLE_DEVICES of the ranks. Empty: those
  /// that it says already, or all.
  std::string gpus = {};
  Prefix prefix = Prefix::automatic;
  /// How long the other ranks may take to end, once one has failed, before they are killed.
  std::chrono::milliseconds grace{3000};
};

}  // namespace lockstep
